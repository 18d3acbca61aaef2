"""Settings of constructors elsewhere, split into those of the model and those of the run."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from distributed import UserError, split_settings
from distributed.config import DistributedConfig
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog

MODEL = {"embed_dim": 64, "num_heads": 12, "segment_lengths": [8], "dilation_rates": [1]}
ZERO = {"use_deepspeed": True}
SEQUENCE, LAYERS = {"use_sequence_parallel": True}, {"use_model_parallel": True}
OFF = dict.fromkeys(("use_deepspeed", "use_sequence_parallel", "use_model_parallel", "cpu_offload"), False)


def plan_of(run: dict[str, Any], gpus: int = 0) -> RunPlan:
    return resolve(DistributedConfig(**run), get_catalog(), Facts(), Resources(gpus))


def fsdp(reshard: bool, **more: Any) -> dict[str, Any]:
    return {"backend": "fsdp", "fsdp": {"reshard_after_forward": reshard, **more}}


@pytest.mark.parametrize(
    ("settings", "ranks", "expected"),
    [
        ({**OFF, "use_gradient_checkpointing": False}, 2, {}),
        ({"use_gradient_checkpointing": True}, 2, {"activation_checkpointing": "full"}),
        ({"use_bf16": True, "use_fp16": False}, 2, {"mixed_precision": "bf16"}),
        ({"use_bf16": False, "use_fp16": True}, 2, {"mixed_precision": "fp16"}),
        (ZERO, 2, {"backend": "deepspeed"}),
        ({"zero_stage": 2}, 2, {"zero_stage": 2}),
        ({"zero_stage": 2, "cpu_offload": True}, 2,
         {"zero_stage": 2, "zero": {"offload_optimizer": "cpu"}}),
        ({**ZERO, "zero_stage": 3, "cpu_offload": True}, 2,
         {"backend": "deepspeed", "zero_stage": 3,
          "zero": {"offload_optimizer": "cpu", "offload_parameters": "cpu"}}),
        ({"cpu_offload": True}, 2, {"optimizer_offload": True}),
        ({"cpu_offload": True, "backend": "fsdp"}, 2, {"backend": "fsdp", "fsdp": {"cpu_offload": True}}),
        # Axes, for which the backend changes.
        (SEQUENCE, 8, {"parallel": {"context": 2}}),
        ({"sequence_parallel": True}, 9, {"parallel": {"context": 3}}),
        ({"model_parallel": True}, 6, {"parallel": {"tensor": 2}}),
        ({**LAYERS, "num_heads": 9}, 6, {"parallel": {"tensor": 3}}),
        ({**SEQUENCE, **LAYERS}, 4, {"parallel": {"tensor": 2, "context": 2}}),
        ({**SEQUENCE, **LAYERS}, 1, {}),
        ({**ZERO, **SEQUENCE}, 1, {"backend": "deepspeed"}),
        ({**ZERO, **SEQUENCE, "zero_stage": 0}, 4, {"parallel": {"context": 2}, "backend": "pytorch-ddp"}),
        ({**ZERO, **SEQUENCE, "zero_stage": 1}, 4, {"parallel": {"context": 2}, **fsdp(False)}),
        ({**ZERO, **SEQUENCE}, 4, {"parallel": {"context": 2}, **fsdp(False)}),
        ({**ZERO, **SEQUENCE, "zero_stage": 3}, 4, {"parallel": {"context": 2}, **fsdp(True)}),
        ({"zero_stage": 3, **LAYERS}, 4, {"parallel": {"tensor": 2}, **fsdp(True)}),
        ({**ZERO, **SEQUENCE, "cpu_offload": True}, 4,
         {"parallel": {"context": 2}, **fsdp(False, cpu_offload=True)}),
        ({**ZERO, **SEQUENCE, "cpu_offload": True}, 2,
         {"parallel": {"context": 2}, "backend": "pytorch-ddp", "optimizer_offload": True}),
        # The batch, and fields of ours.
        ({"train_batch_size": 64, "micro_batch_size": 4, "gradient_accumulation_steps": 4}, 4,
         {"global_batch_size": 64, "batch_size": 4, "gradient_accumulation_steps": 4}),
        ({"fsdp.reshard_after_forward": False, **ZERO, **SEQUENCE}, 4,
         {"parallel": {"context": 2}, **fsdp(False)}),
    ],
)  # fmt: skip
def test_the_run_is_what_the_settings_ask_for_and_can_be_planned(
    settings: dict[str, Any], ranks: int, expected: dict[str, Any]
) -> None:
    model, run = split_settings({**MODEL, **settings}, num_processes=ranks)
    assert model == {**MODEL, **{name: value for name, value in settings.items() if name in MODEL}}
    assert run == {"num_processes": ranks, **expected}
    assert plan_of(run).spec.name == plan_of(run, gpus=ranks).spec.name


def test_each_choice_is_printed_and_returned(capsys: pytest.CaptureFixture[str]) -> None:
    found = split_settings({**MODEL, **ZERO, **SEQUENCE, "zero_stage": 3}, num_processes=4)
    assert len(found.notes) == 2
    assert "parallel.context=2, and 2 such groups of ranks have different samples" in found.notes[0]
    assert "cannot have several ranks along context; backend=fsdp with" in found.notes[1]
    assert "shards as ZeRO 3" in found.notes[1]
    assert capsys.readouterr().out == "".join(f"note: {note}\n" for note in found.notes)
    alone = split_settings({**MODEL, **ZERO, **SEQUENCE}, num_processes=2)
    assert "backend=pytorch-ddp trains the same (no ranks remain over which to shard)" in alone.notes[1]
    assert "1 rank divides nothing" in split_settings(SEQUENCE, num_processes=1).notes[0]
    left_out = split_settings({"use_deepspeed": False, "zero_stage": 2}, num_processes=2)
    assert "zero_stage" not in left_out.run
    assert "zero_stage=2 is left out" in left_out.notes[0]
    assert not split_settings({**MODEL, **ZERO, "zero_stage": 2}, num_processes=2).notes


def test_given_sizes_are_used_as_they_are() -> None:
    both = {**MODEL, **ZERO, **SEQUENCE, **LAYERS}
    given = split_settings(both, num_processes=8, parallel={"context": 4, "context_attention": "dilated"})
    assert given.run["parallel"] == {"context": 4, "context_attention": "dilated", "tensor": 2}
    assert given.run["backend"] == "pytorch-ddp"
    one = split_settings(both, num_processes=4, parallel={"context": 1})
    assert one.run["parallel"] == {"context": 1, "tensor": 2}
    assert one.run["backend"] == "fsdp"
    # Without any switch, and where no number of ranks is known.
    assert split_settings(MODEL, parallel={"context": 2}).run == {"parallel": {"context": 2}}
    own = split_settings({**MODEL, **ZERO, "parallel": {"tensor": 2}}, num_processes=4)
    assert own.run["backend"] == "fsdp"


def test_a_launcher_gives_the_number_and_its_rank_0_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**place, "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    found = split_settings({**MODEL, **SEQUENCE})
    assert found.run == {"num_processes": 4, "parallel": {"context": 2}}
    assert found.notes
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        ({"use_deepspeed": "yes"}, 2, r"^use_deepspeed: a switch. Got 'yes'\. Allowed: True or False"),
        ({"use_bf16": True, "use_fp16": True}, 2, r"^use_bf16, use_fp16: one precision"),
        ({**ZERO, "zero_stage": 4}, 2, r"^zero_stage: no stage of ZeRO. Got 4\. Allowed: 0, 1, 2, 3"),
        ({**ZERO, "zero_stage": 0, "cpu_offload": True}, 2, r"^cpu_offload: .*Set zero_stage=1 or higher"),
        ({**SEQUENCE, **LAYERS}, 2, r"^num_processes: use_sequence_parallel needs .*, and 2.*4 and more"),
        ({**LAYERS, "num_heads": 4}, 3, r"also divide num_heads=4.*parallel=\{'tensor': 1\}"),
        (SEQUENCE, None, r"^num_processes: use_sequence_parallel divides .* Pass num_processes"),
        ({"lr": 0.1}, 2, r"^lr: .*Give learning_rate\."),
        ({"num_workers": 4}, 2, r"^num_workers: .*Set it in the DataLoader"),
        ({**ZERO, "backend": "fsdp"}, 2, r"^backend: settings of another name stand for backend=deepspeed"),
        ({"train_batch_size": 64, "global_batch_size": 32}, 2, r"^global_batch_size: .*Got 32. Allowed: 64"),
    ],
)  # fmt: skip
def test_what_contradicts_is_refused(settings: dict[str, Any], ranks: int | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        split_settings({**MODEL, **settings}, num_processes=ranks)


def test_the_batch_of_the_guide_is_that_of_4_ranks() -> None:
    """64 samples are 4 x 4 x 4; on other ranks the three numbers contradict each other."""
    batch = {"train_batch_size": 64, "micro_batch_size": 4, "gradient_accumulation_steps": 4}
    _, run = split_settings({**MODEL, **ZERO, **batch}, num_processes=4)
    assert plan_of(run).batch.global_batch_size == 64
    _, run = split_settings({**MODEL, **ZERO, **batch}, num_processes=2)
    with pytest.raises(UserError, match=r"^global_batch_size: "):
        plan_of(run)


def test_offloading_where_no_rank_shards_is_refused_under_fsdp() -> None:
    """All ranks share each sequence; `split_settings` chooses what offloads there."""
    run: dict[str, Any] = {"num_processes": 2, "parallel": {"context": 2}}
    with pytest.raises(UserError, match=r"^fsdp\.cpu_offload: all ranks have the same samples"):
        plan_of({**run, "backend": "fsdp", "fsdp": {"cpu_offload": True}}, gpus=2)
    plan_of({**run, "backend": "pytorch-ddp", "optimizer_offload": True}, gpus=2)
    plan_of({**run, "num_processes": 4, "backend": "fsdp", "fsdp": {"cpu_offload": True}}, gpus=4)


@pytest.mark.starts_processes
def test_no_framework_is_imported() -> None:
    code = (
        "import sys; from distributed import split_settings as split;"
        f"split({ {**MODEL, **ZERO, **SEQUENCE} }, num_processes=4);"
        "assert not {'torch', 'deepspeed'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
