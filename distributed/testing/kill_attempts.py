"""One start of a run under kill tests: what it is, and what its ranks have recorded."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from distributed.launch import child_process
from distributed.testing.kill_points import JOB, LENGTH

__all__ = ["CASES", "GLOBAL_BATCH", "KEPT", "Attempt", "Case", "Kill", "Scenario"]

_HANGS = 600.0
"""Seconds after which an attempt is taken to hang; on idle cores one takes five to twenty."""

_HANG_TIMEOUT, _SUSPENDED = 20.0, 26.0
"""`hang_timeout` of a run that is suspended, and for how long it is, in seconds."""

KEPT = 2
"""Number of newest checkpoints that a run keeps."""
GLOBAL_BATCH = 12
_SCRIPT = "from distributed.testing.kill_points import train\n\ntrain()\n"


@dataclass(frozen=True)
class Case:
    """A backend under test.

    Attributes:
        name: name in the table.
        fields: fields of the `Trainer`, beyond those that all runs share.
        keras: whether its model is Keras's.
        accumulation: micro-batches per step.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    keras: bool = False
    accumulation: int = 2


CASES = {
    case.name: case
    for case in (
        Case("pytorch-ddp", {"backend": "pytorch-ddp"}),
        Case("fsdp", {"backend": "fsdp"}),
        *(Case(f"deepspeed-{n}", {"backend": "deepspeed", "zero_stage": n}) for n in range(4)),
        Case("horovod", {"backend": "horovod"}),
        Case("tensorflow", {"backend": "tensorflow"}, keras=True),
        Case("ray", {"backend": "ray"}),
    )
}


@dataclass(frozen=True)
class Kill:
    """Moment at which a rank sends itself a signal: the `number`-th time it passes `point` in that start.

    Attributes:
        signal: SIGKILL; SIGTERM, SIGUSR1 or SIGINT, by which all ranks save and end; or SIGSTOP: all
            processes of the run are suspended for longer than its `hang_timeout`, or the rank alone while
            another run starts in the same directory.
    """

    rank: int
    point: str
    number: int = 1
    signal: str = "SIGKILL"

    def __str__(self) -> str:
        name = "" if self.signal == "SIGKILL" else f"{self.signal} to "
        return f"{name}rank {self.rank} at '{self.point}' ({self.number})"


