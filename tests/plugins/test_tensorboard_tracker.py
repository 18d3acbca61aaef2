"""TensorBoard: event files read back with TensorBoard's own reader."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from distributed_plugins.tensorboard import TensorBoardTracker, tag
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from distributed.config import DistributedConfig
from distributed.errors import UserError

RECORD = {"loss": 0.5, "learning_rate": 0.125, "samples_per_second": 1000.0, "time_data": 0.25}


def tracker(root: Path, **tracking: Any) -> TensorBoardTracker:
    return TensorBoardTracker(DistributedConfig(tensorboard_dir=str(root), tracking=tracking))


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return events


def test_scalars_and_parameters_come_back(tmp_path):
    writer = tracker(tmp_path, run_name="first", baseline_throughput=50.0)
    writer.start({"batch_size": 32, "note": "a|b"})
    writer.log_metrics(RECORD, 10)
    writer.log_metrics({"loss": 0.25, "val_accuracy": 0.75}, 20)
    writer.finish("finished")
    events = read(tmp_path / "first")
    assert set(events.Tags()["scalars"]) == {
        "train/loss",
        "train/learning_rate",
        "throughput/samples_per_second",
        "throughput/throughput",
        "throughput/speedup",
        "time/data",
        "val/accuracy",
    }
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(10, 0.5), (20, 0.25)]
    assert [(e.step, e.value) for e in events.Scalars("val/accuracy")] == [(20, 0.75)]
    rates = [events.Scalars(f"throughput/{name}")[0].value for name in ("throughput", "samples_per_second")]
    assert rates == [RECORD["samples_per_second"]] * 2
    assert events.Scalars("throughput/speedup")[0].value == pytest.approx(RECORD["samples_per_second"] / 50.0)
    text = events.Tensors("params")[0].tensor_proto.string_val[0].decode()
    assert "| batch_size | 32 |" in text
    assert "| note | a&#124;b |" in text
    assert events.SummaryMetadata("params").plugin_data.plugin_name == "text"


def test_a_record_is_on_disk_before_the_run_ends(tmp_path):
    writer = tracker(tmp_path, run_name="killed")
    writer.start({})
    writer.log_metrics({"loss": 0.5}, 1)
    assert [e.value for e in read(tmp_path / "killed").Scalars("train/loss")] == [0.5]
    writer.finish("failed")


def test_runs_without_a_name_get_folders_of_their_own(tmp_path):
    writers = [tracker(tmp_path) for _ in range(3)]
    for writer in writers:
        writer.start({})
        writer.finish("finished")
    assert len({writer.folder for writer in writers}) == 3
    assert {writer.folder.parent for writer in writers} == {tmp_path}


def test_a_resumed_run_goes_on_in_its_folder(tmp_path):
    for step in (1, 2):
        writer = tracker(tmp_path, run_name="again")
        writer.start({})
        writer.log_metrics({"loss": 1.0 / step}, step)
        writer.finish("finished")
    assert [e.step for e in read(tmp_path / "again").Scalars("train/loss")] == [1, 2]


def test_files_are_private(tmp_path):
    writer = tracker(tmp_path / "runs")
    writer.start({})
    writer.finish("finished")
    (file,) = writer.folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(writer.folder.stat().st_mode) == 0o700


def test_a_folder_that_is_not_local_is_refused(tmp_path):
    writer = TensorBoardTracker(DistributedConfig(tensorboard_dir="gs://bucket/runs"))
    with pytest.raises(UserError, match="local folder"):
        writer.start({})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loss", "train/loss"),
        ("grad_norm", "train/grad_norm"),
        ("train_loss", "train/epoch_loss"),
        ("val_loss", "val/loss"),
        ("samples_per_second", "throughput/samples_per_second"),
        ("memory_rss_mb", "memory/rss_mb"),
        ("gpu_utilisation", "gpu/utilisation"),
        ("time_forward", "time/forward"),
        ("mine/own", "mine/own"),
    ],
)
def test_tags_are_grouped(name, expected):
    assert tag(name) == expected


@pytest.mark.starts_processes
def test_writing_needs_neither_torch_nor_tensorflow(tmp_path):
    script = """
        import sys
        from distributed.config import DistributedConfig
        from distributed_plugins.tensorboard import TensorBoardTracker
        tracker = TensorBoardTracker(DistributedConfig(tensorboard_dir=sys.argv[1]))
        tracker.start({"a": 1}); tracker.log_metrics({"loss": 1.0}, 1); tracker.finish("finished")
        print(sorted({"torch", "tensorflow"} & set(sys.modules)))
    """
    command = [sys.executable, "-c", dedent(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
