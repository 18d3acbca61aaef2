"""Real faults of a real disk: a save fails, the run goes on, and the next save works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.needs import NO_MOUNTS, leave_out, needs_program

pytestmark = pytest.mark.starts_processes

SCRIPT = '''
import json, os, resource, shutil, subprocess, sys
from pathlib import Path

import torch
from distributed import Callback, Trainer
from distributed.checkpoint.checkpointer import PortableCheckpointer

fault, ranks, asynchronous = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "asynchronous"
home = Path(sys.argv[4])
failures = int(sys.argv[5])


class Fault(Callback):
    """From after the save of step 2 to before that of step 4."""

    def on_step_end(self, context):
        step = context.progress.step
        if step == 3:
            context.finish_saving() if asynchronous and ranks == 1 else None
            begin()
        elif step == 4:
            context.finish_saving() if asynchronous and ranks == 1 else None
            end()


def begin():
    if fault == "full":
        with open(home / "filler", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
    elif fault == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
    elif fault == "read-only":
        subprocess.run(["mount", "-o", "remount,bind,ro", home], check=True)
    elif fault == "blocked":
        (home / "saved").rename(home / "away")
        (home / "saved").write_text("a file")
    elif fault == "vanished":
        shutil.rmtree(home / "saved")


def end():
    if failures < 3:
        return
    if fault == "full":
        (home / "filler").unlink()
    elif fault == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    elif fault == "read-only":
        subprocess.run(["mount", "-o", "remount,bind,rw", home], check=True)
    elif fault == "blocked":
        (home / "saved").unlink()
        (home / "away").rename(home / "saved")


if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 1000), torch.nn.Linear(1000, 2))
    trainer = Trainer(
        model, num_processes=ranks, device="cpu", global_batch_size=4, callbacks=[Fault()],
        checkpoint_dir=home / "saved", tracking={"progress": "off"}, max_steps=5,
        checkpoint={"every_n_steps": 1, "keep_last": None, "asynchronous": asynchronous,
                    "max_failures": failures},
    )
    x = torch.randn(64, 4)
    history = trainer.fit((x, (x[:, 0] > 0).long()))
    print(json.dumps({"steps": history.steps["step"], "last": history.checkpoint}))
'''


def trained(
    folder: Path,
    fault: str,
    *,
    ranks: int = 1,
    saving: str = "synchronous",
    failures: int = 3,
    size: str = "",
) -> tuple[subprocess.CompletedProcess[str], list[int]]:
    """A run of five steps that saves at each; (how it ended, steps that are saved and whole).

    Args:
        folder: where the run lives.
        fault: what happens to its directory.
        ranks: processes.
        saving: synchronous or asynchronous.
        failures: ``checkpoint.max_failures``.
        size: of a file system of its own, in a mount namespace; empty for the host's.
    """
    if size and (why := needs_program("unshare", "test-tools")):
        leave_out(why)
    home, script = folder / "home", folder / "run.py"
    home.mkdir()
    script.write_text(SCRIPT)
    train = [sys.executable, str(script), fault, str(ranks), saving, str(home), str(failures)]
    look = [sys.executable, "-m", "distributed.cli", "checkpoint", "verify", str(home / "saved")]
    words = [" ".join(train), f"status=$?; {' '.join(look)} >&2; exit $status"]
    if size:
        words.insert(0, f"mount -t tmpfs -o size={size},mode=700 tmpfs {home} || exit 99")
    command = ["sh", "-c", "; ".join(words)]
    ended = subprocess.run(
        ["unshare", "-rm", *command] if size else command,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=200,
        check=False,
    )
    if ended.returncode == 99 or "unshare failed" in ended.stderr:
        leave_out(NO_MOUNTS)
    good = [
        line.split("step_")[1].split(":")[0] for line in ended.stderr.splitlines() if line.endswith(": good")
    ]
    return ended, sorted(map(int, good))


FAULTS = {
    "full": ("800k", "No space left on device"),
    "read-only": ("1m", "Read-only file system"),
    "limit": ("", "File too large"),
    "blocked": ("", "File exists"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_that_fails_is_reported_in_a_line_and_the_run_goes_on(fault: str, tmp_path: Path) -> None:
    size, words = FAULTS[fault]
    ended, saved = trained(tmp_path, fault, size=size)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1])["steps"] == [1, 2, 3, 4, 5]
    (line,) = [line for line in ended.stderr.splitlines() if "not saved" in line]
    assert "checkpoint of step 3 not saved (failure 1 in a row): " in line
    assert words in line
    assert saved == [1, 2, 4, 5]
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("ranks", "saving"), [(2, "synchronous"), (1, "asynchronous")])
def test_a_full_disk_is_every_ranks_failure_and_an_asynchronous_one_surfaces(
    ranks: int, saving: str, tmp_path: Path
) -> None:
    ended, saved = trained(tmp_path, "full", ranks=ranks, saving=saving, size="800k")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("checkpoint of step 3 not saved (failure 1 in a row): [Errno 28]") == 1
    assert saved == [1, 2, 4, 5]


def test_a_vanished_directory_is_made_again(tmp_path: Path) -> None:
    ended, saved = trained(tmp_path, "vanished")
    assert ended.returncode == 0, ended.stderr
    assert saved == [3, 4, 5]
    assert (tmp_path / "home" / "saved").stat().st_mode & 0o777 == 0o700


def test_the_stated_number_of_failures_stops_the_run_and_what_is_committed_stays(tmp_path: Path) -> None:
    ended, saved = trained(tmp_path, "full", failures=2, size="800k")
    assert ended.returncode == 1
    assert "checkpoint of step 4 not saved (failure 2 in a row): [Errno 28] No space left" in ended.stderr
    assert saved == [1, 2]
