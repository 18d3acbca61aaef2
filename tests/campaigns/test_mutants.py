"""The kit can fail: every broken backend turns the test meant for it red."""

from __future__ import annotations

from inspect import signature
from pathlib import Path

import pytest

from distributed.errors import UserError, WorkerError
from distributed.registry.catalog import get_catalog
from distributed.testing.conformance import BackendConformance
from distributed.testing.rank_pool import RankPool
from tests.campaigns.matrix import FAILS, MEANT, PASSES, kit_tests, read
from tests.campaigns.mutant_suite import ROWS
from tests.campaigns.mutant_table import MUTANTS, Mutant, mutant_spec
from tests.campaigns.mutants import Sound

CONTRACTS = {*(f"C{number}" for number in range(1, 12)), "claims"}


def test_every_contract_has_a_mutant() -> None:
    assert {mutant.kind.__doc__.split(":")[0] for mutant in MUTANTS} == CONTRACTS


@pytest.mark.parametrize("test", sorted({mutant.caught_by for mutant in MUTANTS}))
def test_what_the_mutants_are_made_of_passes(test: str, rank_pool: RankPool, tmp_path: Path) -> None:
    """Else the mutants might be caught for a fault that they all share."""
    mutant = next(mutant for mutant in MUTANTS if mutant.caught_by == test)
    _run(Mutant(Sound, test, mutant.arguments), rank_pool, tmp_path)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.kind.__name__)
def test_mutant_is_caught(mutant: Mutant, rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.timeout, before = 8.0, rank_pool.timeout
    try:
        with pytest.raises((AssertionError, WorkerError, UserError)):
            _run(mutant, rank_pool, tmp_path)
    finally:
        rank_pool.timeout = before


def _run(mutant: Mutant, rank_pool: RankPool, folder: Path) -> None:
    catalog = get_catalog()
    catalog.backends[mutant.name] = mutant_spec(mutant, catalog)
    suite = BackendConformance()
    suite.backend, suite.sizes, suite.pool = mutant.name, (2,), rank_pool
    test, given = getattr(suite, mutant.caught_by), dict(mutant.arguments)
    if "tmp_path" in signature(test).parameters:
        given["tmp_path"] = folder
    try:
        test(**given)
    finally:
        del catalog.backends[mutant.name]


def test_the_committed_matrix_is_whole() -> None:
    """docs/mutants.md has every mutant and every test, and each mutant fails where it is meant to."""
    page = (Path(__file__).parents[2] / "docs" / "mutants.md").read_text(encoding="utf-8")
    rows = read(page)
    remedy = "run `python -m tests.campaigns.matrix > docs/mutants.md`"
    assert list(rows["Sound"]) == kit_tests(), remedy
    assert list(rows) == [mutant.kind.__name__ for mutant in ROWS], remedy
    assert set(rows.pop("Sound").values()) == {PASSES}
    for mutant in MUTANTS:
        cells = rows[mutant.kind.__name__]
        (meant,) = [test for test, cell in cells.items() if cell == MEANT]
        assert meant.split("[")[0] == mutant.caught_by
        assert all(f"{value}" in meant for value in mutant.arguments.values())
        assert set(cells.values()) <= {MEANT, FAILS, PASSES}
