"""A resumed run takes the learning rate and the like as they were saved, or as they are given now."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from distributed import Trainer
from distributed.testing.conformance import problem, small_model
from tests.support.training import OnStep

X, Y = problem(32)


def fit(folder: Path, epochs: int, resume: bool = False, **given: Any) -> list[dict[str, Any]]:
    """The optimizer's parameter group after each step."""
    groups: list[dict[str, Any]] = []
    note = OnStep(lambda context: groups.append(dict(context.optimizer.param_groups[0])))
    fixed = {"backend": "serial", "batch_size": 8, "scheduler": "cosine", "checkpoint_dir": str(folder)}
    trainer = Trainer(small_model(), fixed, callbacks=[note], resume_from_checkpoint=resume, **given)
    trainer.fit((X, Y), epochs=epochs)
    return groups


@pytest.mark.parametrize("kept", ["saved", "given"])
def test_a_resumed_run_takes_the_rate_that_is_asked_for(tmp_path: Path, kept: str) -> None:
    """Under a schedule, too: it stands where it stood, and goes on from the other rate."""
    fit(tmp_path, 1, learning_rate=0.1, weight_decay=0.5)
    now = {"learning_rate": 0.4, "weight_decay": 0.25}
    groups = fit(tmp_path, 2, resume=True, checkpoint={"hyperparameters": kept}, **now)
    base, decay = (0.4, 0.25) if kept == "given" else (0.1, 0.5)
    steps, total = range(5, 9), 8
    assert [group["lr"] for group in groups] == pytest.approx(
        [base * (1 + math.cos(math.pi * n / total)) / 2 for n in steps]
    )
    assert [group["weight_decay"] for group in groups] == [decay] * 4
