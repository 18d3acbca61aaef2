"""The kit can fail: every broken backend turns the test meant for it red."""

from __future__ import annotations

import pytest

from distributed.errors import WorkerError
from distributed.plugin_manager import get_catalog
from distributed.testing.conformance import BackendConformance
from distributed.testing.mutants import MUTANTS, Mutant, Sound, mutant_spec
from distributed.testing.pool import RankPool

CONTRACTS = {f"C{number}" for number in range(1, 9)}


def test_every_contract_has_a_mutant() -> None:
    assert {mutant.kind.__doc__.split(":")[0] for mutant in MUTANTS} == CONTRACTS


@pytest.mark.parametrize("test", sorted({mutant.caught_by for mutant in MUTANTS}))
def test_what_the_mutants_are_made_of_passes(test: str, rank_pool: RankPool) -> None:
    """Else the mutants might be caught for a fault that they all share."""
    mutant = next(mutant for mutant in MUTANTS if mutant.caught_by == test)
    _run(Mutant(Sound, test, mutant.arguments), rank_pool)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.kind.__name__)
def test_mutant_is_caught(mutant: Mutant, rank_pool: RankPool) -> None:
    rank_pool.timeout, before = 8.0, rank_pool.timeout
    try:
        with pytest.raises((AssertionError, WorkerError)):
            _run(mutant, rank_pool)
    finally:
        rank_pool.timeout = before


def _run(mutant: Mutant, rank_pool: RankPool) -> None:
    catalog = get_catalog()
    catalog.backends[mutant.name] = mutant_spec(mutant, catalog)
    suite = BackendConformance()
    suite.backend, suite.sizes, suite.pool = mutant.name, (2,), rank_pool
    try:
        getattr(suite, mutant.caught_by)(*mutant.arguments)
    finally:
        del catalog.backends[mutant.name]
