"""Every import from the product but the kit's tests, which need pytest (`kit_cases`), and the kernels."""

from __future__ import annotations

from distributed import Callback, Trainer, WorkerError
from distributed.checkpoint.compare import differences
from distributed.checkpoint.layout import PortableCheckpointer
from distributed.checkpoint.reader import PortableReader
from distributed.testing.oracle import oracle_fit
from distributed.testing.pool import RankPool
from distributed.testing.problem import distance, problem

__all__ = [
    "Callback",
    "PortableCheckpointer",
    "PortableReader",
    "RankPool",
    "Trainer",
    "WorkerError",
    "differences",
    "distance",
    "oracle_fit",
    "problem",
]
