"""Settings of memory and speed in the plan: backends that cannot apply them, and ranks without an effect."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from distributed import UserError
from distributed.cli import main
from distributed.config import DistributedConfig
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog


def plan_of(gpus: int = 0, **fields: Any) -> RunPlan:
    config = DistributedConfig(**{"num_processes": 2, **fields})
    return resolve(config, get_catalog(), Facts(), Resources(gpus))


@pytest.mark.parametrize(
    ("fields", "able"),
    [
        ({"activation_checkpointing": "full"}, "deepspeed, fsdp, horovod, pytorch-ddp, serial"),
        ({"compile": "model"}, "deepspeed, fsdp, horovod, pytorch-ddp, serial"),
        ({"optimizer_offload": True}, "deepspeed, fsdp, horovod, pytorch-ddp, serial"),
        ({"optimizer_bits": 8}, "horovod, pytorch-ddp, serial"),
        ({"matmul_precision": "tf32"}, "deepspeed, fsdp, horovod, pytorch-ddp, serial"),
        ({"matmul_precision": "fp8"}, "fsdp, horovod, pytorch-ddp, serial"),
    ],
)
def test_tensorflow_refuses_them_and_names_the_backends_that_can(fields: dict[str, Any], able: str) -> None:
    (name,) = fields
    with pytest.raises(UserError) as caught:
        plan_of(backend="tensorflow", **fields)
    assert caught.value.field == name
    assert f"Backends that can: {able}" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"activation_checkpointing": "offload"}, "saves no more memory than full on CPU ranks"),
        ({"optimizer_offload": True}, "optimizer_offload changes nothing on CPU ranks"),
        ({"matmul_precision": "tf32"}, "tf32 changes nothing on CPU ranks"),
        ({"matmul_precision": "fp8"}, "fp8 is emulated on CPU ranks"),
    ],
)
def test_what_has_no_effect_on_cpu_ranks_gets_a_note(fields: dict[str, Any], text: str) -> None:
    assert [note for note in plan_of(**fields).notes if text in note]
    assert not plan_of(gpus=2, **fields).notes


def test_the_field_of_fsdp_is_an_alias() -> None:
    for section, field in ((True, "full"), (False, "none"), (True, None)):
        given = {} if field is None else {"activation_checkpointing": field}
        plan_of(backend="fsdp", fsdp={"activation_checkpointing": section}, **given)
    for section, field in ((True, "selective"), (False, "full"), (True, "none")):
        with pytest.raises(UserError, match=f"activation_checkpointing={field} contradicts it"):
            plan_of(
                backend="fsdp", fsdp={"activation_checkpointing": section}, activation_checkpointing=field
            )


def test_engines_with_an_offload_of_their_own_are_led_to_it() -> None:
    with pytest.raises(UserError, match=r"^optimizer_offload: .*true with fsdp\.cpu_offload=true"):
        plan_of(gpus=2, backend="fsdp", optimizer_offload=True)
    plan_of(gpus=2, backend="fsdp", optimizer_offload=True, fsdp={"cpu_offload": True})
    notes = plan_of(backend="deepspeed", zero_stage=1, optimizer_offload=True).notes
    assert "ZeRO stage 1, optimizer in host memory" in notes
    with pytest.raises(
        UserError, match=r"^optimizer_offload: ZeRO stage 0 steps the optimizer on the device"
    ):
        plan_of(backend="deepspeed", zero_stage=0, optimizer_offload=True)


def test_bits_are_a_flag_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--num-processes", "1", "--dry-run", "--optimizer-bits"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "8"])
    assert ended.value.code == 0
    assert main([*words, "16"]) == 2
    assert "optimizer_bits" in capsys.readouterr().err


def test_eight_bits_of_what_has_no_moments_are_refused() -> None:
    with pytest.raises(UserError, match="optimizer_bits=8 is for adamw and adam, and optimizer=sgd"):
        plan_of(optimizer="sgd", optimizer_bits=8)


@pytest.mark.parametrize(
    "fields", [{"optimizer_bits": 8}, {"matmul_precision": "fp8"}], ids=["optimizer_bits", "fp8"]
)
def test_a_missing_torchao_is_an_error_with_the_command(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UserError, match=r"torchao.*pip install 'distributed-trainer\[lowbit\]'"):
        plan_of(**fields)


@pytest.mark.parametrize("name", ["contiguous_memory_optimization", "number_checkpoints"])
def test_deepspeeds_own_block_is_refused_with_the_field_that_replaces_it(name: str) -> None:
    native = {"activation_checkpointing": {name: 4 if name == "number_checkpoints" else True}}
    with pytest.raises(
        UserError, match=r"calls deepspeed.checkpointing.*activation_checkpointing=full"
    ) as caught:
        plan_of(backend="deepspeed", deepspeed_config=native)
    assert caught.value.field == f"deepspeed_config.activation_checkpointing.{name}"
    off = {"activation_checkpointing": {"partition_activations": False, "profile": False}}
    plan_of(backend="deepspeed", deepspeed_config=off)


@pytest.mark.parametrize(
    ("section", "given", "mode"),
    [
        ({"partition_activations": True}, {}, "full"),
        ({"partition_activations": True, "cpu_checkpointing": True}, {}, "offload"),
        ({"cpu_checkpointing": True}, {"activation_checkpointing": "selective"}, "selective"),
        ({"cpu_checkpointing": False, "partition_activations": False}, {}, "none"),
    ],
)
def test_deepspeeds_own_block_is_ours(section: dict[str, Any], given: dict[str, Any], mode: str) -> None:
    found = plan_of(backend="deepspeed", deepspeed_config={"activation_checkpointing": section}, **given)
    assert found.config.activation_checkpointing == mode
    notes = [note for note in found.notes if "deepspeed_config.activation_checkpointing is" in note]
    assert len(notes) == (mode != "none")
    assert all(f"activation_checkpointing={mode}, which recomputes" in note for note in notes)


@pytest.mark.parametrize(
    ("section", "given", "message"),
    [
        (
            {"cpu_checkpointing": True},
            {"activation_checkpointing": "none"},
            "deepspeed_config contradicts it",
        ),
        ({"cpu_checkpointing": "maybe"}, {}, "cpu_checkpointing: not a value of it.* Got 'maybe'"),
        ({"cpu_checkpoint": True}, {}, "Did you mean 'cpu_checkpointing'"),
    ],
)
def test_a_wrong_block_of_deepspeed_is_named(
    section: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        plan_of(backend="deepspeed", deepspeed_config={"activation_checkpointing": section}, **given)
