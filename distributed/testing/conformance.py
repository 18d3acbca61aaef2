"""BackendConformance: subclass it, name a backend, and every contract is a test.

::

    from distributed.testing.conformance import BackendConformance

    class TestMine(BackendConformance):
        backend = "mine"

Needs the fixture `rank_pool`, which comes with the package's pytest plugin. Without a file of
one's own: ``pytest --pyargs distributed.testing --distributed-backend mine``.
"""

from __future__ import annotations

from distributed.testing.contracts.claim import ClaimContracts
from distributed.testing.contracts.failure import FailureContracts
from distributed.testing.contracts.refusal import RefusalContracts
from distributed.testing.contracts.run import RunContracts
from distributed.testing.contracts.step import StepContracts
from distributed.testing.reference_problem import distance, problem, small_model

__all__ = ["BackendConformance", "distance", "problem", "small_model"]


class BackendConformance(StepContracts, RunContracts, ClaimContracts, FailureContracts, RefusalContracts):
    """The contracts as tests of `backend`; see `Suite` for what a subclass may set."""
