"""A run whose ranks are killed ends as the one left alone; and the check for it can fail."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distributed.testing.kill_runs import (
    CASES,
    Kill,
    Outcome,
    Reference,
    Scenario,
    reference_of,
    run_scenario,
)
from distributed.testing.kills import KINDS, choose, table

DDP = CASES["pytorch-ddp"]


@pytest.fixture(scope="module")
def references() -> Iterator[Mapping[int, Reference]]:
    """ranks -> the run that was left alone."""
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda ranks: reference_of(Scenario(DDP, ranks)), (2, 3)))
    yield {ranks: reference for ranks, (reference, _) in zip((2, 3), made, strict=True)}
    for _, home in made:
        shutil.rmtree(home)


KILLS = [
    Scenario(DDP, 2, (Kill(1, "step backward: half", 13),)),
    Scenario(DDP, 2, (Kill(0, "save shard write: half", 60), Kill(1, "resume: a tensor read", 3))),
    Scenario(
        DDP,
        2,
        (Kill(0, "save clean-up remove: begin"), Kill(1, "end run")),
        asynchronous=False,
    ),
    Scenario(DDP, 3, (Kill(0, "save step rename: end", 2),)),
    # In the third epoch: each save waits for the one before, so that there is something to resume from.
    Scenario(DDP, 3, (Kill(2, "evaluate forward: half", 6), Kill(0, "resume: engine warm"))),
]


@pytest.mark.parametrize("ranks", [2, 3])
def test_killed_runs_end_as_if_left_alone(ranks: int, references: Mapping[int, Reference]) -> None:
    mine = [scenario for scenario in KILLS if scenario.ranks == ranks]
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda scenario: run_scenario(scenario, references[ranks]), mine))
    for scenario, outcome in zip(mine, outcomes, strict=True):
        assert outcome.problems == [], scenario.kills
        assert outcome.reached == len(scenario.kills), scenario.kills


def test_the_table_counts_what_went_wrong() -> None:
    outcomes = [Outcome(reached=1), Outcome(reached=2, bits=["w"], samples=["step 3"]), Outcome(lost=["4"])]
    shown = table(list(zip(KILLS, outcomes, strict=False))).splitlines()
    assert "| `pytorch-ddp` | 2 | resume | 1 | 2 | 0 | 0 | 0 |" in shown
    assert shown[-1] == "| all | | | 3 | 3 | 2 | 2 | 1 |"


BROKEN = """
from distributed.training.state import TrainState


def replace(owner, name, function):
    assert hasattr(owner, name), f"nothing to break: {owner} has no {name}"
    setattr(owner, name, function)


def no_random_state():
    import distributed.training.state as state
    replace(state, "restore_rng", lambda saved: None)


def cursor_one_off():
    restore = TrainState.restore

    def off(self, common, rank):
        restore(self, common, rank)
        self.progress.samples += 1

    replace(TrainState, "restore", off)


def cold_engine():
    from distributed_backends.ddp.backend import DDPBackend
    replace(DDPBackend, "warm_up", lambda self, windows: None)


def older_checkpoint():
    from distributed.checkpoint.checkpointer import PortableCheckpointer
    candidates = PortableCheckpointer.candidates
    replace(PortableCheckpointer, "candidates", lambda self: iter(list(candidates(self))[1:]))
"""
SHOWN_BY = {
    ("no_random_state", 2): "bits",
    ("cursor_one_off", 2): "samples",
    ("cold_engine", 3): "bits",
    ("older_checkpoint", 2): "lost",
}


@pytest.mark.starts_processes
def test_what_is_broken_is_found(
    references: Mapping[int, Reference], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_resume.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    # In the second epoch, two checkpoints on.
    kill = Kill(0, "step optimizer: begin", 8)

    def run(form: tuple[str, int]) -> Outcome:
        name, ranks = form
        scenario = Scenario(DDP, ranks, (kill,), asynchronous=False, sabotage=f"broken_resume:{name}")
        return run_scenario(scenario, references[ranks])

    with ThreadPoolExecutor(2) as pool:
        outcomes = dict(zip(SHOWN_BY, pool.map(run, SHOWN_BY), strict=True))
    for form, where in SHOWN_BY.items():
        assert getattr(outcomes[form], where), f"{form}: {outcomes[form]}"


@pytest.mark.starts_processes
def test_the_seed_decides_the_points(references: Mapping[int, Reference]) -> None:
    def chosen(seed: int) -> list[Scenario]:
        draw = random.Random(seed)
        return [choose(draw, n, ("pytorch-ddp", 3), references[3]) for n in range(33)]

    assert chosen(5) == chosen(5)
    assert chosen(5) != chosen(6)
    assert {scenario.kind for scenario in chosen(5)} == set(KINDS)
    assert all(kill.rank in range(3) for scenario in chosen(5) for kill in scenario.kills)
