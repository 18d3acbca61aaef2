"""Phase timers, the straggler sentence, memory and utilisation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.training.phase_timers import (
    PHASES,
    PhaseTimers,
    find_straggler,
    gpu_utilisation,
    memory_metrics,
)

EVEN = {"data": 0.2, "forward": 0.3, "backward": 0.4, "communication": 0.0, "optimizer": 0.1}


def ranks(num: int, **odd: dict[str, float]) -> list[dict[str, float]]:
    """`num` equal ranks, of which ``rank<r>`` differs in some phases."""
    return [EVEN | odd.get(f"rank{r}", {}) for r in range(num)]


def name_straggler(per_rank: list[dict[str, float]]) -> str | None:
    found = find_straggler(per_rank)
    return found[1] if found else None


def test_a_snapshot_holds_the_seconds_since_the_last_one():
    timers = PhaseTimers()
    timers.add("data", 0.25)
    timers.add("data", 0.5)
    timers.add("save", 2.0)
    assert timers.snapshot_and_reset() == dict.fromkeys(PHASES, 0.0) | {"data": 0.75, "save": 2.0}
    timers.add("forward", 1.0)
    assert timers.snapshot_and_reset() == dict.fromkeys(PHASES, 0.0) | {"forward": 1.0}


def test_an_unknown_phase_is_refused():
    with pytest.raises(KeyError):
        PhaseTimers().add("bakcward", 1.0)


def test_the_slow_rank_and_its_phase_are_named():
    assert name_straggler(ranks(4, rank3={"data": 0.48})) == (
        "rank 3 spends 140 % more time in data than the median rank"
    )


def test_waiting_in_a_later_phase_does_not_hide_the_straggler():
    # Under DDP ranks 0 to 2 wait for rank 3 inside backward, under FSDP in forward already:
    # every rank's total is 1.4 s.
    for waiting in ({"backward": 0.8}, {"forward": 0.7}):
        found = ranks(4, rank0=waiting, rank1=waiting, rank2=waiting, rank3={"data": 0.6})
        assert name_straggler(found) == "rank 3 spends 200 % more time in data than the median rank"


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
def test_each_phase_of_a_ranks_own_work_can_be_blamed(phase):
    sentence = name_straggler(ranks(3, rank1={phase: EVEN[phase] + 0.3}))
    assert sentence is not None
    assert sentence.startswith("rank 1 spends ")
    assert f"in {phase} " in sentence


def test_of_two_ranks_the_faster_one_is_the_measure():
    assert name_straggler(ranks(2, rank0={"forward": 0.6})) == (
        "rank 0 spends 100 % more time in forward than the median rank"
    )


def test_a_rank_that_is_beyond_no_median_of_a_phase_is_compared_with_the_median_rank():
    found = [{"forward": 0.05, "backward": 0.05}, {"forward": 0.05}, {"backward": 0.05}]
    assert name_straggler(found) == "rank 0 spends 50 ms in forward, the median rank 0 ms"


@given(
    st.lists(st.dictionaries(st.sampled_from(PHASES), st.sampled_from([0.0, 0.001, 0.05, 1.0])), max_size=5)
)
def test_a_sentence_names_a_phase_in_which_the_rank_is_slower_than_another(per_rank):
    found = find_straggler(per_rank)
    if found is not None:
        (phase,) = re.findall(r" in (\w+)", found[1])
        assert per_rank[found[0]].get(phase, 0.0) > min(seconds.get(phase, 0.0) for seconds in per_rank)


def test_a_phase_that_costs_the_others_nothing_is_told_in_milliseconds():
    found = [{"forward": 1.0, "data": 0.0}, {"forward": 1.0, "data": 0.5}, {"forward": 1.0, "data": 0.0}]
    assert name_straggler(found) == "rank 1 spends 500 ms in data, the median rank 0 ms"


@pytest.mark.parametrize(
    "found",
    [
        [],
        ranks(1, rank0={"data": 9.0}),
        ranks(4),
        ranks(4, rank3={"data": 0.2 + 0.24}),  # 24 % of a second
        ranks(4, rank3={"communication": 5.0, "validation": 5.0, "save": 5.0}),  # not its own work
        [{"forward": 0.010}, {"forward": 0.010}, {"forward": 0.019}],  # 90 % more, but 9 ms
    ],
)
def test_no_sentence_without_a_straggler(found):
    assert name_straggler(found) is None


def test_resident_memory_is_what_the_kernel_says():
    metrics = memory_metrics("cpu")
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    assert metrics == {"memory_rss_mb": pytest.approx(int(found[1]) / 1024, rel=0.05)}


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "cuda:99", "cuda:x"])
def test_utilisation_never_raises(device):
    assert gpu_utilisation(device) is None or device == "cuda:0"
