"""Plans that are legal and most likely mistakes get a note; those without a step are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed import Trainer, UserError
from distributed.cli import main
from distributed.communication.environment import detect
from distributed.config import DistributedConfig
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.planner import warnings
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog


def plan_of(
    facts: Facts | None = None, gpus: int = 0, env: dict[str, str] | None = None, **fields: Any
) -> RunPlan:
    config = DistributedConfig(**{"num_processes": 1, **fields})
    joined = detect(env) if env else None
    return resolve(config, get_catalog(), facts or Facts(), Resources(gpus), joined)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "_count_cores", lambda: 2)


# Ranks and cores


@pytest.mark.usefixtures("two_cores")
def test_a_thousand_cpu_ranks_on_two_cores_get_a_warning() -> None:
    plan = plan_of(num_processes=1000)
    (note,) = plan.notes
    assert note == (
        "1000 CPU ranks run on this host of 2 cores: 500 ranks share a core, and more than 8 are slow."
        " Training continues. Use at most 16 ranks per host"
    )
    assert f"\nnote: {note}" in plan.summary()


@pytest.mark.usefixtures("two_cores")
def test_the_limit_is_eight_ranks_per_core_and_host() -> None:
    assert plan_of(num_processes=16).notes == ()
    assert len(plan_of(num_processes=17).notes) == 1
    place: dict[str, Any] = {"num_nodes": 2, "node_rank": 0, "rdzv_endpoint": "host:1"}
    assert not [note for note in plan_of(num_processes=32, **place).notes if "cores" in note]
    assert [note for note in plan_of(num_processes=34, **place).notes if "cores" in note]
    env = {"RANK": "0", "WORLD_SIZE": "17", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "17"}
    env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert plan_of(num_processes=None, env=env).notes[0].startswith("17 CPU ranks")


@pytest.mark.usefixtures("two_cores")
def test_ranks_on_gpus_or_on_other_hosts_are_not_counted() -> None:
    assert plan_of(num_processes=20, gpus=20).notes == ()
    assert not [note for note in plan_of(num_processes=20, backend="ray").notes if "cores" in note]


def test_the_cores_are_those_that_this_process_may_use() -> None:
    assert warnings._count_cores() >= 1


@pytest.mark.parametrize("field", ["num_processes", "num_gpus"])
def test_serial_refuses_two_ranks(field: str, capsys: pytest.CaptureFixture[str]) -> None:
    fields: dict[str, Any] = {"num_processes": None, field: 2}
    with pytest.raises(UserError, match=f"{field}: backend 'serial' cannot run 2 ranks"):
        plan_of(backend="serial", **fields)
    words = ["--backend", "serial", f"--{field.replace('_', '-')}", "2", "--dry-run"]
    assert main(["train", *words]) == 2
    assert "'serial' cannot run 2 ranks. Got 2. Backends that can: " in capsys.readouterr().err


# Samples and batch


def test_a_global_batch_above_the_dataset_gets_a_note() -> None:
    plan = plan_of(Facts(num_samples=10), num_processes=2, batch_size=4, gradient_accumulation_steps=2)
    assert plan.notes == (
        "the dataset has 10 samples, and a global batch 16 = 4 samples x 2 accumulated x 2 ranks: each epoch"
        " is one step on 10 samples",
    )
    assert plan_of(Facts(num_samples=16), global_batch_size=16).notes == ()
    assert plan_of(Facts(), global_batch_size=16).notes == ()


@pytest.mark.parametrize(
    ("facts", "fields"),
    [
        (Facts(num_samples=10, drop_last=True), {}),
        (Facts(num_samples=10), {"data": {"drop_last": True}}),
    ],
)
def test_an_epoch_without_a_step_is_refused(facts: Facts, fields: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        plan_of(facts, global_batch_size=16, **fields)
    assert str(caught.value) == (
        "train_loader: drop_last drops the only global batch: the dataset has fewer samples than a global"
        " batch 16 = 16 samples x 1 rank. Got '10 samples'. Allowed: at least 16 samples. Reduce the batch,"
        " or set drop_last to false."
    )
    assert plan_of(facts, global_batch_size=10, **fields).notes == ()


def test_the_field_of_the_configuration_is_stronger_than_the_loader() -> None:
    facts = Facts(num_samples=10, drop_last=True)
    assert len(plan_of(facts, global_batch_size=16, data={"drop_last": False}).notes) == 1


def test_fit_knows_its_samples(capsys: pytest.CaptureFixture[str]) -> None:
    """The run is exact (C1), and its first lines name both numbers."""
    data = (torch.randn(10, 4), torch.zeros(10, dtype=torch.long))
    given: Any = {"device": "cpu", "num_processes": 1, "batch_size": 32}
    history = Trainer(torch.nn.Linear(4, 2), **given).fit(data)
    assert history.steps["step"] == [1]
    assert "note: the dataset has 10 samples, and a global batch 32" in capsys.readouterr().out
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), 32, drop_last=True)
    with pytest.raises(UserError, match="Got '10 samples'"):
        Trainer(torch.nn.Linear(4, 2), device="cpu", num_processes=1).fit(loader)
