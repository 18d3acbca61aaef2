"""Which test of the kit catches which broken backend.

::

    python -m tests.campaigns.matrix > docs/mutants.md

runs every test against every mutant (about fifteen minutes on two idle cores; on busy ones a slow run is
taken for a hang) and prints a page. With ``--missing PAGE`` it keeps the cells of an earlier page, and runs
the tests and mutants that this page does not have.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from distributed.testing.conformance import BackendConformance
from tests.campaigns.mutant_suite import ROWS
from tests.campaigns.mutant_table import Mutant
from tests.campaigns.mutants import Sound
from tests.campaigns.reversions.group_mutants import GROUP_MUTANTS
from tests.campaigns.reversions.table import REVERSIONS
from tests.communication import codec_mutants
from tests.parallel import context_mutants, mesh_mutants, pipeline_mutants

__all__ = ["FAILS", "MEANT", "PASSES", "column_of", "kit_tests", "main", "read", "render"]

MEANT, FAILS, PASSES, MISSED = "●", "x", "·", "MISSED"
"""A cell: failed as meant; failed besides; passed; passed although the test is meant to catch it."""

_PAGE = """# Mutants

Backends broken on purpose, each by the mistake in its row, and the conformance tests that fail on
them: that is how we know that the tests can fail. {meant} is the test meant to catch the mutant, {fails}
another that does too, {passes} one that passes. `Sound` is what they are all made of. Two ranks.

Made by `python -m tests.campaigns.matrix > docs/mutants.md`; the classes are in
`tests/campaigns/mutants.py` and `tests/campaigns/mutants_that_refuse_nothing.py`.

{table}

The tests:

{legend}

## Meshes

Broken forms of what ranks do that share a model, each caught by the tests beside it.

{meshes}

## Gradient codecs

Broken codecs, and broken exchanges with a sound codec, each with the test of `CodecConformance` that is meant
to catch it: `tests/communication/codec_mutants.py`, run by `tests/communication/test_codec_mutants.py`. The
last is a backend, which does not train as plain PyTorch does.

{codecs}

## Faults of the core

Faults that this project had outside of the backends, each put back as one function, and the test that
fails then: `tests/campaigns/reversions/table.py`, run by `tests/campaigns/test_reversions.py`.

{faults}

## Groups of tests

