"""Table of the distance of each backend's weights from `serial`'s."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace

from distributed.registry.catalog import get_catalog, missing_modules
from distributed.testing.parity.diagnosis import TOLERANCES
from distributed.testing.parity.measure import Exercise, Record, Side, parse_side, record
from distributed.testing.rank_pool import RankPool

COLUMNS = [("float64", "sgd"), ("float32", "sgd"), ("float32", "adamw"), ("bf16", "sgd")]
"""Dtype and optimizer; AdamW with eps=1e-4."""


@dataclass(frozen=True)
class TableRow:
    """Largest distance of any weight from `serial`'s, one per column."""

    side: Side
    accumulation: int
    distances: tuple[float, ...]


def default_backends() -> list[str]:
    """Every installed torch backend of several processes, each ZeRO stage it claims by itself."""
    names = []
    for name, spec in sorted(get_catalog().backends.items()):
        if spec.framework != "torch" or not spec.capabilities.multi_process or missing_modules(spec.requires):
            continue
        stages = sorted(spec.capabilities.zero_stages)
        names += [f"{name}:zero_stage={stage}" for stage in stages] or [name]
    return names


def measure(
    backends: Iterable[str],
    ranks: Iterable[int],
    exercise: Exercise,
    report: Callable[[str], None] = lambda text: None,
) -> Iterator[TableRow]:
    """Train everything; `report` is called with a line about each row before it begins.

    Raises:
        UserError: no such backend.
    """
    columns = [replace(exercise, dtype=dtype, optimizer=optimizer) for dtype, optimizer in COLUMNS]
    numbers = list(ranks)
    references = [record(Side("serial"), column, every_step=False) for column in columns]
    for side in [parse_side(name, number) for name in backends for number in numbers]:
        # A pool each: on a cluster, ranks that wait for their turn would hold what these need.
        with closing(RankPool(timeout=120.0)) as pool:
            for accumulation in (1, 2):
                report(f"{side}, ranks {side.ranks}, accumulation {accumulation}")
                runs = [replace(column, accumulation=accumulation) for column in columns]
                found = [record(side, run, every_step=False, launcher=pool) for run in runs]
                yield TableRow(side, accumulation, tuple(map(_distance, references, found)))


def render(rows: Iterable[TableRow]) -> Iterator[str]:
    """Lines of a Markdown table; a distance beyond its column's tolerance is bold."""
    heads = [f"{dtype} {optimizer}" for dtype, optimizer in COLUMNS]
    yield f"| {' | '.join(['backend', 'ranks', 'accumulation', *heads])} |"
    yield f"|{' --- |' * (3 + len(heads))}"
    limits = [TOLERANCES[column] for column in COLUMNS]
    for row in rows:
        cells = [
            f"{off:.1e}" if off <= limit else f"**{off:.1e}**"
            for off, limit in zip(row.distances, limits, strict=True)
        ]
        yield f"| `{row.side}` | {row.side.ranks} | {row.accumulation} | {' | '.join(cells)} |"


def _distance(a: Record, b: Record) -> float:
    first, second = a.weights[-1], b.weights[-1]
    assert first is not None
    assert second is not None
    return max(float((x - y).abs().max()) for x, y in zip(first, second, strict=True))
