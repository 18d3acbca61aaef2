"""What is said of a rank that hangs or has failed: one paragraph, and what to try."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from distributed.resilience import stack_dumps
from distributed.resilience.hang_diagnosis import Seen, Verdict, Worker, judge, name_ranks

__all__ = ["as_text", "crashed", "stalled"]

_FRAMES = 8
_MEMORY = ("memoryerror", "outofmemory", "out of memory", "can't allocate memory", "cannot allocate memory")
_TRY = {
    "setup": "see what this rank's host is busy with: the ranks are only just meeting",
    "prepare": "see what this rank's host is busy with, and what the model's factory or compilation does",
    "data": "look at what the dataset reads from (a network disk, a lock, a connection opened before the"
    " ranks started), or try data loaders with num_workers=0",
    "callback": "let a callback wait for nothing that one rank alone must do, or do it on rank 0 in a thread",
    "save": "check that the file system of checkpoint_dir answers",
    "validation": "look at the validation data and metrics of this rank",
    "forward": "look at the stack below: a lock, an input that never ends or a device that does not answer"
    " would do that",
    "apart": "let every rank make the same collectives in the same order: none inside `if rank == 0`,"
    " and the same number of batches on all",
    "together": "look at the network between the ranks, and for a parameter that takes no part in some"
    " rank's loss (find_unused_parameters=True)",
    "memory": "use a smaller batch_size with gradient_accumulation_steps, fewer or leaner loader workers,"
    " or give the job more memory",
    "SIGSEGV": "look for the native library in the stack below; run once with num_workers=0 and without"
    " compiled extensions",
    "SIGBUS": "give /dev/shm more room (docker run --shm-size), or use num_workers=0",
}


# -- hangs ---------------------------------------------------------------------------


def stalled(ranks: Sequence[Seen], verdict: Verdict, ended: bool) -> str:
    """The report of a run that does not move: a paragraph, then stacks.

    Args:
        ranks: as seen just now, with their stacks.
        verdict: on them.
        ended: the run is ended for it.
    """
    culprits = [seen for rank in verdict.culprits for seen in ranks if seen.rank == rank]
    seen = culprits[0] if culprits else max(ranks, key=lambda one: one.age)
    parts = [_stall_sentence(seen, verdict), *_crowd(culprits[1:], verdict), *_others(ranks, verdict)]
    parts += [f"It waits for {'; '.join(map(_worker, seen.workers))}."] if seen.workers else []
    parts.append(_advice(seen, verdict))
    if ended:
        parts.append("The run was ended because of it (hang_timeout).")
    elif verdict.kind != "together":
        parts.append(f"The next report comes after {2 * seen.age:.0f} s.")
    shown = culprits[:1] if verdict.kind in ("late", "alone") else [seen, *_elsewhere(ranks, verdict)]
    lines = [line for one in shown for line in _stack_lines(f"rank {one.rank}", one.stack)]
    lines += [line for one in seen.workers for line in _stack_lines(f"loader worker {one.pid}", one.stack)]
    return "\n".join([" ".join(parts), *lines])


def _stall_sentence(seen: Seen, verdict: Verdict) -> str:
    name, age = _name(seen), f"for {seen.age:.0f} s"
    since = (datetime.now() - timedelta(seconds=seen.age)).strftime("%H:%M:%S")
    if verdict.kind == "together":
        who = f"R{name_ranks(verdict.waiting)[1:]} ({seen.host})"
        return f"{who} wait {age}, since {since}, in {seen.place}, and none is behind."
    if verdict.kind == "apart":
        where = f"it waits in {seen.place} {age}, since {since}"
        return f"The ranks are out of step: {name} {verdict.story}; {where}."
    how = {"T": "stopped by a signal (SIGSTOP)", "D": "waiting for a device or disk"}.get(seen.state)
    how = how or ("computing" if seen.busy else "idle")
    first = seen.busy and (seen.entry is None or seen.entry.step <= 1)
    remark = "; loading, compiling and a first step may take that long" if first else ""
    line = stack_dumps.own_line(seen.stack)
    where = f"{seen.place}{f', at {line},' if line else ''}"
    return f"{name} has not moved {age}: {how} in {where} since {since}{remark}."


def _worker(worker: Worker) -> str:
    line = stack_dumps.own_line(worker.stack)
    does = {"T": "stopped by a signal (SIGSTOP)", "": "gone", "Z": "gone"}.get(worker.state, "not done")
    return f"its loader worker (pid {worker.pid}), which is {does}{f', at {line}' if line else ''}"


def _crowd(others: Sequence[Seen], verdict: Verdict) -> list[str]:
    return [f"So it is with {name_ranks([seen.rank for seen in others])}."] if others else []


def _others(ranks: Sequence[Seen], verdict: Verdict) -> list[str]:
    """Where the ranks wait that the culprit holds up, place by place."""
    if verdict.kind not in ("late", "apart"):
        return []
    places: dict[str, list[int]] = {}
    for seen in ranks:
        if seen.rank in verdict.waiting:
            places.setdefault(seen.place, []).append(seen.rank)
    word = "for it " if verdict.kind == "late" else ""
    told = [
        f"{name_ranks(who)} wait{'' if len(who) > 1 else 's'} {word}in {place}"
        for place, who in places.items()
    ]
    text = "; ".join(told)
    return [f"{text[0].upper()}{text[1:]}."] if told else []


def _elsewhere(ranks: Sequence[Seen], verdict: Verdict) -> list[Seen]:
    """One of those who wait elsewhere."""
    return [seen for seen in ranks if verdict.kind == "apart" and seen.rank in verdict.waiting][:1]


def _advice(seen: Seen, verdict: Verdict) -> str:
    if verdict.kind in ("apart", "together"):
        return f"Try: {_TRY[verdict.kind]}."
    phase = seen.entry.outer if seen.entry else ""
    if seen.state == "T":
        return f"Try: continue it (kill -CONT {seen.pid})."
    return f"Try: {_TRY.get(phase, _TRY['forward'])}."


def _stack_lines(name: str, stack: Sequence[stack_dumps.Frame]) -> list[str]:
    if not stack:
        return [f"{name} shows no stack"]
    return [
        f"{name}, most recent call last:",
        *(f"  {line}" for line in stack_dumps.innermost(stack, _FRAMES)),
    ]


# -- crashes -------------------------------------------------------------------------


def crashed(
    report: dict[str, Any], ranks: Sequence[Seen], failed: Iterable[int], folder: Path, oom: int
) -> dict[str, Any]:
    """`report` with ``account``: where the rank was, what the others did, what to try.

    A report that only tells of a lost or mismatched peer becomes one of the rank to blame, where
    the ranks' places tell.

    Args:
        report: as `failures.report_of` makes it.
        ranks: all ranks of this host.
        failed: the ranks that failed.
        folder: where ranks leave their stacks.
        oom: processes that the kernel ended for lack of memory since the start.
    """
    if report.get("summary"):
        return {**report, "account": ""}  # it was told whole where it was found
    by_rank = {seen.rank: seen for seen in ranks}
    own = by_rank.get(report["rank"])
    if own is None or own.entry is None:
        return {**report, "account": _sentence(_cause(report, oom))}
    native = _native_stack(own, folder)
    if native and not report.get("traceback"):
        lines = stack_dumps.innermost(native, _FRAMES)
        report["traceback"] = "\n".join(
            ["Stack of the crash, most recent call last:", *(f"  {x}" for x in lines)]
        )
    if report["second_hand"] or report["exc_type"] == "SIGABRT":
        blamed = _blame(report, ranks, set(failed), native)
        if blamed is not None:
            return blamed
    places = _places(ranks, {own.rank})
    text = f"It was in {own.place}{f', {places}' if places else ''}."
    return {
        **report,
        "account": " ".join(filter(None, [text, _sentence(_cause(report, oom))])),
        "phase": own.entry.outer if own.entry.phase == "communication" else own.entry.phase,
        "step": own.entry.step,
    }


def _blame(
    report: dict[str, Any], ranks: Sequence[Seen], failed: set[int], native: Sequence[stack_dumps.Frame]
) -> dict[str, Any] | None:
    """What the ranks' places say of a failure in a collective; None when they do not tell."""
    late = "timed out" in report["what"].lower() or "timeout" in report["what"].lower()
    known = [_at_failure(seen, report, failed, native) for seen in ranks if seen.entry is not None]
    if report["exc_type"] == "SIGABRT" and next(s for s in known if s.rank == report["rank"]).does == "works":
        return None  # it was about something of its own
    verdict = judge(known)
    if verdict.kind != "apart" and not (verdict.kind == "late" and late):
        return None
    culprit = next(seen for seen in known if seen.rank == verdict.culprits[0])
    where = "; ".join(filter(None, [culprit.place, _places(known, {culprit.rank})]))
    said = f"rank {report['rank']} then {report['what'].splitlines()[0]}"
    if verdict.kind == "apart":
        what = f"is out of step: it {verdict.story}; {said}"
    else:
        what = f"did not come for {culprit.age:.0f} s; {said}"
    entry = culprit.entry
    assert entry is not None
    shown = f"rank {report['rank']}:\n{report['traceback']}" if report.get("traceback") else ""
    if culprit.stack and culprit.rank != report["rank"]:
        shown = "\n".join(_stack_lines(f"rank {culprit.rank}", culprit.stack))
    return {
        **report,
        "rank": culprit.rank,
        "host": culprit.host,
        "pid": culprit.pid,
        "what": what,
        "exc_type": "OutOfStep" if verdict.kind == "apart" else "Hang",
        "second_hand": False,
        "blamed": True,
        "traceback": shown,
        "account": f"It was in {where}. {_advice(culprit, verdict)}",
        "phase": entry.outer if entry.phase == "communication" else entry.phase,
        "step": entry.step,
    }


