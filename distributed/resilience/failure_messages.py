"""Text of failure reports: where the rank was, what the others were doing, what to try."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from distributed.resilience import stack_dumps
from distributed.resilience.collective_mismatch import Comparison
from distributed.resilience.failure_reports import FailureReport
from distributed.resilience.hang_diagnosis import Diagnosis, LoaderWorker, RankSnapshot, diagnose, name_ranks
from distributed.resilience.memory_failures import is_out_of_memory

_FRAMES = 8
_TRY = {
    "setup": "check the load of this rank's host: the ranks are still connecting",
    "prepare": "check the load of this rank's host, and the model's factory or compilation",
    "data": "check what the dataset reads from (a network disk, a lock, a connection opened before the"
    " ranks started), or use data loaders with num_workers=0",
    "callback": "do not block in a callback on work that only one rank performs; move that work to a"
    " background thread on rank 0",
    "save": "check that the file system of checkpoint_dir responds",
    "validation": "check the validation data and metrics of this rank",
    "forward": "check the stack below for a lock, an endless input or a device that does not respond",
    "apart": "call the same collectives in the same order on every rank: none inside `if rank == 0`,"
    " and the same number of batches on all",
    "together": "check the network between the ranks, and whether the loss of some rank leaves parameters"
    " out: pytorch-ddp, fsdp and horovod train such models with find_unused_parameters=True, deepspeed does"
    " not",
    "memory": "use a smaller batch_size with gradient_accumulation_steps or fewer loader workers,"
    " or give the job more memory",
    "SIGSEGV": "find the native library in the stack below; run once with num_workers=0 and without"
    " compiled extensions",
    "SIGBUS": "enlarge /dev/shm (docker run --shm-size), or use num_workers=0",
}


# -- hangs ---------------------------------------------------------------------------


def describe_stall(
    ranks: Sequence[RankSnapshot], diagnosis: Diagnosis, collectives: Comparison, ended: bool
) -> str:
    """The report of a run without progress: a paragraph, then stacks.

    Args:
        ranks: current snapshots, with stacks.
        collectives: the ranks' collectives, by torch's Flight Recorder.
        ended: whether the run is stopped.
    """
    culprits = [snapshot for rank in diagnosis.culprits for snapshot in ranks if snapshot.rank == rank]
    snapshot = culprits[0] if culprits else max(ranks, key=lambda one: one.age)
    parts = [
        _describe_stalled_rank(snapshot, diagnosis, collectives.differ),
        *_describe_others(culprits[1:]),
        *_describe_waiting(ranks, diagnosis),
    ]
    if snapshot.workers:
        workers = "; ".join(map(_describe_worker, snapshot.workers))
        parts.append(f"Rank {snapshot.rank} is waiting for {workers}.")
    parts += [collectives.text] if collectives.text else []
    same_place = diagnosis.kind == "together" and collectives.differ
    parts.append(f"Try: {_TRY['apart']}." if same_place else _suggest_fix(snapshot, diagnosis))
    if ended:
        parts.append("The run was stopped (hang_timeout).")
    elif diagnosis.kind != "together":
        parts.append(f"Next report after {2 * snapshot.age:.0f} s without progress.")
    shown = (
        culprits[:1] if diagnosis.kind in ("late", "alone") else [snapshot, *_pick_waiting(ranks, diagnosis)]
    )
    lines = [line for one in shown for line in _stack_lines(f"rank {one.rank}", one.stack)]
    lines += [
        line for one in snapshot.workers for line in _stack_lines(f"loader worker {one.pid}", one.stack)
    ]
    return "\n".join([" ".join(parts), *lines])


def _describe_stalled_rank(snapshot: RankSnapshot, diagnosis: Diagnosis, differ: bool) -> str:
    name, age = _name_rank(snapshot), f"for {snapshot.age:.0f} s"
    since = (datetime.now() - timedelta(seconds=snapshot.age)).strftime("%H:%M:%S")
    if diagnosis.kind == "together":
        who, have = f"R{name_ranks(diagnosis.waiting)[1:]}", "have" if len(diagnosis.waiting) > 1 else "has"
        lagging = "different collectives" if differ else "no rank is lagging"
        blocked = f"{who} ({snapshot.host}) {have} been blocked in {snapshot.place}"
        return f"{blocked} {age} (since {since}); {lagging}."
    if diagnosis.kind == "apart":
        where = f"Rank {snapshot.rank} has been blocked in {snapshot.place} {age} (since {since})"
        return f"The ranks are out of step: {name} {diagnosis.story}. {where}."
    how = {"T": "stopped by a signal (SIGSTOP)", "D": "waiting for a device or disk"}.get(snapshot.state)
    how = how or ("computing" if snapshot.busy else "idle")
    first = snapshot.busy and (snapshot.entry is None or snapshot.entry.step <= 1)
    remark = "; loading, compiling and a first step may take that long" if first else ""
    line = stack_dumps.own_line(snapshot.stack)
    where = f"{snapshot.place}{f', at {line}' if line else ''}"
    return f"{name} has made no progress {age} (since {since}). It is {how} in {where}{remark}."


def _describe_worker(worker: LoaderWorker) -> str:
    line = stack_dumps.own_line(worker.stack)
    does = {"T": "is stopped by a signal (SIGSTOP)", "": "has exited", "Z": "has exited"}.get(
        worker.state, "has not returned a batch"
    )
    return f"DataLoader worker pid {worker.pid}, which {does}{f', at {line}' if line else ''}"


def _describe_others(others: Sequence[RankSnapshot]) -> list[str]:
    if not others:
        return []
    names = name_ranks([snapshot.rank for snapshot in others])
    return [f"R{names[1:]} {'are' if len(others) > 1 else 'is'} in the same state."]


def _describe_waiting(ranks: Sequence[RankSnapshot], diagnosis: Diagnosis) -> list[str]:
    """Where the culprit blocks other ranks, place by place."""
    if diagnosis.kind not in ("late", "apart"):
        return []
    places = _group_by_place(snapshot for snapshot in ranks if snapshot.rank in diagnosis.waiting)
    word = f"for rank {diagnosis.culprits[0]} " if diagnosis.kind == "late" else ""
    clauses = [
        f"{name_ranks(who)} {'are' if len(who) > 1 else 'is'} waiting {word}in {place}"
        for place, who in places.items()
    ]
    return [_as_sentence("; ".join(clauses))] if clauses else []


def _pick_waiting(ranks: Sequence[RankSnapshot], diagnosis: Diagnosis) -> list[RankSnapshot]:
    """One rank that waits in another place than the culprit."""
    return [
        snapshot for snapshot in ranks if diagnosis.kind == "apart" and snapshot.rank in diagnosis.waiting
    ][:1]


def _suggest_fix(snapshot: RankSnapshot, diagnosis: Diagnosis) -> str:
    if diagnosis.kind in ("apart", "together"):
        return f"Try: {_TRY[diagnosis.kind]}."
    phase = snapshot.entry.outer if snapshot.entry else ""
    if snapshot.state == "T":
        return f"Try: continue the process (kill -CONT {snapshot.pid})."
    return f"Try: {_TRY.get(phase, _TRY['forward'])}."


def _stack_lines(name: str, stack: Sequence[stack_dumps.Frame]) -> list[str]:
    if not stack:
        return [f"{name}: no stack available"]
    return [
        f"{name}, most recent call last:",
        *(f"  {line}" for line in stack_dumps.innermost(stack, _FRAMES)),
    ]


# -- crashes -------------------------------------------------------------------------


def describe_crash(
    report: FailureReport, ranks: Sequence[RankSnapshot], failed: Iterable[int], folder: Path, oom: int
) -> FailureReport:
    """Add `FailureReport.account` to `report`: where the rank was, what the others were doing, what to try.

    A report of a lost or mismatched peer becomes one of the rank to blame, if the positions of
    the ranks identify it.

    Args:
        report: report of the rank that failed first.
        ranks: snapshots of all ranks of this host.
        folder: folder of the ranks' stack files.
        oom: number of processes that the kernel killed for lack of memory since the start.
    """
    if report.summary:
        return report  # complete already
    cause = _as_sentence(_describe_cause(report, oom))
    own = next((snapshot for snapshot in ranks if snapshot.rank == report.rank), None)
    if own is None or own.entry is None:
        return replace(report, account=cause)
    native = _read_native_stack(own, folder)
    if native and not report.traceback:
        lines = stack_dumps.innermost(native, _FRAMES)
        shown = ["Stack of the crash, most recent call last:", *(f"  {line}" for line in lines)]
        report = replace(report, traceback="\n".join(shown))
    if report.second_hand or report.exc_type == "SIGABRT":
        blamed = _reassign_blame(report, ranks, set(failed), native)
        if blamed is not None:
            return blamed
    places = _describe_positions(ranks, own.rank)
    text = f"Rank {own.rank} was in {own.place}{f', {places}' if places else ''}."
    account = " ".join(filter(None, [text, cause]))
    return replace(report, account=account, phase=own.entry.outer, step=own.entry.step)


def _reassign_blame(
    report: FailureReport,
    ranks: Sequence[RankSnapshot],
    failed: set[int],
    native: Sequence[stack_dumps.Frame],
) -> FailureReport | None:
    """The report of the rank that caused a failure in a collective; None if positions do not identify it."""
    late = "timed out" in report.what.lower() or "timeout" in report.what.lower()
    known = [
        _restore_failure_state(snapshot, report, failed, native)
        for snapshot in ranks
        if snapshot.entry is not None
    ]
    if report.exc_type == "SIGABRT" and next(s for s in known if s.rank == report.rank).does == "works":
        return None  # it did not abort in a collective
    diagnosis = diagnose(known)
    if diagnosis.kind != "apart" and not (diagnosis.kind == "late" and late):
        return None
    culprit = next(snapshot for snapshot in known if snapshot.rank == diagnosis.culprits[0])
    where = "; ".join(filter(None, [culprit.place, _describe_positions(known, culprit.rank)]))
    then = f"As a consequence, rank {report.rank} {report.what.splitlines()[0]}"
    if diagnosis.kind == "apart":
        what = f"is out of step: it {diagnosis.story}. {then}"
    else:
        what = f"did not reach the collective for {culprit.age:.0f} s. {then}"
    shown = f"rank {report.rank}:\n{report.traceback}" if report.traceback else ""
    if culprit.stack and culprit.rank != report.rank:
        shown = "\n".join(_stack_lines(f"rank {culprit.rank}", culprit.stack))
    assert culprit.entry is not None
    return replace(
        report,
        rank=culprit.rank,
        host=culprit.host,
        pid=culprit.pid,
        what=what,
        exc_type="OutOfStep" if diagnosis.kind == "apart" else "Hang",
        second_hand=False,
        blamed=True,
        traceback=shown,
        account=f"Rank {culprit.rank} was in {where}. {_suggest_fix(culprit, diagnosis)}",
        phase=culprit.entry.outer,
        step=culprit.entry.step,
    )


def _restore_failure_state(
    snapshot: RankSnapshot, report: FailureReport, failed: set[int], native: Sequence[stack_dumps.Frame]
) -> RankSnapshot:
    """`snapshot` at the failure: a rank that lost a peer was waiting, and an aborted one left its stack."""
    if snapshot.rank == report.rank and report.exc_type == "SIGABRT":
        return replace(snapshot, stack=native)
    return replace(snapshot, waited=True) if snapshot.rank in failed else snapshot


def _read_native_stack(snapshot: RankSnapshot, folder: Path) -> list[stack_dumps.Frame]:
    """The stack written by a crash in native code."""
    try:
        text = stack_dumps.stack_path(folder, snapshot.rank).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    _, fatal, rest = text.rpartition("Fatal Python error")
    return stack_dumps.parse(rest, snapshot.entry.thread if snapshot.entry else None) if fatal else []


def _describe_positions(ranks: Sequence[RankSnapshot], but: int) -> str:
    """``rank 0 in backward of step 3 (epoch 0); ...`` of the other ranks."""
    places = _group_by_place(
        snapshot for snapshot in ranks if snapshot.rank != but and snapshot.entry is not None
    )
    return "; ".join(f"{name_ranks(who)} in {place}" for place, who in places.items())


def _group_by_place(ranks: Iterable[RankSnapshot]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for snapshot in ranks:
        places.setdefault(snapshot.place, []).append(snapshot.rank)
    return places


def _describe_cause(report: FailureReport, oom: int) -> str:
    """The cause, if known, and what to try; empty if the traceback is enough."""
    if report.exc_type == "SIGKILL":
        if oom > 0:
            return f"the kernel killed a process of this job for lack of memory. Try: {_TRY['memory']}"
        return (
            "try: find the sender of the signal in the scheduler's log, or an out-of-memory kill in the"
            f" kernel's log (dmesg); then {_TRY['memory']}"
        )
    if is_out_of_memory(report.exc_type, report.what, report.exc_bases):
        limit = f" within its limit of {report.memory_limit} (ulimit -v)" if report.memory_limit else ""
        return f"the rank ran out of memory{limit}. Try: {_TRY['memory']}"
    if worker := re.search(r"DataLoader worker \(pid[^)]*\) [^.\n]*", report.what):
        ways = f"{_TRY['memory']}; for a bus error, {_TRY['SIGBUS']}"
        return f"a DataLoader worker died ({worker[0]}). Try: {ways}"
    return f"try: {_TRY[report.exc_type]}" if report.exc_type in ("SIGSEGV", "SIGBUS") else ""


def _as_sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _name_rank(snapshot: RankSnapshot) -> str:
    return f"rank {snapshot.rank} ({snapshot.host}, pid {snapshot.pid})"
