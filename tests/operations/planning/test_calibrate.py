"""``calibrate`` on this machine, with measurements that are too short to be exact."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from distributed import UserError
from distributed.cli import main
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.operations.planning import calibrate
from distributed.operations.planning.calibrate import default_ranks
from distributed.operations.planning.decoder import facts_from_numbers
from distributed.operations.planning.machine_match import difference_to_machine
from distributed.operations.planning.other_load import ProcessorTime
from distributed.planner.estimates.facts_time import FactsTimer
from distributed.planner.estimates.hardware import load_profile
from distributed.planner.estimates.numbers import model_numbers
from distributed.planner.estimates.split import Split
from distributed.planner.estimates.time import StepTimer
from distributed.system.host_memory import total_memory
from tests.planner.estimates.measured_profiles import linear_profile
from tests.support.commands import run

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 192, "vocabulary": 512, "sequence": 32}


@pytest.mark.starts_processes
def test_a_profile_of_this_machine(tmp_path: Path) -> None:
    """Two ranks measure, and the file predicts a model of any kind, by numbers as by operations."""
    path = tmp_path / "here.yaml"
    command = [sys.executable, "-m", "distributed.cli", "calibrate", "-o", str(path), "--name", "here"]
    flags = ["--ranks", "2", "--duration", "0.001", "--device", "cpu"]
    done = run([*command, *flags], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 ranks" in done.stderr
    assert "here: CPU" in done.stdout
    assert "not measured: link_between_nodes, latency_between_nodes" in done.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["here.yaml"]

    profile = load_profile(path)
    assert profile.name == "here"
    assert profile.device == "cpu"
    assert profile.devices_per_node == 2
    assert profile.memory <= total_memory() / 2
    assert "measured by calibrate on" in profile.sources["memory_bandwidth"]
    assert "an assumption" in profile.sources["link_between_nodes"]
    assert profile.measured is not None
    ranks = profile.measured.ranks[2]
    assert {"all-reduce", "all-gather", "reduce-scatter", "send-recv"} <= set(ranks.collectives)
    split = Split(ParallelDims(data=2), "pytorch-ddp", micro_batch=4)
    parts = FactsTimer(facts_from_numbers(**SIZES), profile).parts(split)
    numbers = model_numbers(**SIZES, global_batch=8)
    assert 0 < parts.total < 10
    assert 0 < StepTimer(numbers, profile).parts(split).total < 10


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--ranks", "0"], "--ranks"),
        (["--ranks", "two"], "--ranks"),
        (["--duration", "soon"], "not a duration"),
        (["--duration", "-1"], "not a duration"),
        (["--duration", "nan"], "not a duration"),
        (["-o", "nowhere/profile.yaml"], "the folder of the profile does not exist"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_measured(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--device", "cpu", *flags]) == 2
    assert text in capsys.readouterr().err


def test_processor_time_of_others_is_what_is_left_of_busy_time() -> None:
    start = ProcessorTime(total=100.0, idle=40.0, own=7.0)
    assert start.others_until(ProcessorTime(total=120.0, idle=50.0, own=13.0)) == pytest.approx(0.2)
    assert start.others_until(ProcessorTime(total=120.0, idle=50.0, own=20.0)) == 0.0  # clocks are coarse
    assert start.others_until(start) == 0.0


def test_own_processor_time_is_counted() -> None:
    start = ProcessorTime.now()
    while (later := ProcessorTime.now()).own < start.own + 0.1:
        pass
    assert later.total > start.total
    assert later.idle >= start.idle


_WORK = """
import sys, time
while time.process_time() < 0.3: pass
print("worked", flush=True)
sys.stdin.read()
"""


@pytest.mark.starts_processes
def test_processor_time_of_ranks_that_live_is_counted() -> None:
    """A process below a child, as a rank is that the starter of this process has forked."""
    start = ProcessorTime.now()
    shell = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, _WORK]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        own = time.process_time()
        assert child.stdout.readline() == "worked\n"
        own = time.process_time() - own
        alive = ProcessorTime.now().own - start.own
        child.stdin.close()
    assert alive - own > 0.25
    assert ProcessorTime.now().own - start.own >= alive - 0.02, "it is not lost when the process ends"


@pytest.mark.parametrize(("share", "warnings"), [(0.05, 0), (0.9, 4)])
def test_other_processes_are_announced(share: float, warnings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_LOOK", 0.0)
    monkeypatch.setattr(calibrate, "_measure", lambda number, duration, device: {})
    monkeypatch.setattr(calibrate, "_profile", lambda found, name, gpus: found)
    monkeypatch.setattr(calibrate, "parse_profile", lambda values, where: values)
    monkeypatch.setattr(ProcessorTime, "others_until", lambda self, later: share)
    found: list[str] = []
    calibrate.calibrate([1, 2, 4], device="cpu", report=found.append)
    told = [line for line in found if line.startswith("warning: other processes used 90% of the processors")]
    assert len(told) == warnings
    assert len(found) == warnings + 3


def test_ranks_that_are_measured_by_default() -> None:
    assert default_ranks(gpus=8) == [1, 2, 4, 8]
    assert default_ranks(gpus=1) == [1]
    assert {1, 2, 4} <= set(default_ranks(gpus=0))


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "visible_gpus", lambda: 2)
    with pytest.raises(UserError, match="a GPU of its own") as caught:
        calibrate.calibrate([1, 4])
    assert caught.value.allowed == "at most 2"


def test_a_profile_of_another_machine_is_announced() -> None:
    profile = linear_profile(threads=3)
    assert profile.measured is not None
    told = difference_to_machine(profile, 8, cores=2, threads=1)
    assert told is not None
    assert "8 cores" in told
    assert "2 here" in told
    told = difference_to_machine(profile, 8, cores=8, threads=1)
    assert told is not None
    assert "3 threads" in told
    assert difference_to_machine(profile, 8, cores=8, threads=3) is None
    told = difference_to_machine(profile, 16, cores=8, threads=3)
    assert told is not None
    assert "at most 8 ranks" in told
    assert difference_to_machine(load_profile("A100"), 8, cores=1, threads=1) is None


def test_the_limit_of_a_control_group(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:       8000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/jobs/one\n")
    assert total_memory(tmp_path) == 8000 * 1024
    group = tmp_path / "sys/fs/cgroup/jobs"
    (group / "one").mkdir(parents=True)
    (group / "one/memory.max").write_text("max\n")
    assert total_memory(tmp_path) == 8000 * 1024
    (group / "memory.max").write_text("4096000\n")
    assert total_memory(tmp_path) == 4096000
