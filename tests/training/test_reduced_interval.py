"""The vector that ranks sum at a log step: what one rank packs, every rank unpacks."""

from __future__ import annotations

import pytest

from distributed.training.reduced_interval import SENT, TIMED, ReducedInterval


def packed(rank: int, flags: tuple[bool, bool, bool, bool], size: int = 3) -> list[float]:
    seconds = {phase: rank + number / 10 for number, phase in enumerate(SENT)}
    seconds |= {"checksum": 7.0 + rank // 2, "settings": 11.0}
    return ReducedInterval.pack([1.0 + rank, 2.0], [4.0, 0.5], seconds, flags, rank, size)


def total(vectors: list[list[float]]) -> ReducedInterval:
    return ReducedInterval.unpack([sum(values) for values in zip(*vectors, strict=True)], 2, len(vectors))


def test_the_sum_holds_each_ranks_share() -> None:
    none = (False, False, False, False)
    flags = [none, (False, True, False, False), (False, True, False, True)]
    found = total([packed(rank, own) for rank, own in enumerate(flags)])
    assert (found.losses, found.counts) == ([6.0, 6.0], [12.0, 1.5])
    assert (found.same_replicas, found.same_settings) == (False, True)
    assert total([packed(rank, none) for rank in range(2)]).same_replicas
    assert [phases["data"] for phases in found.phases] == [0.0, 1.0, 2.0]
    assert [set(phases) for phases in found.phases] == [set(SENT)] * 3
    assert (found.wants_times, found.saved, found.stop, found.go) == (False, True, False, True)


@pytest.mark.parametrize("position", range(4))
def test_each_flag_has_its_place(position: int) -> None:
    flags = [number == position for number in range(4)]
    found = total([packed(0, (flags[0], flags[1], flags[2], flags[3]), 1)])
    assert [found.wants_times, found.saved, found.stop, found.go] == flags


def test_the_slowest_rank_sets_the_pace() -> None:
    found = total([packed(1, (False, False, False, False), 2)])
    slowest = sum(found.phases[1][name] for name in (*TIMED, "other"))
    assert found.steps_per_second == pytest.approx(2 / slowest)


def test_ranks_without_a_slot_send_as_many_numbers() -> None:
    none = (False, False, False, False)
    found = total([packed(rank, none, size=1) for rank in range(3)])
    assert len(packed(2, none, size=1)) == len(packed(0, none, size=1))
    assert [phases["data"] for phases in found.phases] == [0.0]
    assert found.losses == [6.0, 6.0]
