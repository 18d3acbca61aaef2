"""``bench comm``: what is measured, the ranks that measure it, and the results."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from distributed.communication.collective_costs import ALGORITHMS, BUS_FACTORS, OPERATIONS
from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.launcher import RankCommand
from distributed.interfaces.plan import RunPlan
from distributed.launch.local_launcher import LocalLauncher
from distributed.system.private_files import write_private
from distributed.system.private_folders import PrivateFolder

__all__ = ["ALGORITHM_NAMES", "DTYPES", "Plan", "Report", "Row", "check_memory", "start_ranks"]

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
LIBRARY = "library"
ALGORITHM_NAMES = (LIBRARY, *ALGORITHMS)
_RESULT = "comm.json"
_COPIES = 4
"""Buffers of the largest size that a rank needs: input, output, expected result, and a temporary one."""


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        operations: of `OPERATIONS`.
        algorithms: of `ALGORITHM_NAMES`, for all-reduce.
        sizes: bytes, ascending.
        dtype: of `DTYPES`.
        warmup: calls before those that are timed.
        iterations: calls that are timed.
    """

    operations: Sequence[str] = OPERATIONS
    algorithms: Sequence[str] = (LIBRARY,)
    sizes: Sequence[int] = (1 << 10,)
    dtype: str = "float32"
    warmup: int = 5
    iterations: int = 20

    @property
    def cases(self) -> list[tuple[str, str]]:
        """(operation, algorithm) in the order of measurement."""
        return [
            (operation, algorithm)
            for operation in self.operations
            for algorithm in (self.algorithms if operation == "all-reduce" else (LIBRARY,))
        ]


@dataclass(frozen=True)
class Row:
    """One operation on one size.

    Attributes:
        nbytes: size by the convention of nccl-tests: the largest buffer of a rank.
        seconds: of each timed call, on the rank that took longest.
        sent: bytes that a rank has written, as the mean over the ranks; None if that is not known.
        formula: bytes that a rank sends by the formula, as the mean over the ranks.
    """

    operation: str
    algorithm: str
    nbytes: int
    count: int
    num_ranks: int
    seconds: Sequence[float]
    sent: float | None
    formula: float

    @property
    def median(self) -> float:
        """Median of `seconds`."""
        return median(self.seconds)

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth: bytes per second of the median."""
        return self.nbytes / max(self.median, 1e-12)

    @property
    def busbw(self) -> float:
        """Bus bandwidth in bytes per second, by the convention of nccl-tests, whatever the library sends."""
        return self.algbw * BUS_FACTORS[self.operation](self.num_ranks)


@dataclass(frozen=True)
class Report:
    """A measurement.

    Attributes:
        transport: ``gloo`` or ``nccl``.
        device: kind of device of the buffers, such as ``cpu``.
        hosts: number of hosts.
    """

    plan: Plan
    transport: str
    device: str
    num_ranks: int
    hosts: int
    rows: list[Row] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """All numbers, with the derived ones."""
        own = {name: value for name, value in asdict(self).items() if name not in ("plan", "rows")}
        derived = ("median", "algbw", "busbw")
        rows = [{**asdict(row), **{name: getattr(row, name) for name in derived}} for row in self.rows]
        return {**own, **asdict(self.plan), "rows": rows}

    def save(self, folder: Path) -> None:
        """Write this to `folder` whole or not at all."""
        write_private(folder / _RESULT, json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, folder: Path) -> Report:
        """What `save` has written."""
        found = json.loads((folder / _RESULT).read_text(encoding="utf-8"))
        plan, rows = Plan(**found.pop("plan")), [Row(**row) for row in found.pop("rows")]
        return cls(plan, **found, rows=rows)


def check_memory(plan: Plan, num_ranks: int) -> None:
    """Check that the buffers of the ranks of this host fit into its memory.

    Raises:
        UserError: they do not; the kernel would end a rank.
    """
    import psutil

    free, largest = psutil.virtual_memory().available, plan.sizes[-1]
    if largest * _COPIES * num_ranks > free:
        raise UserError(
            f"{num_ranks} ranks with {_COPIES} buffers each need {largest * _COPIES * num_ranks:,} bytes of"
            f" memory, and {free:,} are available",
            field="--max-bytes",
            got=largest,
            allowed=f"at most {free // (_COPIES * num_ranks):,}",
            remedy="Lower --max-bytes, or start fewer ranks",
        )


def start_ranks(run: RunPlan, plan: Plan) -> Report:
    """Start the ranks of this host, and measure on them.

    Raises:
        UserError: the transport cannot do what was asked for.
        WorkerError: a rank failed, or has a wrong result.
    """
    with PrivateFolder() as name:
        folder = Path(name)
        task = json.dumps({"plan": asdict(plan), "fields": rank_fields(run.config)})
        command = [sys.executable, "-m", "distributed.operations.bench.comm_rank", task]
        # What ranks print, such as torch's warnings, must not be part of a table or JSON on standard output.
        with redirect_stdout(sys.stderr):
            LocalLauncher().run(run, RankCommand(command, folder))
        return Report.load(folder)


def rank_fields(config: DistributedConfig) -> dict[str, Any]:
    """The fields that a rank needs to join the others."""
    names = ("device", "communication_backend", "collective_timeout")
    return {name: getattr(config, name) for name in names}