def _at_failure(
    seen: Seen, report: dict[str, Any], failed: set[int], native: Sequence[stack_dumps.Frame]
) -> Seen:
    """`seen` as it was: one that lost a peer had waited, and an aborted one left its stack."""
    if seen.rank == report["rank"] and report["exc_type"] == "SIGABRT":
        return replace(seen, stack=native)
    return replace(seen, waited=True) if seen.rank in failed else seen


def _native_stack(seen: Seen, folder: Path) -> list[stack_dumps.Frame]:
    """The stack that a crash in native code left."""
    try:
        text = stack_dumps.stack_path(folder, seen.rank).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    _, fatal, rest = text.rpartition("Fatal Python error")
    return stack_dumps.parse(rest, seen.entry.thread if seen.entry else None) if fatal else []


def _places(ranks: Sequence[Seen], but: set[int]) -> str:
    """``rank 0 in backward of step 3 (epoch 0); ...`` of the other ranks."""
    places: dict[str, list[int]] = {}
    for seen in ranks:
        if seen.rank not in but and seen.entry is not None:
            places.setdefault(seen.place, []).append(seen.rank)
    return "; ".join(f"{name_ranks(who)} in {place}" for place, who in places.items())


def _cause(report: dict[str, Any], oom: int) -> str:
    """What is known of the cause, and what to try; empty where the traceback says it all."""
    text = f"{report['exc_type']} {report['what']}".lower()
    if report["exc_type"] == "SIGKILL":
        if oom > 0:
            return f"the kernel ended a process of this job for lack of memory. Try: {_TRY['memory']}"
        return (
            "try: see who sent it, in the batch system's log, or in the kernel's (dmesg) for a lack of"
            f" memory; then {_TRY['memory']}"
        )
    if any(word in text for word in _MEMORY):
        limit = (
            f" within its limit of {report['memory_limit']} (ulimit -v)" if report.get("memory_limit") else ""
        )
        return f"it ran out of memory{limit}. Try: {_TRY['memory']}"
    if worker := re.search(r"DataLoader worker \(pid[^)]*\) [^.\n]*", report["what"]):
        ways = f"{_TRY['memory']}; for a bus error, {_TRY['SIGBUS']}"
        return f"a loader worker was lost ({worker[0]}). Try: {ways}"
    return f"try: {_TRY[report['exc_type']]}" if report["exc_type"] in ("SIGSEGV", "SIGBUS") else ""


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _name(seen: Seen) -> str:
    return f"rank {seen.rank} ({seen.host}, pid {seen.pid})"


def as_text(report: dict[str, Any]) -> str:
    """A failure's report as it is written to a file."""
    what = f"rank {report['rank']} ({report['host']}, pid {report['pid']}) {report['what']}"
    head = f"{report.get('summary') or what}. {report['account']}".rstrip(". ") + "."
    return "\n\n".join(part for part in (head, report.get("traceback", "")) if part)
