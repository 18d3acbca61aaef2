"""The whole kit against every mutant, a class each, on two ranks; `matrix` runs it.

Not collected by name: ``pytest --pyargs tests.campaigns.mutant_suite`` does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from distributed.registry.catalog import get_catalog
from distributed.testing.conformance import BackendConformance
from distributed.testing.rank_pool import RankPool
from tests.campaigns.mutant_table import MUTANTS, Mutant, mutant_spec
from tests.campaigns.mutants import Sound

__all__ = ["ROWS"]

ROWS = [Mutant(Sound, ""), *MUTANTS]
"""What is tested: first the backend that is not broken."""

_HANGS = 20.0
"""Seconds after which a run is taken to hang."""


class _Row(BackendConformance):
    __test__ = False
    sizes = (2,)
    mutant: Mutant

    @pytest.fixture(scope="class")
    def rank_pool(self) -> Iterator[RankPool]:
        """Ranks that no other mutant has had."""
        pool = RankPool(timeout=_HANGS)
        yield pool
        pool.close()

    @pytest.fixture(autouse=True)
    def _registered(self) -> Iterator[None]:
        catalog = get_catalog()
        catalog.backends[self.backend] = mutant_spec(self.mutant, catalog)
        yield
        del catalog.backends[self.backend]


def _class_of(mutant: Mutant) -> type[Any]:
    return type(
        f"Test{mutant.kind.__name__}",
        (_Row,),
        {"__test__": True, "__module__": __name__, "backend": mutant.name, "mutant": mutant},
    )


globals().update({kind.__name__: kind for kind in map(_class_of, ROWS)})
