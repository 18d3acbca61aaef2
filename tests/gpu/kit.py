"""The conformance kit on a GPU: pytest over `kit_cases`, in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.bootstrap import ROOT
from tests.gpu.checks import Measured, Settings
from tests.gpu.ranks import extra_fields, number_of_ranks, shared_pool

__all__ = ["Case", "conformance", "current"]

_CASES = Path(__file__).parent / "kit_cases.py"
_DRY = "c1_global or c4_a_second"
"""What a dry run takes of the kit."""


@dataclass(frozen=True)
class Case:
    """What `kit_cases` is to test.

    Attributes:
        backend: its name.
        sizes: numbers of ranks.
        options: configuration of every run.
        lengths: of validation sets.
    """

    backend: str
    sizes: tuple[int, ...]
    options: dict[str, Any]
    lengths: range


_current: list[Case] = []


def current() -> Case:
    """The case under test."""
    return _current[-1]


class Outcomes:
    """A pytest plugin that counts tests by outcome, and remembers the first failure."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.first = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.count[report.outcome] += 1
        if report.failed and not self.first:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = str(crash.message if crash else report.longrepr).strip().splitlines()
            self.first = f"{report.nodeid.rpartition('::')[2]}: {message[0] if message else ''}"


def conformance(setting: Settings, backend: str, transport: str) -> Iterator[Measured]:
    """Every contract of the kit on one rank and on all, or over gloo on two."""
    ranks = number_of_ranks(setting, backend, transport)
    case = Case(
        backend,
        (2,) if transport == "gloo" else tuple(sorted({1, ranks})),
        {"device": setting.device, **extra_fields(backend, transport)},
        setting.pick(range(1, 14), range(1, 3)),
    )
    _current.append(case)
    try:
        outcomes, code = _run(setting, f"kit-{backend}-{transport}")
    finally:
        _current.pop()
    ran = outcomes.count["passed"] + outcomes.count["failed"]
    if not ran:
        raise RuntimeError(f"pytest ran no test and ended with {code}")
    detail = f"{ran} tests on {' and '.join(map(str, case.sizes))} ranks"
    yield Measured(outcomes.count["failed"], f"{detail}; {outcomes.first}".rstrip("; "))


def _run(setting: Settings, name: str) -> tuple[Outcomes, int]:
    import pytest

    shared_pool()
    outcomes = Outcomes()
    arguments = [str(_CASES), "-q", "--rootdir", str(ROOT), "-o", "addopts=", "-p", "no:cacheprovider"]
    arguments += ["--import-mode=importlib", f"--basetemp={setting.folder / name}"]
    if setting.dry_run:
        arguments += ["-k", _DRY]
    return outcomes, int(pytest.main(arguments, plugins=[outcomes]))
