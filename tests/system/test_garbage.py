"""When garbage is looked for, and that whoever says otherwise is heard."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed import Callback, Trainer
from distributed.system.garbage_collection import collect_as_usual, spare_imports
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    collect_as_usual()
    gc.set_threshold(*before)


def test_imports_are_spared_and_then_it_is_as_it_was() -> None:
    gc.set_threshold(500, 9, 8)
    spare_imports()
    spare_imports()
    assert gc.get_threshold()[0] > 10_000
    collect_as_usual()
    assert gc.get_threshold() == (500, 9, 8)
    collect_as_usual()
    assert gc.get_threshold() == (500, 9, 8)


def test_what_somebody_sets_meanwhile_holds() -> None:
    spare_imports()
    gc.set_threshold(1234)
    collect_as_usual()
    assert gc.get_threshold()[0] == 1234


def test_a_script_that_has_made_its_trainer_has_pythons_own_thresholds() -> None:
    """Its trainers and their states would else stay for long, where it trains one after the other."""
    before = gc.get_threshold()
    spare_imports()
    Trainer(nn.Linear(4, 2), device="cpu")
    assert gc.get_threshold() == before


class Says(Callback):
    """Write down the settings of the collector in a rank, when the run begins and in a step."""

    def __init__(self, path: str) -> None:
        self.path = path

    def _note(self) -> None:
        with open(self.path, "a") as file:
            print(gc.isenabled(), *gc.get_threshold(), gc.get_freeze_count(), file=file)

    def on_run_start(self, context: Any) -> None:
        self._note()

    def on_step_end(self, context: Any) -> None:
        self._note()


def test_a_rank_trains_with_pythons_own_thresholds(tmp_path: Path, rank_pool: RankPool) -> None:
    made = make_trainer(nn.Linear(4, 2), 2, rank_pool, callbacks=[Says(str(tmp_path / "said"))])
    made.fit((torch.randn(8, 4), torch.zeros(8, dtype=torch.long)), max_steps=1)
    start, step = (line.split() for line in (tmp_path / "said").read_text().splitlines())
    assert start[:-1] == step[:-1] == ["True", *map(str, gc.get_threshold())]
    assert int(start[-1]) < int(step[-1])  # a fork inherits frozen objects
