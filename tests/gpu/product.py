"""Every import from the product but the kit's tests, which need pytest (`kit_cases`), and the kernels."""

from __future__ import annotations

from distributed import Callback, Trainer, WorkerError
from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.diff import differences
from distributed.checkpoint.reader import PortableReader
from distributed.interfaces.parallel_dims import MODEL_AXES, ParallelDims
from distributed.launch.thread_launcher import ThreadLauncher
from distributed.operations.planning.collect_facts import collect_facts
from distributed.planner.estimates.device_memory import CUDA
from distributed.planner.estimates.memory import predict_memory
from distributed.planner.estimates.split import Split
from distributed.resilience.flight_dumps import dump_recorder
from distributed.resilience.flight_records import FlightRecord, parse_dump
from distributed.testing.oracle import oracle_fit
from distributed.testing.rank_pool import RankPool
from distributed.testing.reference_problem import distance, problem

__all__ = [
    "CUDA",
    "MODEL_AXES",
    "Callback",
    "FlightRecord",
    "ParallelDims",
    "PortableCheckpointer",
    "PortableReader",
    "RankPool",
    "Split",
    "ThreadLauncher",
    "Trainer",
    "WorkerError",
    "collect_facts",
    "differences",
    "distance",
    "dump_recorder",
    "oracle_fit",
    "parse_dump",
    "predict_memory",
    "problem",
]
