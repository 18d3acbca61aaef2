"""Kill a run, restart it until it ends, and compare it with an uninterrupted one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import psutil

from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.diff import differences
from distributed.checkpoint.reader import PortableReader, verify
from distributed.launch import child_process
from distributed.testing.kill_points import JOB, LENGTH
from distributed.testing.oracle import sample_order

__all__ = ["CASES", "Case", "Kill", "Outcome", "Reference", "Scenario", "reference_of", "run_scenario"]

_HANGS = 600.0
"""Seconds after which an attempt is taken to hang; on idle cores one takes five to twenty."""

_STARTS = 3
"""Attempts of a start whose ranks never run: on a busy host Ray gives up its cluster."""

_KEPT = 2
_GLOBAL_BATCH = 12
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
    """Moment at which a rank kills itself: the `number`-th time it passes `point` in that start."""

    rank: int
    point: str
    number: int = 1

    def __str__(self) -> str:
        return f"rank {self.rank} at '{self.point}' ({self.number})"


@dataclass(frozen=True)
class Scenario:
    """A run and its kills, one for each of its first starts; after them it runs to its end.

    Attributes:
        kills: kill of each start.
        asynchronous: whether checkpoints are written asynchronously.
        epochs: number of epochs, of four steps each.
        sabotage: ``module:function`` that every rank of the restarted run calls: a broken form.
    """

    case: Case
    ranks: int
    kills: tuple[Kill, ...] = ()
    asynchronous: bool = True
    epochs: int = 3
    sabotage: str | None = None

    @property
    def kind(self) -> str:
        """Kind of its last kill: the point's first word."""
        return self.kills[-1].point.split()[0].rstrip(":")

    def fields(self, folder: Path) -> dict[str, Any]:
        """Fields of its `Trainer`."""
        # Optimizers with one and with two slots of state.
        optimizer = {"optimizer": "adamw"} if self.ranks == 2 else {"optimizer": "sgd", "momentum": 0.9}
        return {
            **self.case.fields,
            **optimizer,
            "num_processes": self.ranks,
            "device": "cpu",
            "global_batch_size": _GLOBAL_BATCH,
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
            "checkpoint": {"every_n_steps": 3, "asynchronous": self.asynchronous, "keep_last": _KEPT},
        }


@dataclass
class Outcome:
    """Problems of a scenario; empty lists mean that there were none.

    Attributes:
        bits: differences from the uninterrupted run.
        samples: samples that were missing from a step, or in it twice.
        lost: committed checkpoints that were missing at the restart.
        left: files and processes left behind.
        misreported: exit codes and messages that do not name the failure.
        reached: number of kills that took place.
        unstarted: starts whose ranks never ran, which were repeated.
        seconds: seconds from each kill to the next trained step.
    """

    bits: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    misreported: list[str] = field(default_factory=list)
    reached: int = 0
    unstarted: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """All of them."""
        return [*self.bits, *self.samples, *self.lost, *self.left, *self.misreported]


