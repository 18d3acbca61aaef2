"""How operations are timed: in turns, on processors of their own or shared ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from distributed.operations.planning import measure_operations
from distributed.operations.planning.measure_host import measure_host, network
from distributed.operations.planning.measure_operations import Clock, measure_kinds
from distributed.planner.estimates.work_facts import MEASURED_KINDS

SECONDS = (0.001, 0.003, 0.5)


class FakeTime:
    """Clocks that only `spend` moves.

    Attributes:
        called: what has spent time, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, share: float = 1.0) -> None:
        self._now, self.called = 0.0, list[int]()
        monkeypatch.setattr(measure_operations, "perf_counter", lambda: self._now)
        monkeypatch.setattr(measure_operations, "process_time", lambda: self._now * share)

    def calls(self) -> list[Callable[[], None]]:
        """One for each of `SECONDS`."""
        return [lambda index=index: self._spend(index) for index in range(len(SECONDS))]  # type: ignore[misc]

    def _spend(self, index: int) -> None:
        self.called.append(index)
        self._now += SECONDS[index]


@pytest.mark.parametrize(("shared", "share"), [(False, 1.0), (True, 1.0), (True, 0.25)])
def test_operations_take_turns(shared: bool, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a process has a quarter of a processor: what counts is how long a call takes."""
    fake = FakeTime(monkeypatch, share)
    found = Clock(0.0201, "cpu", shared=shared, limit=60.0).in_turns(fake.calls())
    assert found == pytest.approx(SECONDS)
    numbers = [fake.called.count(index) for index in range(len(SECONDS))]
    rounds, repeats = measure_operations._ROUNDS, measure_operations._REPEATS
    # Each once before; 0.0201 s of a processor are 20.1 calls of the first, and 6.7 of the second.
    assert numbers == ([1 + 21, 1 + 7, 1 + repeats] if share == 1.0 else [1 + rounds, 1 + 27, 1 + repeats])
    mixed = fake.called[: len(SECONDS) * (1 + repeats)]
    assert sum(a == b for a, b in pairwise(mixed)) <= repeats  # only from one round to the next


def test_a_late_operation_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(monkeypatch)
    assert Clock(0.02, "cpu", limit=0.0).in_turns(fake.calls()) == pytest.approx(SECONDS)
    assert [fake.called.count(index) for index in range(len(SECONDS))] == [2, 2, 2]


def test_every_kind_is_measured() -> None:
    clock = Clock(1e-6, "cpu", limit=0.0)
    curves = measure_kinds(clock)
    assert set(curves) == set(MEASURED_KINDS)
    for curve in curves.values():
        sizes, seconds = zip(*curve, strict=True)
        assert list(sizes) == sorted(set(sizes))
        assert list(seconds) == sorted(seconds)


def test_what_steps_take_beyond_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of operations that take no time has all of the step, and that of slow ones none."""
    clock = Clock(1e-6, "cpu", limit=0.0)
    fast = dict.fromkeys(MEASURED_KINDS, ((1.0, 1e-12), (1000000000000000.0, 2e-12)))
    slow = dict.fromkeys(MEASURED_KINDS, ((1.0, 1000.0), (2.0, 2000.0)))
    times = measure_host(clock, fast)
    assert all(0 < each < 0.1 for each in times)
    assert measure_host(clock, slow) == (0.0, 0.0, 0.0)


def test_the_network_has_layers_of_a_transformer() -> None:
    model = network(2, 64)
    assert sum(1 for _ in model.parameters()) == 2 * 12
    assert model(torch.zeros(3, 16, 64)).shape == (3, 16, 64)
