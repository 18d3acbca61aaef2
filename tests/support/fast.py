"""``pytest --fast``: quick tests that start no process, and the contracts on `serial` and `pytorch-ddp`.

A test starts processes if it is marked ``starts_processes`` or ``real_start``, as a function, a class or a
file, or if it uses a fixture that does. One that computes for seconds is marked ``slow``. A test without a
mark that starts Python all the same fails, with and without ``--fast``, and its message asks for the mark.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import pytest

from distributed.launch.forked import ADDRESS

__all__ = ["Fast", "NeedsMark"]

FIXTURES = {"rank_pool", "ray_cluster", "forking_python", "browser", "site", "ranks"}
"""Fixtures that start processes; `ranks` is that of tests/kernels and of tests/resilience/test_watcher.py."""

_MARKS = ("starts_processes", "real_start", "slow")

KEPT = {"serial", "pytorch-ddp"}
"""Backends whose contracts are held even so."""


class Fast:
    """Leave out what starts processes or is slow."""

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = [item for item in items if _is_expensive(item) and not _is_kept(item)]
        items[:] = [item for item in items if item not in set(left_out)]
        config.hook.pytest_deselected(items=left_out)


class NeedsMark:
    """Let a test fail that starts a process without a mark."""

    def __init__(self) -> None:
        self._test = ""
        sys.addaudithook(self._see)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Note which test is not to start a process."""
        self._test = "" if _is_expensive(item) or _is_kept(item) else item.nodeid

    def pytest_sessionfinish(self) -> None:
        """What fixtures of the session end is no test's."""
        self._test = ""

    def _see(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._test or threading.current_thread() is not threading.main_thread():
            return
        python = event == "subprocess.Popen" and _is_python(*args[:2])
        fork = event == "socket.connect" and args[1] == os.environ.get(ADDRESS)
        if python or fork:
            raise RuntimeError(f"{self._test} starts a process: mark it with @pytest.mark.starts_processes")


def _is_python(executable: Any, words: Any) -> bool:
    """Whether a command runs Python. The fork server, which is the session's, does not count."""
    served = any("distributed.launch.fork_server" in str(word) for word in words)
    return "python" in os.path.basename(os.fsdecode(executable)) and not served


def _is_expensive(item: pytest.Item) -> bool:
    marked = any(item.get_closest_marker(name) is not None for name in _MARKS)
    return marked or bool(FIXTURES & set(getattr(item, "fixturenames", ())))


def _is_kept(item: pytest.Item) -> bool:
    cls = getattr(item, "cls", None)
    return cls is not None and getattr(cls, "backend", None) in KEPT and "contracts" in item.nodeid
