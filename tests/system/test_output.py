"""What is printed may be lost; the run is not."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from distributed import Callback, DistributedConfig
from distributed.config import load
from distributed.config.paths import with_absolute_paths
from distributed.interfaces.callback import Context
from distributed.system import output
from distributed.system.output import print_line
from tests.support import commands
from tests.support.training import make_trainer

DATA = torch.ones(8, 4), torch.zeros(8, dtype=torch.long)

SCRIPT = """
import os, signal, sys, torch
from distributed import Callback, Trainer

class Preempt(Callback):
    def __init__(self, end):
        self.end = end

    def on_step_end(self, context):
        if context.progress.step == 2 and self.end == "preempted":
            os.kill(os.getpid(), signal.SIGTERM)

if __name__ == "__main__":
    trainer = Trainer(
        torch.nn.Linear(4, 2), device="cpu", num_processes=int(sys.argv[1]), batch_size=2, epochs=2,
        log_every_n_steps=1, callbacks=[Preempt(sys.argv[2])], checkpoint_dir="saved",
    )
    history = trainer.fit((torch.ones(16, 4), torch.zeros(16, dtype=torch.long)))
    print("trained", len(history.steps["step"]), file=sys.stderr)
"""


@pytest.mark.starts_processes
@pytest.mark.parametrize(("ranks", "end"), [("1", "finished"), ("2", "finished"), ("1", "preempted")])
def test_a_full_device_behind_stdout_does_not_end_a_run(ranks: str, end: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with open("/dev/full", "w") as full:
        done = commands.run(
            [sys.executable, "train.py", ranks, end],
            cwd=tmp_path,
            stdout=full,
            stderr=-1,
            timeout=120,
        )
    assert done.returncode == (0 if end == "finished" else 75), done.stderr
    assert end == "preempted" or f"trained {16 // int(ranks)}" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    warnings = [line for line in done.stderr.splitlines() if "cannot be written" in line]
    assert len(warnings) in range(1, 1 + int(ranks) + 1)  # one a process that prints
    assert "stdout cannot be written: [Errno 28] No space left on device. Training continues" in warnings[0]
    assert list((tmp_path / "saved").glob("step_*"))


def test_a_lost_line_is_reported_once_and_leaves_nothing_to_write_at_exit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(output, "_reported", set())
    with open("/dev/full", "w") as full, caplog.at_level(logging.WARNING, "distributed"):
        assert [print_line("text", full) for _ in range(3)] == [False] * 3
        os.fstat(full.fileno())
        full.close()  # nothing is left in its buffer, which would raise here
        assert not print_line("text", full)
    assert len(caplog.records) == 1
    with open(tmp_path / "file", "w") as file:
        assert print_line("text", file)
        assert (tmp_path / "file").read_text() == "text\n"


class Move(Callback):
    """Change the working folder after the first step."""

    def __init__(self, to: Path) -> None:
        self.to = to

    def on_step_end(self, context: Context) -> None:
        os.chdir(self.to)


@pytest.mark.parametrize("store", ["sqlite:///runs.db", None])
def test_a_callback_that_changes_the_working_folder_moves_no_file(
    store: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    trainer = make_trainer(
        nn.Linear(4, 2),
        folder=Path("saved"),
        batch_size=2,
        checkpoint={"every_n_steps": 1},
        tensorboard_dir="events",
        mlflow_tracking=True,
        callbacks=[Move(tmp_path / "other")],
        tracking={"progress": "off", "record_dir": "record", "mlflow_tracking_uri": store},
        profile={"enabled": True, "skip_steps": 1, "steps": 1},
    )
    history = trainer.fit(DATA, DATA)
    assert Path.cwd() == tmp_path / "other"
    assert list((tmp_path / "other").iterdir()) == []
    lines = [json.loads(line) for line in (tmp_path / "record" / "record.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines].count("end") == 1
    assert history.checkpoint == str(tmp_path / "saved" / "step_00000004")
    assert list((tmp_path / "profile").iterdir())
    assert list((tmp_path / "events").rglob("events*"))
    assert (tmp_path / ("runs.db" if store else "mlflow.db")).exists()
    assert trainer.config.checkpoint_dir == "saved"


def test_paths_become_absolute_and_nothing_else_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"checkpoint_dir": "a/b", "resume_from_checkpoint": "file://c", "batch_size": 3}
    found = with_absolute_paths(load(overrides=given, origin="test"))
    assert found.checkpoint_dir == f"{tmp_path}/a/b"
    assert found.resume_from_checkpoint == f"file://{tmp_path}/c"
    assert found.profile.output_dir == f"{tmp_path}/profile"
    assert [found.origin(name) for name in ("checkpoint_dir", "profile.output_dir")] == ["test", "default"]
    assert "profile" not in found.model_fields_set
    stores = {"sqlite:///a.db": f"sqlite:///{tmp_path}/a.db", "./a": f"{tmp_path}/a"}
    for given_store in ("sqlite:////a.db", "sqlite:///", "https://host/a", "databricks"):
        stores[given_store] = given_store
    for given_store, absolute in stores.items():
        config = with_absolute_paths(DistributedConfig(tracking={"mlflow_tracking_uri": given_store}))
        assert config.tracking.mlflow_tracking_uri == absolute
    for other in ({"checkpoint_dir": "s3://bucket/run"}, {"checkpoint_dir": "/run"}):
        config = DistributedConfig(**other)
        assert with_absolute_paths(config).checkpoint_dir == config.checkpoint_dir
    assert with_absolute_paths(found) is found
