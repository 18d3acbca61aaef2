"""BackendConformance and CodecConformance: subclass one, name a backend or a codec, and every contract is a
test.

::

    from distributed.testing.conformance import BackendConformance, CodecConformance

    class TestMine(BackendConformance):
        backend = "mine"

    class TestMyCodec(CodecConformance):
        codec = "my-codec"

`BackendConformance` needs the fixture `rank_pool`, which comes with the package's pytest plugin. Without a
file of one's own: ``pytest --pyargs distributed.testing --distributed-backend mine``.
"""

from __future__ import annotations

from distributed.testing.contracts.claim import ClaimContracts
from distributed.testing.contracts.codec import CodecContracts
from distributed.testing.contracts.failure import FailureContracts
from distributed.testing.contracts.refusal import RefusalContracts
from distributed.testing.contracts.run import RunContracts
from distributed.testing.contracts.step import StepContracts
from distributed.testing.reference_problem import distance, problem, small_model

__all__ = ["BackendConformance", "CodecConformance", "distance", "problem", "small_model"]


class BackendConformance(StepContracts, RunContracts, ClaimContracts, FailureContracts, RefusalContracts):
    """The contracts as tests of `backend`; see `Suite` for what a subclass may set."""


class CodecConformance(CodecContracts):
    """The contracts of a gradient codec as tests of `codec`; see `CodecSuite` for what a subclass may set."""