For each group of tests that a push folds, a fault that the folded tests detect and those of a push do not:
`tests/campaigns/reversions/group_mutants.py`, run by `tests/campaigns/test_group_mutants.py`. A change of the
file with the fault makes `.ci/run` run the group ([Structure of the tests](testing.md#tiers)).

{groups}
"""


def main() -> int:
    """Run the tests and print the page; 1 when a mutant escapes its test or `Sound` fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--missing", metavar="PAGE", help="keep the cells of this page")
    page = parser.parse_args().missing
    cells = _run(read(Path(page).read_text(encoding="utf-8")) if page else {})
    print(render(cells))
    escaped = any(MISSED in row.values() for row in cells.values())
    return int(escaped or set(cells[Sound.__name__].values()) != {PASSES})


def kit_tests() -> list[str]:
    """Every test of the kit with its parameters, in pytest's words, in the order of the contracts."""
    found = []
    for name in dir(BackendConformance):
        if name.startswith("test_"):
            marks = getattr(getattr(BackendConformance, name), "pytestmark", [])
            values = [mark.args[1] for mark in marks if mark.name == "parametrize"]
            found += [column_of(name, row) for row in product(*values)]
    return sorted(found, key=lambda test: (_contract(test), test.split("[")[0]))


def _contract(test: str) -> float:
    number = re.match(r"test_c(\d+)_", test)
    return int(number[1]) if number else math.inf


def column_of(test: str, values: Any) -> str:
    """``test[a-b]`` for the parameters' values, nested tuples taken apart."""
    flat = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    return f"{test}[{'-'.join(map(str, flat))}]" if flat else test


def render(cells: dict[str, dict[str, str]]) -> str:
    """The page for ``{mutant: {test: cell}}``."""
    tests = kit_tests()
    head = ["mutant", "breaks", *(str(number) for number in range(1, len(tests) + 1))]
    lines = [_line(head), _line(["---"] * len(head))]
    for mutant in ROWS:
        row = cells[mutant.kind.__name__]
        lines.append(_line([f"`{mutant.kind.__name__}`", _fault(mutant), *(row[test] for test in tests)]))
    legend = "\n".join(f"{number}. `{test}`" for number, test in enumerate(tests, start=1))
    faults = [_line(["fault", "caught by"]), _line(["---"] * 2)]
    faults += [_line([f.fault, f"`{f.caught_by.rpartition('::')[2]}`"]) for f in REVERSIONS.values()]
    groups = [_line(["group", "caught by", "fault"]), _line(["---"] * 3)]
    groups += [
        _line([f"`{name}`", f"`{f.caught_by.partition('::')[2]}`", f.fault])
        for name, f in GROUP_MUTANTS.items()
    ]
    return _PAGE.format(
        table="\n".join(lines), legend=legend, faults="\n".join(faults), meshes=_meshes(),
        codecs=_codecs(), groups="\n".join(groups),
        meant=MEANT, fails=FAILS, passes=PASSES,
    ).rstrip()  # fmt: skip


def _meshes() -> str:
    rows = [_line(["mutant", "of", "breaks"]), _line(["---"] * 3)]
    for module in (mesh_mutants, pipeline_mutants, context_mutants):
        place = f"`{module.__name__.replace('.', '/')}.py`"
        for name, kind in module.MUTANTS.items():
            fault = " ".join((kind.__doc__ or kind.axis.__doc__).split()).rstrip(".")
            unnoticed = (
                ", without the comparison before the first step" if getattr(kind, "_compared", 0) else ""
            )
            rows.append(_line([f"`{name}`", place, fault + unnoticed]))
    return "\n".join(rows)


def _codecs() -> str:
    rows = [_line(["mutant", "of", "caught by", "breaks"]), _line(["---"] * 4)]
    for mutant in codec_mutants.MUTANTS:
        fault = " ".join((mutant.kind.__doc__ or "").split())
        rows.append(_line([f"`{mutant.kind.__name__}`", f"`{mutant.of}`", f"`{mutant.caught_by}`", fault]))
    kind = codec_mutants.ClipsBeforeDecompression
    test = "`test_gradients_clipped_before_they_are_sent_show`"
    return "\n".join([*rows, _line([f"`{kind.__name__}`", "`top-k`", test, kind.__doc__ or ""])])


def read(page: str) -> dict[str, dict[str, str]]:
    """``{mutant: {test: cell}}`` of a page."""
    tests = re.findall(r"^\d+\. `(\S+)`$", page, re.MULTILINE)
    found = re.findall(r"^\| `(\w+)` \| .*? \| ((?:\S+ \| ?)+)$", page, re.MULTILINE)
    return {name: dict(zip(tests, cells.replace("|", "").split(), strict=True)) for name, cells in found}


def _fault(mutant: Mutant) -> str:
    return " ".join((mutant.kind.__doc__ or "").split()).rstrip(".")


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


class _Collector:
    """A pytest plugin that keeps what became of every test of every mutant.

    Args:
        known: cells whose tests are not run.
    """

    def __init__(self, known: Mapping[str, Mapping[str, str]]) -> None:
        self.cells = {name: dict(row) for name, row in known.items()}
        self._params: dict[str, dict[str, Any]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Remember the parameters by name: a report has none."""
        items[:] = [item for item in items if not self._knows(item.nodeid)]
        for item in items:
            callspec = getattr(item, "callspec", None)
            self._params[item.nodeid] = dict(callspec.params) if callspec else {}

    def _knows(self, test_id: str) -> bool:
        *_, kind, test = test_id.split("::")
        return test in self.cells.get(kind.removeprefix("Test"), {})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A row's cell."""
        *_, kind, test = report.nodeid.split("::")
        name = kind.removeprefix("Test")
        mutant = next(row for row in ROWS if row.kind.__name__ == name)
        meant = mutant.caught_by == test.split("[")[0] and self._params[report.nodeid] == mutant.arguments
        row = self.cells.setdefault(name, {})
        if report.failed:
            row[test] = MEANT if meant else FAILS
        elif report.when == "call":
            row.setdefault(test, MISSED if meant else PASSES)
            print(f"{name} {test}: {report.outcome}", file=sys.stderr)


def _run(known: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    collector = _Collector(known)
    arguments = ["--pyargs", "tests.campaigns.mutant_suite", "-q", "--tb=no", "--no-header", "-p"]
    with redirect_stdout(sys.stderr):
        pytest.main([*arguments, "no:cacheprovider"], plugins=[collector])
    return collector.cells


if __name__ == "__main__":
    sys.exit(main())
