"""Ranks that Ray Train starts train on their own between outer steps, as those of pytorch-ddp do: DiLoCo and
asynchronous SGD against their oracles, to 1e-9 in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from distributed.checkpoint.diff import differences
from distributed.checkpoint.reader import PortableReader
from distributed.testing.conformance import distance, problem, small_model
from tests.support.training import make_trainer
from tests.training.asynchronous_oracle import read_log, replay
from tests.training.low_communication_oracle import Oracle
from tests.training.test_low_communication import BATCH, DILOCO, LENGTH, OUTER, adamw, momentum

RANKS, STEPS = 2, 8  # one epoch


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.05")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


def train(section: dict[str, Any], **given: Any) -> tuple[nn.Module, Any]:
    """An epoch on ranks of Ray: the returned model, and the history."""
    model = small_model()
    fields = {
        "backend": "ray",
        "ray": {"inner": "pytorch-ddp"},
        "low_communication": section,
        "global_batch_size": BATCH,
        "epochs": 1,
    }
    return model, make_trainer(model, RANKS, **{**fields, **given}).fit(problem(LENGTH))


def test_diloco_trains_and_resumes_in_ray(ray_cluster: None, tmp_path: Path) -> None:
    """Outer steps after steps 3 and 6, and at the epoch's end. A run that resumes after step 4, where each
    rank has parameters and moments of its own, ends with the same bits in the model and the checkpoint."""
    given = {"optimizer": adamw, "deterministic": True, "checkpoint": {"every_n_steps": 4}}
    whole, history = train(DILOCO, folder=tmp_path / "whole", **given)
    assert (history.backend, history.world_size) == ("ray", RANKS)
    assert sum(record["outer_steps"] for record in history.logs) == 2
    oracle = Oracle(small_model, adamw, RANKS, period=3, **OUTER)
    oracle.train(*problem(LENGTH), BATCH, 1)
    assert distance(whole, oracle.workers[0]) < 1e-9

    start = str(tmp_path / "whole" / "step_00000004")
    resumed, _ = train(DILOCO, folder=tmp_path / "resumed", resume_from_checkpoint=start, **given)
    assert distance(resumed, whole) == 0.0
    ends = [PortableReader(str(tmp_path / name / f"step_{STEPS:08d}")) for name in ("whole", "resumed")]
    assert list(differences(*ends)) == []


def test_asynchronous_sgd_trains_in_ray_what_a_replay_of_its_log_trains(
    ray_cluster: None, tmp_path: Path
) -> None:
    """The path of the log is relative: ranks of Ray work where the caller does."""
    section = {"mode": "async-sgd", "max_staleness": 3, "arrival_log": "logs/arrivals.csv"}
    model, history = train(section, optimizer=momentum, epochs=2, log_every_n_steps=4)
    log = read_log(tmp_path / "logs" / "arrivals.csv")
    assert distance(model, replay(log, small_model, momentum, RANKS, *problem(LENGTH), BATCH)) < 1e-9
    assert max(row["staleness"] for row in log) <= 3
    for rank in range(RANKS):
        assert [row["step"] for row in log if row["worker"] == rank] == [*range(1, STEPS + 1)] * 2
    assert all(record["updates"] for record in history.logs)
