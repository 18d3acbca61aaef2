"""The way of a task to the ranks and of the trained state back, with a real file system that is too small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed import Callback
from distributed.interfaces.callback import Context
from distributed.testing.rank_pool import RankPool
from tests.support.needs import NO_MOUNTS, leave_out, needs_program
from tests.support.training import make_trainer

SCRIPT = '''
import json, os, sys, tempfile
from pathlib import Path

import torch
from distributed import Callback, Trainer, UserError
from distributed.launch.fork_server import ForkServer
from distributed.launch.forked import ADDRESS

small, disk = Path(sys.argv[1]), Path(sys.argv[2])


class Fill(Callback):
    """Use up what is left of the small file system, and change the weights after the last save."""

    all_ranks = True

    def on_step_end(self, context):
        if context.progress.step == 2 and context.world.rank == 0:
            fill()

    def on_run_end(self, context, status):
        for parameter in context.model.parameters():
            parameter.data.fill_(7.0)


def fill():
    with open(small / "filler", "ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def fitted(case, width, num_samples, steps=3, **fields):
    """One line about a run: its message, the newest checkpoint, and whether its weights have come back."""
    model = torch.nn.Sequential(torch.nn.Linear(width, 64), torch.nn.Linear(64, 2))
    trainer = Trainer(
        model, num_processes=2, device="cpu", batch_size=2, tracking={"progress": "off"}, optimizer="sgd",
        log_every_n_steps=1, **fields,
    )
    before, history, error = model[0].weight.clone(), None, ""
    data = torch.ones(num_samples, width), torch.zeros(num_samples, dtype=torch.long)
    try:
        history = trainer.fit(data, max_steps=steps)
        if case == "again":
            history = trainer.fit(data, max_steps=2)
    except UserError as failure:
        error, history = str(failure), trainer.history
    print(json.dumps({
        "case": case, "error": error, "trained": not torch.equal(before, model[0].weight),
        "checkpoint": history and history.checkpoint, "steps": history and history.steps["step"],
        "left": [path.name for path in small.glob("distributed-*/state/*")],
    }), flush=True)


if __name__ == "__main__":
    with ForkServer() as server:
        os.environ[ADDRESS], os.environ["TMPDIR"] = server.address, str(small)
        tempfile.tempdir = None
        fitted("data", 16, 200_000)
        fitted("weights", 10_000, 4)
        fitted("saved", 10_000, 4, checkpoint_dir=disk / "saved", checkpoint={"every_n_steps": 1})
        fitted("again", 10_000, 4, checkpoint_dir=disk / "again", checkpoint={"every_n_steps": 1})
        fitted("full at the end", 100, 16, callbacks=[Fill()], checkpoint_dir=disk / "older",
               checkpoint={"every_n_steps": 2})
        fill()
        fitted("full at the start", 16, 4)
'''


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """case -> its line; stderr under ``stderr``."""
    if why := needs_program("unshare", "test-tools"):
        leave_out(why)
    disk = tmp_path_factory.mktemp("disk")
    small = disk / "small"
    small.mkdir()
    (disk / "run.py").write_text(SCRIPT)
    mount = f"mount -t tmpfs -o size=5m,mode=700 tmpfs {small} || exit 99"
    run = f"{sys.executable} {disk / 'run.py'} {small} {disk}"
    ended = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f"{mount}; {run}"],
        capture_output=True,
        text=True,
        cwd=disk,
        timeout=280,
        check=False,
    )
    if ended.returncode == 99 or "unshare failed" in ended.stderr:
        leave_out(NO_MOUNTS)
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    return {line["case"]: line for line in lines} | {"stderr": {"text": ended.stderr}}


@pytest.mark.starts_processes
def test_a_small_temporary_folder_is_refused_before_the_first_step(outcomes: dict[str, Any]) -> None:
    for case in ("data", "full at the start"):
        error = outcomes[case]["error"]
        assert error.startswith("TMPDIR: no space for "), outcomes
        assert "Set the environment variable TMPDIR" in error
        assert "/small" in error
        assert "locks" not in error
        assert outcomes[case]["steps"] is None
    assert "Allowed: at least 14.4 MB" in outcomes["data"]["error"]
    weights = outcomes["weights"]["error"]
    assert weights.startswith("TMPDIR: no space for the trained weights")
    assert "Allowed: at least 2.6 MB" in weights
    assert not outcomes["weights"]["trained"]


@pytest.mark.starts_processes
def test_the_checkpoint_of_the_last_step_returns_the_state(outcomes: dict[str, Any]) -> None:
    saved, again = outcomes["saved"], outcomes["again"]
    assert saved["error"] == again["error"] == ""
    assert saved["trained"]
    assert saved["checkpoint"].endswith("saved/step_00000003")
    assert again["steps"] == [4, 5]  # a second fit continues from there
    assert outcomes["stderr"]["text"].count("Training continues. Set TMPDIR") == 3
    assert "return_weights=none" in outcomes["stderr"]["text"]
    assert saved["left"] == []


@pytest.mark.starts_processes
def test_a_state_that_finds_no_space_names_the_folder_and_the_checkpoint(outcomes: dict[str, Any]) -> None:
    full = outcomes["full at the end"]
    assert "the run has finished, but its weights cannot return to this process" in full["error"], outcomes
    assert "No space left on device" in full["error"]
    assert "/small/distributed-" in full["error"]
    assert full["checkpoint"].endswith("older/step_00000003")
    assert full["checkpoint"] in full["error"]
    assert full["steps"] == [1, 2, 3]


class Change(Callback):
    """Set the weights after the last save, as a moving average of weights does at the end."""

    all_ranks = True

    def on_run_end(self, context: Context, status: str) -> None:
        for parameter in context.model.parameters():
            parameter.data.fill_(7.0)


@pytest.mark.parametrize("changes", [False, True])
def test_the_caller_gets_the_state_at_the_end_from_files_that_stay(
    changes: bool, tmp_path: Path, rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    model = nn.Linear(4, 2)
    callbacks = [Change()] if changes else []
    trainer = make_trainer(
        model, 2, rank_pool, folder=tmp_path / "saved", batch_size=2, seed=5, callbacks=callbacks
    )
    trainer.fit((torch.ones(8, 4), torch.zeros(8, dtype=torch.long)), epochs=1)
    (private,) = tmp_path.glob("distributed-*/state/step_*")
    links = {path.name: path.stat().st_nlink for path in private.iterdir()}
    assert set(links.values()) == ({1} if changes else {2}), links
    assert bool((model.weight == 7.0).all()) == changes
    for path in (tmp_path / "saved").glob("step_*/*"):
        path.unlink()
    again = trainer.fit((torch.ones(8, 4), torch.zeros(8, dtype=torch.long)), epochs=1)
    assert again.steps["step"] == [3, 4]
