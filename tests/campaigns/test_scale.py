"""Nothing on rank 0 or in a step grows faster with the number of ranks than declared, by the simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distributed.training.loop import TrainingLoop
from distributed.training.reduced_interval import SENT
from distributed.training.step_records import StepRecords
from distributed.training.stop_consensus import StopConsensus
from tests.campaigns.scale.growth import growth_of
from tests.campaigns.scale.inventory import INVENTORY, Item
from tests.campaigns.scale.loop_costs import loop_costs
from tests.campaigns.scale.peers import train
from tests.campaigns.scale.simulate import find_excess, simulate

SIZES = (128, 512)
"""From 64 ranks on, a log step has no times of single ranks."""
_FREQUENT = ("step", "log step", "second")


@pytest.mark.starts_processes
def test_no_cost_grows_faster_than_declared() -> None:
    found = {size: simulate(size, seconds=0.0) for size in SIZES}
    assert find_excess(INVENTORY, found) == []


@pytest.mark.parametrize(
    ("owner", "method", "name"),
    [
        (TrainingLoop, "_advance", "step bytes"),
        (StepRecords, "reduce", "log bytes"),
        (StopConsensus, "agree", "epoch bytes"),
    ],
)
def test_a_gather_in_a_step_is_detected(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, name: str
) -> None:
    inner = getattr(owner, method)

    def gathering(self: Any, *args: Any) -> Any:
        self.backend.gather_objects(None)
        return inner(self, *args)

    monkeypatch.setattr(owner, method, gathering)
    items = [item for item in INVENTORY if item.name == name]
    (line,) = find_excess(items, {size: loop_costs(size) for size in SIZES})
    assert "grows like N, declared is 1" in line


def test_the_times_of_many_ranks_are_sent_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = 8 * SIZES[0] * len(SENT)
    assert train(SIZES[0]).bytes["record"] < slots
    # In the first log step rank 0 asks for them, in the second they are sent.
    monkeypatch.setattr("distributed.training.step_records._TIMES", 0.0)
    assert slots < train(SIZES[0]).bytes["record"] < 2 * slots


def test_what_grows_has_a_reason_and_is_in_no_step_but_for_heartbeats() -> None:
    growing = [item for item in INVENTORY if item.growth not in ("1", "log N")]
    assert all(item.reason for item in growing)
    assert [item.name for item in growing if item.when in _FREQUENT] == ["heartbeats"]
    assert len({item.name for item in INVENTORY}) == len(INVENTORY)


def test_the_page_lists_every_cost_and_every_reason() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "scaling.md").read_text(encoding="utf-8")
    assert [item.name for item in INVENTORY if f"| {item.what} | {item.when} |" not in page] == []
    assert [item.name for item in INVENTORY if f"| {item.reason} |" not in page and item.reason] == []


@pytest.mark.parametrize(
    ("values", "growth"),
    [
        ({16: 5, 64: 5}, "1"),
        ({16: 4, 64: 6}, "log N"),
        ({1024: 1000, 4096: 4000, 16384: 16100}, "N"),
        ({16: 100, 64: 1600}, "N^2"),
        ({16: 1, 64: 100}, "more"),
        ({16: 0, 64: 0}, "1"),
        ({16: 0, 64: 64}, "more"),
    ],
)
def test_growth(values: dict[int, float], growth: str) -> None:
    assert growth_of(values) == growth


def test_excess_names_the_module() -> None:
    item = Item("store keys", "keys", "communication/rendezvous.py", "start", "store", "log N", "keys", "")
    (line,) = find_excess([item], {16: {"store keys": 16}, 64: {"store keys": 64}})
    assert line.startswith("store keys (communication/rendezvous.py) grows like N, declared is log N")
