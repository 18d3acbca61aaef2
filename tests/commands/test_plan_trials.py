"""``plan --verify`` refuses what this machine cannot train, before it builds a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distributed import Trainer, UserError
from distributed.cli import main
from distributed.operations.planning import numbers_trial, plan_numbers, trial_limits
from distributed.planning import plan, verify
from distributed.system.host_memory import Room

NUMBERS = ["--layers", "2", "--hidden", "64", "--heads", "2", "--vocabulary", "256", "--sequence", "32"]
SCRIPT = """
import torch
from torch import nn
from distributed import Trainer

Trainer(nn.Linear(8, 4), global_batch_size=8).fit((torch.randn(64, 8), torch.randint(0, 4, (64,))))
"""


def _never(*args: Any, **fields: Any) -> Any:
    raise AssertionError("the machine was not checked before")


@pytest.fixture
def few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_limits, "visible_gpus", lambda: 1)


@pytest.mark.usefixtures("few_gpus")
def test_missing_gpus_are_found_before_anything_is_planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(numbers_trial, "decoder_of", _never)
    monkeypatch.setattr(plan_numbers, "table_of", _never)
    monkeypatch.setattr("distributed.operations.planning.plan_task.table_of", _never)
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    for subject in (["--parameters", "7e9"], ["--script", str(tmp_path / "train.py")]):
        assert main(["plan", *subject, "--hardware", "H100", "--devices", "2", "--verify"]) == 2
        error = capsys.readouterr().err
        assert "--verify: a plan for 2 x H100 cannot be tried with the GPUs that are visible here" in error
        assert "Got 1. Allowed: 2 or more" in error
        assert "--hardware CPU" in error


@pytest.mark.usefixtures("few_gpus")
def test_ranks_may_share_a_gpu_over_gloo() -> None:
    from distributed.config import load
    from distributed.operations.planning.options import PlanOptions

    options = PlanOptions(hardware="H100", num_devices=2)
    with pytest.raises(UserError, match="cannot be tried with the GPUs"):
        trial_limits.check_devices(options, load())
    trial_limits.check_devices(options, load(None, {"device": "cuda", "communication_backend": "gloo"}))
    trial_limits.check_devices(PlanOptions(hardware="H100", num_devices=1), load())
    trial_limits.check_devices(PlanOptions(hardware="CPU", num_devices=8), load())


def test_a_model_larger_than_the_host_is_not_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice 4 bytes for each of 1.2e5 parameters, of which a kilobyte is left."""
    monkeypatch.setattr(numbers_trial, "decoder_of", _never)
    monkeypatch.setattr(trial_limits, "host_memory", lambda: Room(2**10, "the free memory of the host"))
    words = [*NUMBERS, "--hardware", "CPU", "--devices", "1", "--axes", "data", "--verify"]
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert "--verify: the host has too little memory for" in error
    assert "the free memory of the host" in error
    assert "--verify-layers" in error


def test_ranks_larger_than_the_host_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randn(64, 8), torch.randn(64, 1)
    fields: dict[str, Any] = {"backend": "pytorch-ddp", "global_batch_size": 4, "device": "cpu"}
    model, loss = nn.Sequential(nn.Linear(8, 2**17), nn.Linear(2**17, 1)), nn.MSELoss()
    plans = plan(model, data, loss_fn=loss, hardware="CPU", num_devices=1, **fields)
    trainer = Trainer(model, loss_fn=loss, num_processes=1, **fields)
    monkeypatch.setattr(Trainer, "fit", _never)
    monkeypatch.setattr(trial_limits, "host_memory", lambda: Room(2**20, "the free memory of the host"))
    with pytest.raises(UserError, match="the host has too little memory for 1 rank"):
        verify(plans, trainer, data, steps=3)
