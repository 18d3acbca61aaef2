"""The number of threads that OMP_NUM_THREADS gives, as OpenMP reads it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from distributed.launch.warm_start import shared_env
from distributed.operations.planning.machine_match import difference_to_machine
from distributed.system.omp_threads import omp_threads
from tests.planner.estimates.measured_profiles import linear_profile


@pytest.mark.parametrize(
    ("value", "threads"),
    [("3", 3), ("4,2", 4), (" 2 , 1", 2), ("0", 8), ("2,x", 8), ("-1", 8)],
)
def test_the_value_is_a_list_and_a_wrong_one_is_ignored(value: str, threads: int) -> None:
    assert omp_threads({"OMP_NUM_THREADS": value}, 8) == threads


def test_nothing_is_known_without_the_variable() -> None:
    assert omp_threads({}, 8) is None
    assert omp_threads({"OMP_NUM_THREADS": ""}, 8) is None


@pytest.mark.parametrize(("set_to", "threads"), [(None, "1"), ("", "1"), ("5", "5")])
def test_ranks_share_the_processors_where_nothing_is_set(
    monkeypatch: pytest.MonkeyPatch, set_to: str | None, threads: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_to is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", set_to)
    cores = len(os.sched_getaffinity(0))
    assert shared_env(cores, {})["OMP_NUM_THREADS"] == threads


@pytest.mark.starts_processes
@pytest.mark.parametrize("value", ["2,1", "1", "0"])
def test_torch_has_the_same_number(value: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": value}
    program = "import torch; print(torch.get_num_threads())"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == omp_threads(environment, len(os.sched_getaffinity(0)))


def test_a_list_is_compared_with_the_threads_of_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = linear_profile(threads=4)
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert difference_to_machine(profile, 8, cores=8) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "2,4")
    told = difference_to_machine(profile, 8, cores=8)
    assert told is not None
    assert "the run has 2" in told
