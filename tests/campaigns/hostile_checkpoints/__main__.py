"""Checkpoints that a hostile hand has written, with their hashes: refused or restored exactly.

``python -m tests.campaigns.hostile_checkpoints --count 10000 --seed 0`` changes manifests, indexes, marks and
shards of the newer of two checkpoints and resumes. Exit code 1 when any case crashed, raised anything but a
UserError, exceeded 5 s of processor time or 200 MB, restored other values than the files hold, or kept a
resume from the older checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.campaigns.hostile_checkpoints.cases import BAD, outcomes_of


def main(words: list[str] | None = None) -> int:
    """Print counts, and every case that is neither refused nor restored exactly."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.hostile_checkpoints", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument("--count", type=int, default=10_000, help="Number of cases.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="Number of the first case.")
    parser.add_argument("--verbose", action="store_true", help="Print every case.")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="distributed-", dir=_fast()) as folder:
        outcomes = outcomes_of(Path(folder), range(args.first, args.first + args.count), args.seed)
    bad = [outcome for outcome in outcomes if outcome.verdict in BAD]
    for outcome in outcomes if args.verbose else bad:
        print(f"case {outcome.number}: {outcome.verdict}: {outcome.detail}")
    counts = Counter(outcome.verdict for outcome in outcomes)
    slowest = max((outcome.seconds for outcome in outcomes), default=0.0)
    shown = ", ".join(f"{count:,} {verdict}" for verdict, count in counts.most_common())
    total = f"{len(outcomes):,} cases with seed {args.seed}"
    print(f"{total}: {shown}; the slowest took {slowest:.2f} s of processor time")
    return 1 if bad else 0


def _fast() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


if __name__ == "__main__":
    sys.exit(main())
