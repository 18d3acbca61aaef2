"""PerformanceMonitor, DistributedMetricsCollector on two gloo ranks, monitor_memory."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from textwrap import dedent

import pytest
from distributed_plugins.manual_monitors import (
    DistributedMetricsCollector,
    PerformanceMonitor,
    monitor_memory,
)

from distributed.errors import UserError
from tests.support import commands

RANK = """
    import json, sys
    from datetime import timedelta
    import torch.distributed as dist
    from distributed_plugins.manual_monitors import DistributedMetricsCollector

    rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    collector = DistributedMetricsCollector(rank, 2)
    for value, count in ([(1.0, 1)], [(2.0, 3), (4.0, 3), (0.1, 1)])[rank]:
        collector.update_metric("loss", value, count)
    if rank == 1:
        collector.update_metric("only_here", 0.25)
        collector.update_metric("nothing", 0.0, 0)
    print("metrics", json.dumps(collector.print_metrics()))
    collector.reset()
    print("metrics", json.dumps(collector.compute_global_metrics()))
    try:
        DistributedMetricsCollector(rank, 3).compute_global_metrics()
    except Exception as error:
        print("error", type(error).__name__, error)
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Each rank's printed lines."""
    folder = tmp_path_factory.mktemp("ranks")
    script = folder / "rank.py"
    script.write_text(dedent(RANK))
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        commands.start(
            [sys.executable, script, str(rank), str(folder / "store")],
            stdout=subprocess.PIPE,
            env=environment,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0].splitlines() for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    return outputs


def metrics(lines: list[str]) -> list[dict[str, float]]:
    return [json.loads(line.removeprefix("metrics ")) for line in lines if line.startswith("metrics ")]


@pytest.mark.starts_processes
def test_unequal_counts_and_missing_names_are_reduced_right(outputs):
    found = metrics(outputs[0])[0]
    assert found["loss"] == pytest.approx((1.0 + 2.0 * 3 + 4.0 * 3 + 0.1) / 8, rel=1e-15)
    assert found["only_here"] == 0.25
    assert math.isnan(found["nothing"])
    assert list(found) == ["loss", "nothing", "only_here"]


@pytest.mark.starts_processes
def test_all_ranks_hold_the_same_bits_and_rank_0_prints(outputs):
    assert json.dumps(metrics(outputs[0])) == json.dumps(metrics(outputs[1]))
    assert "  loss: 2.387500" in outputs[0]
    assert not any("loss: " in line for line in outputs[1])


@pytest.mark.starts_processes
def test_after_a_reset_nothing_is_left(outputs):
    assert metrics(outputs[0])[1] == {}


@pytest.mark.starts_processes
def test_a_world_size_that_is_not_the_groups_is_refused(outputs):
    for lines in outputs:
        assert "error UserError world_size: the process group has 2 ranks. Got 3. Allowed: 2." in lines
    with pytest.raises(UserError, match="no process group"):
        DistributedMetricsCollector(0, 2).compute_global_metrics()


def test_one_rank_needs_no_process_group(capsys):
    collector = DistributedMetricsCollector(0, 1)
    collector.update_metric("loss", 1.0)
    collector.update_metric("loss", 4.0, count=2)
    assert collector.print_metrics() == {"loss": 3.0}
    assert capsys.readouterr().out == "Global metrics:\n  loss: 3.000000\n"


class Steps:
    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def train_step(self, *batch: object) -> float:
        self.seen.append(batch)
        return 0.0


class Fits:
    def fit(self, loader: object, max_steps: int) -> None:
        self.asked = (loader, max_steps)


def test_training_is_timed_step_by_step():
    monitor, trainer = PerformanceMonitor(), Steps()
    medians = monitor.monitor_training(trainer, [(1, 2)] * 5, num_steps=3)
    assert trainer.seen == [(1, 2)] * 3
    assert {name: len(values) for name, values in monitor.timings.items()} == {
        "data": 3,
        "forward_backward": 3,
        "total_training": 1,
    }
    parts = sum(monitor.timings["data"]) + sum(monitor.timings["forward_backward"])
    assert 0 < parts <= monitor.timings["total_training"][0]
    assert set(medians) == set(monitor.timings)


def test_a_loader_may_end_early_and_a_batch_may_be_one_thing():
    monitor, trainer = PerformanceMonitor(synchronize=True), Steps()
    monitor.monitor_training(trainer, ["a", "b"], num_steps=10)
    assert trainer.seen == [("a",), ("b",)]
    assert len(monitor.timings["data"]) == 2


def test_a_trainer_that_fits_is_timed_as_a_whole():
    monitor, trainer = PerformanceMonitor(), Fits()
    assert set(monitor.monitor_training(trainer, "loader", num_steps=7)) == {"total_training"}
    assert trainer.asked == ("loader", 7)


def test_mistakes_are_told():
    monitor = PerformanceMonitor()
    monitor.start_timer("forward")
    with pytest.raises(UserError, match=r"'foward' was not started. Did you mean 'forward'\?"):
        monitor.end_timer("foward")
    with pytest.raises(UserError, match="train_step"):
        monitor.monitor_training(object(), [])


def test_medians_and_table():
    monitor = PerformanceMonitor()
    monitor.timings = {"forward": [0.001, 0.009, 0.002], "save": [1.0]}
    assert monitor.medians() == {"forward": 0.002, "save": 1.0}
    head, forward, save = monitor.table().splitlines()
    assert forward.split() == ["forward", "3", "2.000", "1.000", "9.000", "0.012"]
    assert save.split() == ["save", "1", "1000.000", "1000.000", "1000.000", "1.000"]
    assert len(head) == len(forward) == len(save)


def test_memory_is_printed_only_when_asked(capsys):
    assert monitor_memory()["memory_rss_mb"] > 0
    assert capsys.readouterr().out == ""
    monitor_memory("cpu", show=True)
    assert capsys.readouterr().out.startswith("memory_rss_mb: ")
