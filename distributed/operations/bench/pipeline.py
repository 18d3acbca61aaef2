"""``bench pipeline``: how long the ranks of a pipeline wait, by simulation and by measurement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from distributed.errors import UserError
from distributed.parallel.pipeline_orders import Action, Span, bubble_of, order_of, simulate
from distributed.planner.pipeline import PipelineShape
from distributed.system.addresses import loopback_interface

__all__ = ["draw", "measure", "picture", "simulated"]

Timeline = Mapping[int, Sequence[Span]]
"""Rank along the axis -> its actions."""

_COLORS = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#54a24b"}
_NAMES = {"F": "forward", "B": "backward", "I": "gradients of activations", "W": "gradients of weights"}
_LIMIT = 300.0
"""Seconds that the ranks of a measurement may take beyond their own work."""


def simulated(shape: PipelineShape) -> Timeline:
    """The actions of a step in which forward, gradients of activations and gradients of weights of a stage
    take one unit each, and communication none."""
    return simulate(order_of(shape), shape)


def measure(shape: PipelineShape, unit: float) -> Timeline:
    """The actions of a step, measured with a process for each rank, whose stages sleep.

    Args:
        unit: seconds of a forward pass through a stage. Backward takes twice as long.

    Raises:
        UserError: a rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="distributed-bench-") as folder:
        ranks = [_start(rank, shape, unit, Path(folder)) for rank in range(shape.num_ranks)]
        try:
            work = 3 * unit * shape.num_microbatches * shape.num_stages * 2
            texts = [rank.communicate(timeout=work + _LIMIT)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        failed = next((i for i, rank in enumerate(ranks) if rank.returncode), None)
        if failed is not None:
            last = texts[failed].strip().splitlines()[-1:] or ["no output"]
            raise UserError(
                f"rank {failed} of the pipeline failed: {last[0]}",
                field="--schedule",
                got=shape.schedule,
                remedy="Leave --measure out for the simulation",
            )
        return {rank: _read(Path(folder) / f"{rank}.json") for rank in range(shape.num_ranks)}


def _start(rank: int, shape: PipelineShape, unit: float, folder: Path) -> subprocess.Popen[str]:
    task = {"shape": vars(shape), "rank": rank, "unit": unit, "folder": str(folder)}
    environment = {"GLOO_SOCKET_IFNAME": loopback_interface(), **os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "distributed.operations.bench.pipeline_rank", json.dumps(task)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def _read(path: Path) -> list[Span]:
    return [Span(Action(*action), start, end) for *action, start, end in json.loads(path.read_text())]


def draw(timeline: Timeline, unit: float = 1.0) -> list[str]:
    """A line of text for each rank: ``F3`` is the forward pass of micro-batch 3, ``B`` backward, ``I`` and
    ``W`` the gradients of activations and of weights; a dot is a unit of waiting.

    Args:
        unit: seconds of a column.
    """
    start, end = _extent(timeline)
    columns, width = round((end - start) / unit), _cell_width(timeline)
    lines = []
    for rank, spans in sorted(timeline.items()):
        cells = [".".ljust(width)] * columns
        for span in spans:
            first, last = (round((t - start) / unit) for t in (span.start, span.end))
            label = f"{span.action.kind}{span.action.micro_batch}"
            for column in range(first, min(max(last, first + 1), columns)):
                cells[column] = (label if column == first else "-").ljust(
                    width, "-" if last > column + 1 else " "
                )
        lines.append(f"rank {rank}  {' '.join(cells)}".rstrip())
    return lines


def picture(timeline: Timeline, title: str) -> str:
    """The same as an SVG picture."""
    start, end = _extent(timeline)
    width, height, left, top = 960.0, 26, 56, 34
    scale = (width - left - 8) / (end - start)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {top + 34 * len(timeline) + 30}"'
        ' font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="20" font-size="14">{title}</text>',
    ]
    for row, (rank, spans) in enumerate(sorted(timeline.items())):
        y = top + 34 * row
        parts.append(f'<text x="8" y="{y + 17}">rank {rank}</text>')
        parts.append(
            f'<rect x="{left}" y="{y}" width="{width - left - 8:.1f}" height="{height}" fill="#eeeeee"/>'
        )
        for (kind, stage, micro), a, b in spans:
            x, w = left + (a - start) * scale, (b - a) * scale
            # The later stages of a rank are lighter.
            shade = 1.0 if stage < len(timeline) else 0.6
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{height}" fill="{_COLORS[kind]}"'
                f' fill-opacity="{shade}" stroke="white" stroke-width="0.5">'
                f"<title>{_NAMES[kind]} of micro-batch {micro} in stage {stage}</title></rect>"
            )
            if w > 9:
                parts.append(
                    f'<text x="{x + w / 2:.1f}" y="{y + 17}" text-anchor="middle" fill="white">{micro}</text>'
                )
    parts += [*_legend(timeline, top + 34 * len(timeline) + 14), "</svg>"]
    return "\n".join(parts) + "\n"


def _legend(timeline: Timeline, y: int) -> list[str]:
    kinds = sorted({span.action.kind for spans in timeline.values() for span in spans})
    found, x = [], 56
    for kind in kinds:
        found.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{_COLORS[kind]}"/>')
        found.append(f'<text x="{x + 15}" y="{y}">{_NAMES[kind]}</text>')
        x += 40 + 7 * len(_NAMES[kind])
    return found


def _extent(timeline: Timeline) -> tuple[float, float]:
    spans = [span for own in timeline.values() for span in own]
    return min(span.start for span in spans), max(span.end for span in spans)


def _cell_width(timeline: Timeline) -> int:
    return 1 + len(str(max(span.action.micro_batch for own in timeline.values() for span in own)))


def bubble(timeline: Timeline) -> float:
    """Share of the time in which ranks wait."""
    return bubble_of(timeline)
