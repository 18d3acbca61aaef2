"""Guesses for unknown names: what other tools call our fields first, then the nearest spelling."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed import (
    DeepSpeedTrainer,
    DistributedConfig,
    FSDPTrainer,
    HorovodTrainer,
    PyTorchDDPTrainer,
    TensorFlowDistributedTrainer,
    Trainer,
    UserError,
)
from distributed.cli import main
from distributed.config.aliases import BACKENDS, FIELDS, NOT_FIELDS
from distributed.config.load import all_fields, parse_assignments, top_fields
from distributed.registry.catalog import get_catalog

NAMES = [
    ("lr", "Did you mean 'learning_rate'?"),
    ("resume", "Did you mean 'resume_from_checkpoint'?"),
    ("fp16", "Did you mean 'mixed_precision=fp16'?"),
    ("bf16", "Did you mean 'mixed_precision=bf16'?"),
    ("precision", "Did you mean 'mixed_precision'?"),
    ("world_size", "Did you mean 'num_gpus' or 'num_processes'?"),
    ("nproc_per_node", "Did you mean 'gpus_per_node'?"),
    ("devices", "Did you mean 'gpus_per_node' or 'num_gpus'?"),
    ("master_addr", "Did you mean 'rdzv_endpoint'?"),
    ("master_port", "Did you mean 'rdzv_endpoint'?"),
    ("strategy", "Did you mean 'backend'?"),
    ("max_epochs", "Did you mean 'epochs'?"),
    ("num_epochs", "Did you mean 'epochs'?"),
    ("accumulate_grad_batches", "Did you mean 'gradient_accumulation_steps'?"),
    ("per_device_train_batch_size", "Did you mean 'batch_size'?"),
    ("ddp", "Did you mean 'backend=pytorch-ddp'?"),
    ("deepspeed", "Did you mean 'backend=deepspeed' or 'deepspeed_config'?"),
    ("gradient_checkpointing", "Did you mean 'activation_checkpointing'?"),
    ("torch_compile", "Did you mean 'compile'?"),
    ("num_workers", "Set it in the DataLoader"),
    ("tp", "Did you mean 'parallel.tensor'?"),
    ("pp", "Did you mean 'parallel.pipeline'?"),
    ("dp", "Did you mean 'parallel.data'?"),
    ("device_id", "rank N of a host computes on its GPU N"),
    ("segment_lengths", "It belongs to the model"),
    ("cpu_offload", "Set zero.offload_optimizer=cpu under deepspeed"),
    # The name of one field in a section, and another spelling of an alias.
    ("drop_last", "Did you mean 'data.drop_last'?"),
    ("max_restarts", "Did you mean 'elastic.max_restarts'?"),
    ("LR", "Did you mean 'learning_rate'?"),
    # No alias: the nearest spelling.
    ("lerning_rate", "Did you mean 'learning_rate'?"),
    ("qqqqqq", "unknown configuration field 'qqqqqq'. `python"),
]


@pytest.mark.parametrize(("name", "said"), NAMES)
def test_an_unknown_name_proposes_the_field_that_is_meant(name: str, said: str) -> None:
    fields: dict[str, Any] = {name: 1}
    for action in (
        lambda: DistributedConfig(**fields),
        lambda: Trainer(torch.nn.Linear(2, 2), **fields),
        lambda: Trainer(torch.nn.Linear(2, 2), fields),
        lambda: parse_assignments([f"{name}=1"]),
    ):
        with pytest.raises(UserError) as caught:
            action()
        assert f"unknown configuration field '{name}'" in str(caught.value)
        assert said in str(caught.value)


def test_a_name_in_a_section_that_has_none_such() -> None:
    with pytest.raises(UserError, match=r"'data\.lr'\. Did you mean 'learning_rate'\?"):
        DistributedConfig(data={"lr": 1})
    with pytest.raises(UserError, match=r"Did you mean 'data\.verify'\?"):
        parse_assignments(["data.verfy=1"])


OFFLOADING = {
    "zero.offload_optimizer=cpu",
    "zero.offload_parameters=cpu",
    "fsdp.cpu_offload=true",
    "optimizer_offload=true",
}
"""Every remedy for ``cpu_offload``."""


@pytest.mark.parametrize(
    ("kind", "given", "remedies"),
    [
        (DeepSpeedTrainer, {}, {"zero.offload_optimizer=cpu"}),
        (DeepSpeedTrainer, {"zero_stage": 2}, {"zero.offload_optimizer=cpu"}),
        (DeepSpeedTrainer, {"zero_stage": 3}, {"zero.offload_optimizer=cpu", "zero.offload_parameters=cpu"}),
        (DeepSpeedTrainer, {"zero_stage": 0}, {"zero.offload_optimizer=cpu"}),
        (PyTorchDDPTrainer, {"deepspeed_config": {"zero_optimization": {"stage": 3}}},
         {"zero.offload_optimizer=cpu", "zero.offload_parameters=cpu"}),
        (PyTorchDDPTrainer, {"zero_stage": 1}, {"zero.offload_optimizer=cpu"}),
        (PyTorchDDPTrainer, {}, {"optimizer_offload=true"}),
        (HorovodTrainer, {}, {"optimizer_offload=true"}),
        (FSDPTrainer, {}, {"fsdp.cpu_offload=true"}),
        (Trainer, {"backend": "fsdp"}, {"fsdp.cpu_offload=true"}),
        (TensorFlowDistributedTrainer, {}, set()),
        (Trainer, {}, OFFLOADING),
    ],
)  # fmt: skip
def test_offloading_is_named_for_the_backend_that_is_known(
    kind: type[Trainer], given: dict[str, Any], remedies: set[str]
) -> None:
    with pytest.raises(UserError, match="unknown configuration field 'cpu_offload'") as caught:
        kind(torch.nn.Linear(2, 2), cpu_offload=True, **given)
    assert {remedy for remedy in OFFLOADING if remedy in str(caught.value)} == remedies
    assert ("zero_stage=1 or higher" in str(caught.value)) == (given.get("zero_stage") == 0)


def test_offloading_in_a_section_is_no_field_of_another_section() -> None:
    with pytest.raises(
        UserError, match=r"unknown configuration field 'zero\.cpu_offload'. Set zero\.offload"
    ):
        DeepSpeedTrainer(torch.nn.Linear(2, 2), zero={"cpu_offload": True})


@pytest.mark.parametrize(("name", "value"), [("fsdp", True), ("horovod", "on"), ("data", 3)])
def test_a_section_that_is_given_a_value_names_its_fields(name: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        DistributedConfig(**{name: value})
    text = str(caught.value)
    assert text.startswith(f"{name}: a section holds names and values. Got {value!r}. Allowed: {name}.")
    assert ("Set backend=" in text) == (name != "data")


def test_every_alias_names_fields_that_exist_and_is_none_itself() -> None:
    known = {*all_fields(), *top_fields()}
    assert {alias for alias in (*FIELDS, *NOT_FIELDS) if alias in known} == set()
    found = {part.partition("=")[0] for meant in FIELDS.values() for part in meant.split()}
    assert found <= known
    backends = {
        part.partition("=")[2] for meant in FIELDS.values() for part in meant.split() if "backend=" in part
    }
    assert backends <= set(get_catalog().backends)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("ddp", "Did you mean 'pytorch-ddp'?"),
        ("DDP", "Did you mean 'pytorch-ddp'?"),
        ("fsdp2", "Did you mean 'fsdp'?"),
        ("zero", "Did you mean 'deepspeed'?"),
        ("zero3", "Did you mean 'deepspeed' with zero_stage=3?"),
        ("deepspeed_stage_2", "Did you mean 'deepspeed' with zero_stage=2?"),
        ("tf", "Did you mean 'tensorflow'?"),
        ("hvd", "Did you mean 'horovod'?"),
        ("nccl", "It is a transport: communication_backend=nccl"),
        ("pytorch-dpp", "Did you mean 'pytorch-ddp'?"),
    ],
)
def test_an_unknown_backend_proposes_the_one_that_is_meant(
    value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="no backend is called") as caught:
        get_catalog().backend(value)
    assert said in str(caught.value)
    assert main(["train", "--backend", value, "--dry-run"]) == 2
    assert said in capsys.readouterr().err


def test_every_backend_alias_is_installed() -> None:
    assert {meant.partition(" ")[0] for meant in BACKENDS.values()} <= set(get_catalog().backends)
