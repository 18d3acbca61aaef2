"""profile_communication: the measurement of ``bench comm`` from a script's own ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from distributed.errors import UserError, hide_own_frames
from distributed.operations.bench.comm import Plan, Row
from distributed.operations.bench.comm_page import text_table
from distributed.operations.bench.comm_rank import measure
from distributed.system.output import print_line

__all__ = ["profile_communication", "profile_communication_overhead"]

_SIZES = tuple(1 << bits for bits in (10, 12, 14, 16, 18, 20, 22))


@hide_own_frames
def profile_communication(
    sizes: Sequence[int] = _SIZES,
    operations: Sequence[str] = ("all-reduce",),
    iterations: int = 10,
) -> list[Row]:
    """Measure collectives on the ranks of this script; rank 0 prints a table. Collective.

    Ranks that have not met (`setup_distributed`) meet for it. ``bench comm`` of the command line measures
    without a script.

    Args:
        sizes: bytes.
        operations: of ``all-reduce``, ``reduce-scatter``, ``all-gather``, ``broadcast``, ``all-to-all`` and
            ``send-recv``.
        iterations: timed calls of each size.

    Returns:
        The rows of the table on rank 0, an empty list on the others.

    Raises:
        UserError: there is no launcher or a single rank, or the transport cannot run an operation.
        WorkerError: a result is wrong.
    """
    unknown = [name for name in operations if name not in Plan.operations]
    if unknown or not operations or not sizes or min(sizes) < 1 or iterations < 1:
        raise UserError(
            "it needs sizes and iterations above zero, and operations that exist",
            field="profile_communication",
            got=f"sizes {list(sizes)}, operations {list(operations)}, {iterations} iterations",
            allowed=", ".join(Plan.operations),
            remedy="Correct these arguments",
        )
    plan = Plan(operations=tuple(operations), sizes=sorted(sizes), iterations=iterations)
    report = measure(plan)
    if report is None:
        return []
    print_line("\n".join(text_table(report)), sys.stdout)
    return report.rows


@hide_own_frames
def profile_communication_overhead(
    sizes: Sequence[int] = _SIZES,
    operations: Sequence[str] = ("all-reduce",),
    iterations: int = 10,
) -> list[Row]:
    """The same as `profile_communication`. Collective."""
    return profile_communication(sizes, operations, iterations)
