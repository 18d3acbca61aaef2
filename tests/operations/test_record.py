"""A run leaves on disk what a report needs: whatever happens to it, and without getting in its way."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from distributed import DistributedConfig
from distributed.errors import WorkerError
from distributed.operations.report.record_format import NAME, append
from distributed.operations.report.stitch import read_runs
from tests.support import commands
from tests.support.records import lines, one_run, train

SCRIPT = """
    import os, signal, sys, torch
    from distributed import Callback, Trainer

    class At(Callback):
        all_ranks = True
        def on_step_end(self, context):
            how, _, step = os.environ.get("HOW", "").partition(":")
            here = context.world.rank == 1 and context.progress.step == int(step or -1)
            if here and not os.path.exists("happened"):
                open("happened", "w").close()
                if how == "raise":
                    raise RuntimeError("the disk is on fire")
                os.kill(os.getpid(), signal.SIGKILL)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 6, generator=generator)
    y = (x[:, 0] > 0).long()
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 2)
    trainer = Trainer(model, global_batch_size=8, log_every_n_steps=1, epochs=3, callbacks=[At()])
    trainer.fit((x, y))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(dedent(SCRIPT))
    return path


def start(script: Path, *flags: str, how: str = "") -> Any:
    words = ["train", "--script", script.name, "--num-processes", "2", "--checkpoint-dir", "run", *flags]
    return commands.start(
        [sys.executable, "-m", "distributed.cli", *words],
        cwd=script.parent,
        env={**os.environ, "HOW": how, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def kinds(folder: Path) -> list[str]:
    return [line["kind"] for line in lines(folder)]


# -- what is written -------------------------------------------------------------------------------


def test_a_run_writes_its_beginning_its_figures_and_its_end(tmp_path: Path) -> None:
    trainer, history = train(tmp_path, epochs=2)
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600
    first, *_, last = lines(tmp_path)
    assert (first["kind"], last["kind"]) == ("start", "end")
    assert first["place"]["batch"]["global_batch_size"] == 8
    assert first["place"]["backend"] == "pytorch-ddp"
    origins = {name: (value, origin) for name, value, origin in first["config"]}
    assert origins["epochs"] == (2, "argument")
    assert origins["seed"] == (0, "default")
    assert {"python", "torch", "distributed-trainer"} <= set(first["versions"])
    logs = [line for line in lines(tmp_path) if line["kind"] == "log"]
    assert [(line["step"], line["figures"]["loss"]) for line in logs] == [
        (log["step"], log["loss"]) for log in history.logs
    ]
    epochs = [line["figures"] for line in lines(tmp_path) if line["kind"] == "epoch"]
    assert [figures["val_loss"] for figures in epochs] == [epoch["val_loss"] for epoch in history.epochs]
    assert [line["step"] for line in lines(tmp_path) if line["kind"] == "checkpoint"] == [10, 20]
    assert last["totals"]["total_time"] == history.total_time > 0
    assert trainer.config.record_dir == str(tmp_path)


def test_where_the_record_goes(tmp_path: Path) -> None:
    assert DistributedConfig(checkpoint_dir="here").record_dir == "here"
    assert DistributedConfig(checkpoint_dir="file:///here").record_dir == "/here"
    assert DistributedConfig(checkpoint_dir="s3://bucket/run").record_dir is None
    chosen = DistributedConfig(checkpoint_dir="s3://bucket/run", tracking={"record_dir": "there"})
    assert chosen.record_dir == "there"
    train(None, max_steps=2)
    train(None, max_steps=2, tracking={"record_dir": str(tmp_path / "deep" / "there")})
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [NAME]


def test_a_second_fit_and_a_resumed_run_go_on_and_another_run_does_not(tmp_path: Path) -> None:
    trainer, _ = train(tmp_path, epochs=1)
    train(tmp_path, epochs=2, resume_from_checkpoint=True)
    run = one_run(tmp_path)
    assert [attempt.step for attempt in run.attempts] == [0, 10]
    assert run.series("loss").steps == list(range(2, 21, 2))
    train(tmp_path, epochs=1)
    earlier, later = read_runs(tmp_path)
    assert (earlier.steps, later.steps) == (20, 10)
    assert trainer.config.epochs == 1


def test_a_second_fit_of_one_trainer_goes_on(tmp_path: Path) -> None:
    import torch

    trainer, _ = train(None, epochs=1, tracking={"record_dir": str(tmp_path)})
    x = torch.randn(80, 6)
    trainer.fit((x, (x[:, 0] > 0).long()), epochs=1)
    assert [attempt.step for attempt in one_run(tmp_path).attempts] == [0, 10]


def test_a_torn_line_takes_no_other_with_it(tmp_path: Path) -> None:
    append(tmp_path, "finish", {"attempt": "a", "status": "finished"})
    with (tmp_path / NAME).open("a") as file:
        file.write('{"kind":"log","time":1,"st')
    append(tmp_path, "finish", {"attempt": "b", "status": "finished"})
    texts = (tmp_path / NAME).read_text().splitlines()
    assert len(texts) == 3
    assert json.loads(texts[2])["attempt"] == "b"


def test_numbers_that_json_lacks_are_written_and_read_back(tmp_path: Path) -> None:
    figures = {"loss": float("nan"), "norm": float("inf")}
    append(tmp_path, "log", {"attempt": "a", "step": 1, "figures": figures})
    (text,) = (tmp_path / NAME).read_text().splitlines()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name))["figures"]["norm"] == "inf"
    (found,) = one_run(tmp_path).attempts[0].of("log")
    assert found["figures"]["loss"] != found["figures"]["loss"]
    assert found["figures"]["norm"] == float("inf")


