"""Lists of test ids, and that none of them went without a word.

::

    python -m tests.support.collected_ids collect before.txt
    ...                                       # move files, merge tests
    python -m tests.support.collected_ids collect after.txt
    python -m tests.support.collected_ids compare before.txt after.txt --map moved.json

A map is a JSON object: old id -> id that has its assertions now, or old file or folder -> new one. An entry
for an id wins over one for its file, and that over one for its folder.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["collect", "compare", "main", "renamed"]


def collect(words: Sequence[str] = ()) -> list[str]:
    """The ids of all tests, sorted. `words` are further arguments of pytest.

    Raises:
        RuntimeError: a file could not be collected.
    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    return sorted(line for line in done.stdout.splitlines() if "::" in line)


def renamed(test: str, moved: Mapping[str, str]) -> str:
    """What the test `test` is called now, by `moved`."""
    if test in moved:
        return moved[test]
    path, _, name = test.partition("::")
    for old in (path, *(str(folder) for folder in Path(path).parents)):
        if old in moved:
            return f"{moved[old]}{path[len(old) :]}::{name}"
    return test


def compare(before: Sequence[str], after: Sequence[str], moved: Mapping[str, str]) -> tuple[list[str], int]:
    """(ids of `before` that are not in `after` under their new names, how many are only in `after`)."""
    there, found = set(after), {test: renamed(test, moved) for test in before}
    return [test for test, now in found.items() if now not in there], len(there - set(found.values()))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 when an id is gone."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.collected_ids")
    verbs = parser.add_subparsers(dest="verb", required=True)
    write = verbs.add_parser("collect", help="write all test ids to a file, one to a line")
    write.add_argument("file", type=Path)
    check = verbs.add_parser("compare", help="fail if an id is gone that no map accounts for")
    check.add_argument("before", type=Path)
    check.add_argument("after", type=Path)
    check.add_argument("--map", type=Path, action="append", default=[], help="JSON file; later ones win")
    args, more = parser.parse_known_args(argv)
    if args.verb == "collect":
        ids = collect(more)
        args.file.write_text("".join(f"{test}\n" for test in ids))
        print(f"{len(ids)} tests")
        return 0
    before, after = (
        [line for line in path.read_text().splitlines() if "::" in line] for path in (args.before, args.after)
    )
    moved = {old: new for path in args.map for old, new in json.loads(path.read_text()).items()}
    gone, new = compare(before, after, moved)
    for test in gone:
        print(f"gone: {test}")
    print(f"{len(before)} before, {len(after)} after, {new} new, {len(gone)} gone")
    return 1 if gone else 0


if __name__ == "__main__":
    sys.exit(main())
