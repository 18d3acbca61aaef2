"""The vector that ranks sum at a log step: what one rank packs, every rank unpacks."""

from __future__ import annotations

import pytest

from distributed.training.phase_timers import PHASES
from distributed.training.reduced_interval import TIMED, ReducedInterval


def packed(rank: int, flags: tuple[bool, bool, bool], size: int = 3) -> list[float]:
    seconds = {phase: rank + number / 10 for number, phase in enumerate((*PHASES, "other"))}
    seconds |= {"checksum": 7.0 + rank, "settings": 11.0 + rank}
    return ReducedInterval.pack([1.0 + rank, 2.0], [4.0, 0.5], seconds, flags, rank, size)


def test_the_sum_holds_each_ranks_share() -> None:
    none = (False, False, False)
    vectors = [packed(0, none), packed(1, (True, False, False)), packed(2, (True, False, True))]
    found = ReducedInterval.unpack([sum(values) for values in zip(*vectors, strict=True)], 2)
    assert (found.losses, found.counts) == ([6.0, 6.0], [12.0, 1.5])
    assert found.checksums == [7.0, 8.0, 9.0]
    assert found.settings == [11.0, 12.0, 13.0]
    assert [phases["data"] for phases in found.phases] == [0.0, 1.0, 2.0]
    assert [set(phases) for phases in found.phases] == [{*PHASES, "other"}] * 3
    assert (found.saved, found.stop, found.go) == (True, False, True)


@pytest.mark.parametrize("position", range(3))
def test_each_flag_has_its_place(position: int) -> None:
    flags = [number == position for number in range(3)]
    found = ReducedInterval.unpack(packed(0, (flags[0], flags[1], flags[2]), 1), 2)
    assert [found.saved, found.stop, found.go] == flags


def test_the_slowest_rank_sets_the_pace() -> None:
    found = ReducedInterval.unpack(packed(1, (False, False, False), 2), 2)
    slowest = sum(found.phases[1][name] for name in (*TIMED, "other"))
    assert found.steps_per_second == pytest.approx(2 / slowest)