def test_passwords_in_urls_stay_out(tmp_path: Path) -> None:
    train(tmp_path, max_steps=2, tracking={"mlflow_tracking_uri": "https://me:secret@host/mlflow"})
    text = (tmp_path / NAME).read_text()
    assert "secret" not in text
    assert "https://***@host/mlflow" in text


def test_a_record_that_cannot_be_written_stops_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, "distributed"):
        _, history = train(None, epochs=1, tracking={"record_dir": str(tmp_path / "file" / "record")})
    assert history.epochs[-1]["step"] == 10
    assert "'record' failed in start and is dropped" in caplog.text


def test_a_line_that_cannot_be_written_leaves_a_gap(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from distributed_plugins.run_record import RecordTracker

    from distributed.interfaces.tracker import Place

    tracker = RecordTracker(DistributedConfig(tracking={"record_dir": str(tmp_path)}))
    tracker.place = Place()
    tracker.start({})
    size = (tmp_path / NAME).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))  # room for a torn line
    try:
        with caplog.at_level(logging.WARNING, "distributed"):
            tracker.log_metrics({"loss": 1.0}, 1)
            tracker.log_metrics({"loss": 1.0}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(caplog.messages) == 1
    assert "has a gap" in caplog.text
    tracker.log_metrics({"loss": 1.0}, 3)
    run = one_run(tmp_path)
    assert run.series("loss").steps == [3]
    assert run.notes == ["Line 2 of the record cannot be read (damaged) and is left out."]


# -- failures ----------------------------------------------------------------------------------------


@pytest.mark.starts_processes
def test_ranks_that_are_started_again_are_one_run_and_the_reason_is_told(script: Path) -> None:
    saves = ["--set", "checkpoint.every_n_steps=5", "--set", "checkpoint.asynchronous=false"]
    done = start(script, "--max-restarts", "1", *saves, how="kill:18")
    out, _ = done.communicate(timeout=120)
    assert done.returncode == 0, out
    run = one_run(script.parent / "run")
    assert (run.status, len(run.attempts), run.resumes()) == ("finished", 2, [15])
    (failure,) = run.failures
    assert (failure.rank, failure.step, failure.fatal) == (1, 18, False)
    assert failure.host
    assert "SIGKILL" in failure.summary
    assert run.series("loss").steps == list(range(1, 31))
    (repeated,) = run.repeated("loss")
    assert repeated.steps[0] == 16
    assert "restart" in kinds(script.parent / "run")


@pytest.mark.starts_processes
def test_a_run_that_fails_says_who_and_why(script: Path) -> None:
    done = start(script, how="raise:13")
    out, _ = done.communicate(timeout=120)
    assert done.returncode == 1, out
    run = one_run(script.parent / "run")
    assert run.status == "failed"
    (failure,) = run.failures
    assert failure.fatal
    assert failure.rank == 1
    assert "the disk is on fire" in failure.summary
    assert "RuntimeError" in failure.details
    assert run.steps >= 10


@pytest.mark.starts_processes
def test_a_killed_run_is_interrupted_until_it_is_resumed(script: Path) -> None:
    folder = script.parent / "run"
    # A stopped rank holds the others up, so that the run cannot end before it is killed.
    slow = script.read_text().replace("os.kill(os.getpid(), signal.SIGKILL)", "signal.pause()")
    whole = script.read_text()
    script.write_text(slow)
    process = start(script, "--set", "checkpoint.every_n_steps=5", how="pause:17")
    try:
        deadline = time.monotonic() + 60
        while not (script.parent / "happened").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        assert one_run(folder).status == "running"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
    pids = [p["pid"] for p in lines(folder)[0]["processes"]]
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/stat").exists() and _runs(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    interrupted = one_run(folder)
    assert interrupted.status == "interrupted"
    assert "without writing a cause" in interrupted.failures[-1].summary
    script.write_text(whole)
    done = start(script, "--resume")
    out, _ = done.communicate(timeout=120)
    assert done.returncode == 0, out
    run = one_run(folder)
    assert (run.status, run.resumes()) == ("finished", [15])
    assert run.series("loss").steps == list(range(1, 31))
    assert len(run.failures) == 1


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.starts_processes
def test_a_run_whose_ranks_never_start_is_on_record(tmp_path: Path) -> None:
    from distributed import Trainer

    class Unloadable:
        def __reduce__(self):
            return (_refuse, ())

        def __call__(self, output, target):
            return (output - target).square().mean()

    import torch

    trainer = Trainer(torch.nn.Linear(2, 1), num_processes=2, device="cpu", loss_fn=Unloadable(),
                      checkpoint_dir=str(tmp_path))  # fmt: skip
    with pytest.raises(WorkerError):
        trainer.fit((torch.zeros(8, 2), torch.zeros(8, 1)))
    run = one_run(tmp_path)
    assert (run.status, run.attempts) == ("failed", [])
    assert "not today" in run.failures[0].summary
    assert run.setting("num_processes") == 2


def _refuse() -> None:
    raise RuntimeError("not today")
