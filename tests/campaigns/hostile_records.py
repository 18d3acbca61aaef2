"""Records of runs that a hostile hand has written: read with notes, or refused in one sentence.

``python -m tests.campaigns.hostile_records --count 2000 --seed 0`` changes values, lines and bytes of a
record with two attempts and a failure, lists the runs below its folder and writes its report. Exit code 1
when any case crashed, raised anything but a UserError, printed a character that a terminal obeys, lost the
other run of the listing, or exceeded 5 s of processor time or 200 MB.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from distributed.commands import runs as listing
from distributed.errors import UserError
from distributed.operations.report.page import report
from distributed.operations.report.record_format import NAME
from distributed.operations.report.stitch import read_runs
from tests.campaigns.forked_cases import Outcome, run_cases
from tests.campaigns.hostile_values import dump, mutate

__all__ = ["BAD", "outcomes_of"]

BAD = ("crashed", "raised", "wrong")
"""Verdicts that must not occur; ``read`` and ``refused`` are the others."""
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def valid_lines() -> list[dict[str, Any]]:
    """A run that failed once and finished."""
    place = {
        "backend": "fsdp", "world_size": 2, "num_nodes": 1, "hosts": ["n1"], "device": "cpu",
        "precision": "fp32", "batch": {"global_batch_size": 8, "batch_size": 4}, "step": 0,
        "checkpoint": None, "total_steps": 4,
    }  # fmt: skip
    config = [
        ["epochs", 2, "flag"],
        ["checkpoint_dir", "run", "flag"],
        ["checkpoint.metric", None, "default"],
    ]
    figures = {"loss": 0.5, "samples_per_second": 100.0, "time_forward": 0.5, "val_loss": "nan"}
    start = {
        "kind": "start", "time": 1.7e9, "record": 1, "run": "r", "place": place, "config": config,
        "processes": [{"host": "n1", "pid": 7, "created": 1.7e9}], "versions": {"torch": "2.13.0"},
        "cores": 2, "name": "first", "script": "train.py",
    }  # fmt: skip
    lines: list[dict[str, Any]] = []
    for number, attempt in enumerate(("a", "b")):
        own = {**start, "attempt": attempt, "time": 1.7e9 + 100 * number}
        own["place"] = {**place, "step": 2 * number, "checkpoint": "run/step_2" if number else None}
        lines.append(own)
        for step in (1, 2):
            at = {"attempt": attempt, "step": 2 * number + step, "time": own["time"] + step}
            lines.append({"kind": "log", **at, "figures": figures})
        lines.append({"kind": "epoch", **at, "figures": {**figures, "val_accuracy": 0.5}})
        lines.append({"kind": "checkpoint", **at, "path": f"run/step_{at['step']}"})
        error = {"summary": "rank 1 failed", "rank": 1, "host": "n1", "step": 2, "traceback": "a\nb"}
        if number == 0:
            lines.append({"kind": "restart", "run": "r", "time": own["time"] + 3, "error": error})
    lines.append({"kind": "finish", "attempt": "b", "time": 1.7e9 + 200, "status": "finished"})
    totals = {"total_time": 9.5, "num_skipped_steps": 0, "best_accuracy": 0.5}
    lines.append({"kind": "end", "run": "r", "time": 1.7e9 + 201, "status": "finished", "totals": totals})
    return json.loads(json.dumps(lines))  # type: ignore[no-any-return]


def hostile(rng: random.Random) -> tuple[bytes, str]:
    """A changed record, and what was changed."""
    tree, done = mutate(valid_lines(), rng)
    lines = [dump(line).encode("utf-8", "surrogatepass") for line in tree]
    data = b"\n".join(lines) + b"\n"
    if rng.random() < 0.3:
        at = rng.randrange(len(data))
        data = (
            data[:at] + rng.choice([b"\x00", b"\xff\xfe", b"\n", b"{", b'"', os.urandom(0)]) + data[at + 1 :]
        )
        done += f"; byte {at}"
    if rng.random() < 0.1:
        data, done = data[: rng.randrange(len(data))], f"{done}; cut off"
    return data, done


def case(folder: Path, seed: int, number: int) -> tuple[str, str]:
    """Read a changed record by the listing and the report."""
    rng = random.Random(f"{seed}:{number}")
    data, done = hostile(rng)
    place = folder / "bad"
    place.mkdir(exist_ok=True)
    (place / NAME).write_bytes(data)
    output = io.StringIO()
    with redirect_stdout(output):
        listing.run(argparse.Namespace(folder=str(folder), json=rng.random() < 0.5))
    text = output.getvalue()
    if "good" not in text:
        return "wrong", f"the other run is not listed: {done}"
    if found := _OBEYED.search(text):
        return "wrong", f"{found[0]!r} printed: {done}"
    try:
        report(read_runs(place), None).encode()
    except UserError as error:
        return "refused", str(error)
    return "read", done


def outcomes_of(folder: Path, numbers: range, seed: int) -> list[Outcome]:
    """The outcomes of the cases `numbers` of `seed`."""
    good = folder / "good"
    good.mkdir()
    (good / NAME).write_text("".join(json.dumps(line) + "\n" for line in valid_lines()))
    report(read_runs(good), None)  # imports before the forks
    return run_cases(partial(case, folder, seed), numbers)


def main(argv: list[str] | None = None) -> int:
    """Run `--count` cases and print what became of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.hostile_records")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="records-"))
    try:
        outcomes = outcomes_of(folder, range(args.count), args.seed)
    finally:
        shutil.rmtree(folder)
    bad = [outcome for outcome in outcomes if outcome.verdict in BAD]
    for outcome in bad[:20]:
        print(f"case {outcome.number}: {outcome.verdict}: {outcome.detail}")
    counts = {verdict: sum(o.verdict == verdict for o in outcomes) for verdict in ("read", "refused", *BAD)}
    slowest = max(outcome.seconds for outcome in outcomes)
    print(f"{len(outcomes)} cases (seed {args.seed}): {counts}; slowest {slowest:.2f} s of processor time")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
