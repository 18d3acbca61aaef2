"""Choose the groups that a push runs beside the tests of every push: those whose guarded files have changed.

The change is the difference to the commit of the last green `make campaigns`. Groups are taken while their
recorded seconds fit into the time that is left; what is put off is printed with its reason.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns.last_green import LastGreen
from tests.support.tiers import Group

__all__ = [
    "LIMIT",
    "Choice",
    "ChangedFiles",
    "changed_files",
    "check_counts",
    "choose",
    "reasons",
]

ROOT = Path(__file__).parents[2]
LIMIT = 70 * 60
"""Seconds of a whole `.ci/run`; it has to end within 90 minutes."""
_UNKNOWN = 120.0
"""Seconds that a group counts before its first recorded run."""

ChangedFiles = Callable[[str], "list[str] | None"]


@dataclass(frozen=True)
class Choice:
    """Groups of a push.

    Attributes:
        chosen: names of groups to run.
        put_off: names of groups whose guards have changed and that do not fit.
        reasons: name of each of both -> the file, or the sentence, that chose it.
    """

    chosen: list[str]
    put_off: list[str]
    reasons: Mapping[str, str]


def changed_files(commit: str) -> list[str] | None:
    """Files of the working tree that differ from `commit`; None if the clone lacks it.

    Raises:
        ValueError: `commit` is no ancestor of HEAD.
    """
    if _git("cat-file", "-e", f"{commit}^{{commit}}") is None:
        return None
    if _git("merge-base", "--is-ancestor", commit, "HEAD") is None:
        raise ValueError(
            f"docs/test-times.md: commit {commit} of the last green campaigns is no ancestor of HEAD."
            " Run `make campaigns` on this branch, which writes the line."
        )
    found = _git("diff", "--name-only", "--no-renames", commit)
    assert found is not None
    return found.splitlines()


def _git(*words: str) -> str | None:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def reasons(groups: Iterable[Group], last: LastGreen | None, changed: ChangedFiles) -> dict[str, str]:
    """Group name -> why its tests have to run again."""
    if last is None:
        return dict.fromkeys((group.name for group in groups), "no green campaigns are recorded")
    files = changed(last.commit)
    if files is None:
        return dict.fromkeys((group.name for group in groups), f"this clone lacks commit {last.commit[:12]}")
    found = {}
    for group in groups:
        guards = [file for file in files if group.is_guarded_by(file)]
        if guards:
            found[group.name] = f"{guards[0]} has changed" + (
                f", and {n} more" if (n := len(guards) - 1) else ""
            )
        elif group.name not in last.groups:
            found[group.name] = "it is not among the last green campaigns"
    return found


def check_counts(last: LastGreen | None, counts: Mapping[str, int], due: Iterable[str]) -> None:
    """Check that the recorded run had the tests that are collected now.

    Args:
        counts: group name -> number of tests that a push leaves out.
        due: groups that run again, or are put off, because of a change.

    Raises:
        ValueError: a group that no change touches has another number of tests.
    """
    for name, result in (last.groups if last else {}).items():
        if name not in due and counts.get(name, 0) != result.tests:
            raise ValueError(
                f"docs/test-times.md: the last green campaigns had {result.tests} tests of {name},"
                f" the collection has {counts.get(name, 0)}. Run `make campaigns` again."
            )


def choose(due: Mapping[str, str], seconds: Mapping[str, float], left: float, processes: int) -> Choice:
    """Take groups, the shortest first, while they fit.

    Args:
        due: group name -> reason.
        seconds: group name -> recorded seconds of its tests in one process.
        left: seconds of wall clock.
        processes: number of processes, among which the seconds of a group are divided.
    """
    chosen: list[str] = []
    for name in sorted(due, key=lambda name: seconds.get(name, _UNKNOWN)):
        left -= seconds.get(name, _UNKNOWN) / processes
        if left < 0:
            break
        chosen.append(name)
    return Choice(chosen, [name for name in due if name not in chosen], due)
