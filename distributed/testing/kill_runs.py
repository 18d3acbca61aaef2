"""Kill, preempt or suspend a run, restart it until it ends, and compare it with an uninterrupted one."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp

from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.diff import differences
from distributed.checkpoint.reader import PortableReader, verify
from distributed.testing.kill_attempts import CASES, GLOBAL_BATCH, KEPT, Attempt, Case, Kill, Scenario
from distributed.testing.kill_points import LENGTH
from distributed.testing.oracle import sample_order

__all__ = ["CASES", "Case", "Kill", "Outcome", "Reference", "Scenario", "reference_of", "run_scenario"]

_STARTS = 3
"""Attempts of a start whose ranks never run: on a busy host Ray gives up its cluster."""

_CODES = {"SIGTERM": 75, "SIGUSR1": 75, "SIGINT": 130}
"""Exit code of the command after a signal."""


@dataclass
class Outcome:
    """Problems of a scenario; empty lists mean that there were none.

    Attributes:
        bits: differences from the uninterrupted run.
        samples: samples that were missing from a step, or in it twice.
        lost: committed checkpoints that were missing at the restart.
        repeated: what a resume did to a run that had ended, or a second run to one under way.
        left: files and processes left behind.
        misreported: exit codes and messages that do not name the failure.
        broken: why the test itself could not go on.
        reached: number of kills that took place.
        unstarted: starts whose ranks never ran, which were repeated.
        seconds: seconds from each kill to the next trained step.
    """

    bits: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    misreported: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    reached: int = 0
    unstarted: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """All of them."""
        training = [*self.bits, *self.samples, *self.lost, *self.repeated]
        return [*training, *self.left, *self.misreported, *self.broken]


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
            _check_second(attempt, outcome)
            _check_going_on(attempts, before, _kept(home), outcome)
            if attempt.code in (0, None):
                break
        if scenario.name in ("stop", "signal") and attempt.code == 0:
            attempts.append(_started(scenario, home, len(attempts), None, outcome))
            _check_idle(attempts[-1], scenario.last_step, outcome)
        _check_samples(scenario, attempts, outcome)
        _check_left(home, [*attempts, *filter(None, (a.second for a in attempts))], outcome)
        _check_bits(home, reference, outcome)
        _note_seconds(attempts, outcome)
    except Exception as error:  # noqa: BLE001 - the other runs go on, and this one is listed
        outcome.broken.append(f"the test itself failed: {type(error).__name__}: {error}")
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
    signalled = [*attempt.each("signalled")]
    outcome.reached += len(killed) + len(signalled) + len([*attempt.each("suspended")])
    expected = _CODES[attempt.kill.signal] if signalled and attempt.kill is not None else 0
    if attempt.code is None:
        outcome.misreported.append(f"{attempt.folder.name} hung\n{attempt.output[-2000:]}")
    elif signalled and attempt.code in (0, expected):
        return  # 0 where the run was ending
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
    missing = set(committed[-KEPT:]) - set(after)
    if missing:
        outcome.lost.append(f"committed and gone: steps {sorted(missing)}; there are {after}")


def _check_idle(attempt: Attempt, last_step: int, outcome: Outcome) -> None:
    """A run that has ended does nothing when it is resumed."""
    done = [*attempt.each("step"), *(r for r in attempt.each("census") if r["census"].get("evaluate end"))]
    if attempt.code != 0 or attempt.start != last_step or done:
        outcome.repeated.append(
            f"a resume of the ended run began at step {attempt.start}, took {len(done)} steps or validations,"
            f" and ended with {attempt.code}"
        )


def _check_second(attempt: Attempt, outcome: Outcome) -> None:
    """A second run in the same directory is refused before its first step, and the error names the first."""
    second = attempt.second
    if second is None:
        return
    pids = [attempt.pid, *(record["pid"] for record in attempt.each("pid"))]
    named = any(f"pid {pid} " in second.output for pid in pids)
    steps = len([*second.each("step")])
    if second.code != 2 or steps or not named:
        outcome.repeated.append(
            f"a second run beside {pids} ended with {second.code} after {steps} steps\n"
            f"{second.output[-2000:]}"
        )


def _check_samples(scenario: Scenario, attempts: Sequence[Attempt], outcome: Outcome) -> None:
    """Every step that counts was made of its samples of the oracle's order, each once."""
    begun = [attempt for attempt in attempts if attempt.start is not None]
    starts = [attempt.start or 0 for attempt in begun]
    per_epoch, total = -(-LENGTH // GLOBAL_BATCH), scenario.last_step
    found: dict[int, list[int]] = {step: [] for step in range(1, total + 1)}
    for attempt, low, high in zip(begun, starts, [*starts[1:], total], strict=True):
        for record in attempt.each("step"):
            if low < record["step"] <= high:
                found[record["step"]] += record["ids"]
    for step, ids in found.items():
        epoch, index = divmod(step - 1, per_epoch)
        place = index * GLOBAL_BATCH
        wanted = sample_order(LENGTH, 0, epoch)[place : place + GLOBAL_BATCH].tolist()
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
