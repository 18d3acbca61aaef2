"""What a test needs of the machine: left out with the reason where it is missing; where CI is set, a failure.

``@pytest.mark.needs(why)`` on a test, a class or a file, or ``leave_out(why)`` in a test or a fixture. A
section at the end of the output counts what was left out, and says why.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from typing import NoReturn

import pytest

__all__ = ["NO_MOUNTS", "Needs", "leave_out", "needs_program", "needs_root"]

NO_MOUNTS = "no mount namespace for this user (unshare -rm): only as root"

_PREFIX = "left out: "


def leave_out(why: str) -> NoReturn:
    """Skip the test that runs, or fail it where the environment variable CI is set.

    Args:
        why: what is missing, and the command that installs it.
    """
    if os.environ.get("CI"):
        pytest.fail(f"{why} (CI is set: nothing is left out)", pytrace=False)
    pytest.skip(_PREFIX + why)


def needs_program(name: str, target: str) -> str | None:
    """Reason for leaving out what a program is missing for; None where it is installed.

    Args:
        target: of the Makefile, which installs it.
    """
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return None if shutil.which(name, path=path) else f"no {name}; as root: make {target}"


def needs_root(what: str) -> str | None:
    """Reason for leaving out what only root can do; None for root.

    Args:
        what: e.g. ``network namespaces``.
    """
    return None if os.geteuid() == 0 else f"{what}: only as root"


class Needs:
    """Act on the mark, and report at the end."""

    def pytest_configure(self, config: pytest.Config) -> None:
        """Make the mark known."""
        config.addinivalue_line(
            "markers", "needs(why): left out unless `why` is None, a failure where CI is set"
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Before any fixture is made."""
        for mark in item.iter_markers("needs"):
            if mark.args[0]:
                leave_out(mark.args[0])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """A line for each reason."""
        reasons = Counter(
            report.longrepr[2].partition(_PREFIX)[2]
            for report in terminalreporter.stats.get("skipped", [])
            if isinstance(report.longrepr, tuple) and _PREFIX in report.longrepr[2]
        )
        if reasons:
            terminalreporter.section("left out on this machine")
        for why, count in sorted(reasons.items()):
            terminalreporter.line(f"{count} test{'s' * (count > 1)}: {why}")