@dataclass(frozen=True)
class Scenario:
    """A run and its kills, one for each of its first starts; after them it runs to its end.

    Attributes:
        kills: kill of each start.
        asynchronous: whether checkpoints are written asynchronously.
        epochs: number of epochs, of four steps each.
        sabotage: ``module:function`` that every rank of the restarted run calls: a broken form.
        name: ``kill``, ``stop``, ``signal``, ``suspend`` or ``second``.
        stop: event (``epoch`` or ``step``) and step at which a callback ends the run; None without.
    """

    case: Case
    ranks: int
    kills: tuple[Kill, ...] = ()
    asynchronous: bool = True
    epochs: int = 3
    sabotage: str | None = None
    name: str = "kill"
    stop: tuple[str, int] | None = None

    @property
    def kind(self) -> str:
        """Kind of its last kill, the point's first word, after the scenario's name."""
        kind = self.kills[-1].point.split()[0].rstrip(":")
        return kind if self.name == "kill" else f"{self.name}: {kind}"

    @property
    def last_step(self) -> int:
        """Step at which it ends."""
        return self.stop[1] if self.stop else self.epochs * -(-LENGTH // GLOBAL_BATCH)

    def fields(self, folder: Path) -> dict[str, Any]:
        """Fields of its `Trainer`."""
        # Optimizers with one and with two slots of state.
        optimizer = {"optimizer": "adamw"} if self.ranks == 2 else {"optimizer": "sgd", "momentum": 0.9}
        return {
            **self.case.fields,
            **optimizer,
            "num_processes": self.ranks,
            "device": "cpu",
            "global_batch_size": GLOBAL_BATCH,
            "gradient_accumulation_steps": self.case.accumulation,
            "epochs": self.epochs,
            "learning_rate": 0.01,
            "scheduler": "cosine",
            "warmup_steps": 2,
            "gradient_clipping": 1.0,
            "deterministic": True,
            "log_every_n_steps": 2,
            "checkpoint_dir": str(folder / "checkpoints"),
            "resume_from_checkpoint": True,
            "checkpoint": {"every_n_steps": 3, "asynchronous": self.asynchronous, "keep_last": KEPT},
            **({"hang_timeout": _HANG_TIMEOUT} if self.name == "suspend" else {}),
        }


def _suspend(pids: Sequence[int]) -> None:
    """Suspend the processes for longer than their `hang_timeout`."""
    for number, seconds in ((signal.SIGSTOP, _SUSPENDED), (signal.SIGCONT, 0.0)):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(seconds)


class Attempt:
    """One finished start of a run: exit code, output, records of its ranks.

    Attributes:
        pid: process of the command.
        second: start of the same run while this one was under way, None without.
    """

    second: Attempt | None = None

    def __init__(
        self, scenario: Scenario, home: Path, number: int, kill: Kill | None, folder: str = "start"
    ) -> None:
        self.kill, self.folder = kill, home / f"{folder}_{number}"
        self.folder.mkdir()
        job = {
            "folder": str(self.folder),
            "fields": scenario.fields(home),
            "keras": scenario.case.keras,
            "kill": kill and asdict(kill),
            "stop": scenario.stop,
            "sabotage": scenario.sabotage if number else None,
        }
        (self.folder / "job.json").write_text(json.dumps(job))
        (home / "train.py").write_text(_SCRIPT)
        env = {
            **os.environ,
            JOB: str(self.folder / "job.json"),
            "TMPDIR": str(home / "tmp"),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, "-m", "distributed.cli", "train", "--script", str(home / "train.py")]
        with (self.folder / "output.txt").open("w") as output:
            process = child_process.start(command, env, cwd=home, output=output)
            self.pid, self.code = process.pid, None
            if kill is not None and kill.signal == "SIGSTOP":
                self._at_stop(process, scenario, home, number)
            if process.has_ended(_HANGS):
                self.code = process.wait_end()
            else:
                os.kill(process.pid, signal.SIGKILL)
                process.wait_end()
            process.reap()
        self.output = (self.folder / "output.txt").read_text(errors="replace")

    def _at_stop(
        self, process: child_process.ChildProcess, scenario: Scenario, home: Path, number: int
    ) -> None:
        """Once a rank has stopped itself, start the run a second time, or suspend all processes of it."""
        while not process.has_ended(0.05):
            ranks = self._read().values()
            pids = [next(r["pid"] for r in records if "pid" in r) for records in ranks if records]
            stopped = [any("suspended" in r for r in records) for records in ranks if records]
            if not any(stopped):
                continue
            if scenario.name == "second":
                self.second = Attempt(scenario, home, number, None, "second")
                os.kill(pids[stopped.index(True)], signal.SIGCONT)
            else:
                _suspend([process.pid, *pids])
            return

    @cached_property
    def records(self) -> dict[int, list[dict[str, Any]]]:
        """rank -> its records, in order."""
        return self._read()

    def _read(self) -> dict[int, list[dict[str, Any]]]:
        paths = {int(path.stem.split("_")[1]): path for path in self.folder.glob("rank_*.jsonl")}
        return {
            # The last line may be half-written.
            rank: [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]
            for rank, path in sorted(paths.items())
        }

    def each(self, name: str) -> Iterator[dict[str, Any]]:
        """Every rank's records of that name."""
        for records in self.records.values():
            yield from (record for record in records if name in record)

    @property
    def start(self) -> int | None:
        """The step it resumed from; None when it did not get that far."""
        return next((record["start"] for record in self.each("start")), None)

    def remaining(self) -> list[psutil.Process]:
        """Processes of this start that still run, given the time to be reaped."""
        found = [process for process in psutil.process_iter() if self._is_ours(process)]
        alive: list[psutil.Process] = psutil.wait_procs(found, timeout=20)[1]
        return alive

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return bool(process.environ().get(JOB) == str(self.folder / "job.json"))
        except psutil.Error:
            return False