class Attempt:
    """One finished start of a run: exit code, output, records of its ranks."""

    def __init__(self, scenario: Scenario, home: Path, number: int, kill: Kill | None) -> None:
        self.kill, self.folder = kill, home / f"start_{number}"
        self.folder.mkdir()
        job = {
            "folder": str(self.folder),
            "fields": scenario.fields(home),
            "keras": scenario.case.keras,
            "kill": kill and {"rank": kill.rank, "point": kill.point, "number": kill.number},
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
            self.code: int | None = None
            if process.has_ended(_HANGS):
                self.code = process.wait_end()
            else:
                os.kill(process.pid, signal.SIGKILL)
                process.wait_end()
            process.reap()
        self.output = (self.folder / "output.txt").read_text(errors="replace")

    @cached_property
    def records(self) -> dict[int, list[dict[str, Any]]]:
        """rank -> its records, in order."""
        paths = {int(path.stem.split("_")[1]): path for path in self.folder.glob("rank_*.jsonl")}
        return {
            rank: [json.loads(line) for line in path.read_text().splitlines()]
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


@dataclass
class Reference:
    """An uninterrupted run: its last checkpoint, and how often each rank passed each point."""

    checkpoint: str
    census: dict[int, dict[str, int]]


def reference_of(scenario: Scenario) -> tuple[Reference, Path]:
    """Run `scenario` without its kills. Also the folder, which is the caller's to remove.

    Raises:
        RuntimeError: it failed, or trained on other samples than the oracle.
    """
    home, outcome = _home(), Outcome()
    attempt = _started(scenario, home, 0, None, outcome)
    if attempt.code == 0:
        _check_samples(scenario, [attempt], outcome)
        _check_left(home, [attempt], outcome)
    if attempt.code != 0 or outcome.problems:
        raise RuntimeError(f"the uninterrupted run failed: {outcome.problems}\n{attempt.output}")
    census = {
        rank: [record["census"] for record in records if "census" in record][-1]
        for rank, records in attempt.records.items()
    }
    path = _store(home).latest()
    assert path is not None
    return Reference(path, census), home


def run_scenario(scenario: Scenario, reference: Reference) -> Outcome:
    """Start, kill, restart, finish and compare the run."""
    home, outcome, attempts = _home(), Outcome(), list[Attempt]()
    try:
        for number, kill in enumerate([*scenario.kills, None]):
            before = _kept(home)
            attempt = _started(scenario, home, number, kill, outcome)
            attempts.append(attempt)
            _check_end(attempt, outcome)
            _check_going_on(attempts, before, _kept(home), outcome)
            if attempt.code in (0, None):
                break
        _check_samples(scenario, attempts, outcome)
        _check_left(home, attempts, outcome)
        _check_bits(home, reference, outcome)
        _note_seconds(attempts, outcome)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return outcome


def _started(scenario: Scenario, home: Path, number: int, kill: Kill | None, outcome: Outcome) -> Attempt:
    for _ in range(_STARTS):
        attempt = Attempt(scenario, home, number, kill)
        if attempt.records or attempt.code in (0, None):
            break
        outcome.unstarted += 1
        shutil.rmtree(attempt.folder)
    return attempt


def _home() -> Path:
    # Short: Ray's sockets lie under it.
    home = Path(mkdtemp(prefix="kills-", dir="/tmp"))
    (home / "tmp").mkdir()
    return home


def _store(home: Path) -> PortableCheckpointer:
    return PortableCheckpointer(str(home / "checkpoints"), keep_last=None)


def _kept(home: Path) -> list[int]:
    """Steps of the good checkpoints, newest first."""
    store = _store(home)
    return [step for step in store.steps() if not verify(store.path_of(step))]


def _check_end(attempt: Attempt, outcome: Outcome) -> None:
    killed = [rank for rank, records in attempt.records.items() if any("killed" in r for r in records)]
    outcome.reached += len(killed)
    if attempt.code is None:
        outcome.misreported.append(f"{attempt.folder.name} hung\n{attempt.output[-2000:]}")
    elif not killed and attempt.code != 0:
        outcome.misreported.append(
            f"no rank was killed, and it ended with {attempt.code}\n{attempt.output[-2000:]}"
        )
    elif killed and attempt.code != 1:
        outcome.misreported.append(f"a rank was killed, and the exit code is {attempt.code}")
    elif killed and not all(f"rank {rank}" in attempt.output for rank in killed):
        outcome.misreported.append(f"rank {killed[0]} was killed and is not named\n{attempt.output[-2000:]}")


def _check_going_on(
    attempts: Sequence[Attempt], before: list[int], after: list[int], outcome: Outcome
) -> None:
    start = attempts[-1].start
    if start is not None and start != max(before, default=0):
        outcome.lost.append(f"resumed from step {start}; good checkpoints were {before}")
    committed = sorted({record["committed"] for a in attempts for record in a.each("committed")})
    missing = set(committed[-_KEPT:]) - set(after)
    if missing:
        outcome.lost.append(f"committed and gone: steps {sorted(missing)}; there are {after}")


def _check_samples(scenario: Scenario, attempts: Sequence[Attempt], outcome: Outcome) -> None:
    """Every step that counts was made of its samples of the oracle's order, each once."""
    begun = [attempt for attempt in attempts if attempt.start is not None]
    starts = [attempt.start or 0 for attempt in begun]
    per_epoch = -(-LENGTH // _GLOBAL_BATCH)
    total = scenario.epochs * per_epoch
    found: dict[int, list[int]] = {step: [] for step in range(1, total + 1)}
    for attempt, low, high in zip(begun, starts, [*starts[1:], total], strict=True):
        for record in attempt.each("step"):
            if low < record["step"] <= high:
                found[record["step"]] += record["ids"]
    for step, ids in found.items():
        epoch, index = divmod(step - 1, per_epoch)
        place = index * _GLOBAL_BATCH
        wanted = sample_order(LENGTH, 0, epoch)[place : place + _GLOBAL_BATCH].tolist()
        if sorted(ids) != sorted(wanted):
            outcome.samples.append(f"step {step} has samples {sorted(ids)} instead of {sorted(wanted)}")


def _check_left(home: Path, attempts: Sequence[Attempt], outcome: Outcome) -> None:
    saved = (path.name for path in (home / "checkpoints").glob("*"))
    hidden = [name for name in saved if name.startswith((".tmp-", ".gc-", ".lease-", "superseded_"))]
    private = [path.name for path in (home / "tmp").glob("distributed-*")]
    outcome.left += [f"left behind: {name}" for name in (*hidden, *private)]
    for attempt in attempts:
        for process in attempt.remaining():
            outcome.left.append(f"still runs: {process.pid} {' '.join(process.cmdline())[:100]}")
            process.send_signal(signal.SIGKILL)


def _check_bits(home: Path, reference: Reference, outcome: Outcome) -> None:
    path = _store(home).latest()
    if path is None:
        outcome.bits.append("no checkpoint at the end")
    else:
        outcome.bits += differences(PortableReader(path), PortableReader(reference.checkpoint))


def _note_seconds(attempts: Sequence[Attempt], outcome: Outcome) -> None:
    for killed, later in pairwise(attempts):
        end = next((record["time"] for record in killed.each("killed")), None)
        first = min((record["time"] for record in later.each("step")), default=None)
        if end is not None and first is not None:
            outcome.seconds.append(first - end)
