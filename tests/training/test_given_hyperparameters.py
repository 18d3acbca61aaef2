"""A resumed run takes the learning rate and the like as they were saved, or as they are given now."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from distributed import Callback, Trainer
from distributed.testing.conformance import problem, small_model

X, Y = problem(32)


class Rates(Callback):
    """Notes each step's learning rate and weight decay after it."""

    def __init__(self) -> None:
        self.rates, self.decays = list[float](), list[float]()

    def on_step_end(self, context: Any) -> None:
        group = context.optimizer.param_groups[0]
        self.rates.append(group["lr"])
        self.decays.append(group["weight_decay"])


def fit(folder: Path, epochs: int, resume: bool = False, **given: Any) -> Rates:
    note = Rates()
    fixed = {"backend": "serial", "batch_size": 8, "scheduler": "cosine", "checkpoint_dir": str(folder)}
    trainer = Trainer(small_model(), fixed, callbacks=[note], resume_from_checkpoint=resume, **given)
    trainer.fit((X, Y), epochs=epochs)
    return note


@pytest.mark.parametrize("kept", ["saved", "given"])
def test_a_resumed_run_takes_the_rate_that_is_asked_for(tmp_path: Path, kept: str) -> None:
    """Under a schedule, too: it stands where it stood, and goes on from the other rate."""
    fit(tmp_path, 1, learning_rate=0.1, weight_decay=0.5)
    now = {"learning_rate": 0.4, "weight_decay": 0.25}
    note = fit(tmp_path, 2, resume=True, checkpoint={"hyperparameters": kept}, **now)
    base, decay = (0.4, 0.25) if kept == "given" else (0.1, 0.5)
    steps, total = range(5, 9), 8
    assert note.rates == pytest.approx([base * (1 + math.cos(math.pi * n / total)) / 2 for n in steps])
    assert note.decays == [decay] * 4
