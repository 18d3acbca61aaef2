"""The profiler's trace and table, of whole and of short runs."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import torch
from distributed_plugins.profiler import register_callbacks

from distributed.config import DistributedConfig
from distributed.interfaces.callback import Context
from distributed.interfaces.placement import World


class Run(Context):
    def __init__(self, rank: int) -> None:
        self.world = World(rank=rank, size=2)

    def request_stop(self, reason: str) -> None: ...

    def log(self, name: str, value: float) -> None: ...


def profile(folder: Path, num_steps: int, rank: int = 0, **section: int) -> None:
    """Train a small model for `num_steps` under the profiler."""
    config = DistributedConfig(profile={"enabled": True, "output_dir": str(folder), **section})
    (callback,) = register_callbacks(config)
    assert callback.all_ranks
    model = torch.nn.Linear(4, 2)
    run = Run(rank)
    callback.on_run_start(run)
    for _ in range(num_steps):
        model(torch.ones(3, 4)).sum().backward()
        callback.on_step_end(run)
    callback.on_run_end(run, "finished")


def operators(trace: Path) -> list[str]:
    return [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]


def test_the_steps_asked_for_are_recorded(tmp_path, caplog):
    profile(tmp_path / "out", num_steps=9, skip_steps=1, steps=3)
    names = operators(tmp_path / "out" / "trace_rank0.json")
    assert names.count("aten::linear") == 3
    assert "aten::linear" in (tmp_path / "out" / "table_rank0.txt").read_text()
    assert caplog.text == ""
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "table_rank0.txt",
        "trace_rank0.json",
    ]


def test_ranks_write_files_of_their_own_that_are_private(tmp_path):
    profile(tmp_path / "out", num_steps=3, rank=1, skip_steps=0, steps=1)
    files = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in files] == ["table_rank1.txt", "trace_rank1.json"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700


def test_a_run_that_ends_early_keeps_what_was_recorded_and_says_so(tmp_path, caplog):
    profile(tmp_path / "out", num_steps=4, skip_steps=1, steps=5)
    assert operators(tmp_path / "out" / "trace_rank0.json").count("aten::linear") == 2
    assert "2 of 5 steps were recorded" in caplog.text
    assert "took 4 optimizer steps, and 7 are needed" in caplog.text


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_run_too_short_to_record_writes_nothing_and_says_so(tmp_path, caplog, num_steps):
    profile(tmp_path / "out", num_steps=num_steps, skip_steps=1, steps=5)
    assert not (tmp_path / "out").exists()
    assert "0 of 5 steps were recorded" in caplog.text


def test_a_folder_that_cannot_be_made_warns_and_training_goes_on(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    profile(tmp_path / "file", num_steps=9, skip_steps=1, steps=1)
    assert "nothing could be written" in caplog.text
    assert (tmp_path / "file").read_text() == "in the way"


def test_nothing_is_registered_unless_asked():
    assert register_callbacks(DistributedConfig()) == []
