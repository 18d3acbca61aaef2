"""``bench pipeline``: the timeline of each rank of a pipeline, and its bubble beside the formula."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from distributed.commands.parser import positive_int
from distributed.commands.tables import print_json
from distributed.errors import UserError
from distributed.interfaces.backend_spec import SCHEDULES
from distributed.planner.pipeline import MEASURABLE, plain_shape

__all__ = ["add_arguments", "run"]


def add_arguments(actions: Any) -> None:
    """Add the action and its flags."""
    summary = "Draw the order in which the ranks of a pipeline compute, and print how long they wait."
    parser = actions.add_parser("pipeline", help=summary, description=summary)
    flags = parser.add_argument
    flags(
        "--schedule",
        choices=sorted(SCHEDULES),
        default="1f1b",
        help="Order of forward and backward, as parallel.schedule. Default: 1f1b.",
    )
    flags("--ranks", default="4", metavar="N", help="Ranks of the pipeline. Default: 4.")
    flags("--microbatches", default="8", metavar="N", help="Micro-batches in a step. Default: 8.")
    flags(
        "--measure",
        action="store_true",
        help="Measure with a process for each rank, whose stages sleep, beside the simulation: gpipe, 1f1b.",
    )
    flags(
        "--unit-ms",
        default="100",
        metavar="N",
        help="With --measure: ms of a stage's forward pass. Default: 100.",
    )
    flags("--json", action="store_true", help="Print JSON with every action.")
    flags("--output", metavar="FILE", help="Also write a picture (SVG).")


def run(args: argparse.Namespace) -> int:
    """Simulate, measure if asked to, and print.

    Raises:
        UserError: the schedule does not accept the numbers, or cannot be measured.
    """
    from distributed.operations.bench import pipeline

    numbers = positive_int(args.ranks, "--ranks"), positive_int(args.microbatches, "--microbatches")
    shape = plain_shape(args.schedule, *numbers)
    unit = positive_int(args.unit_ms, "--unit-ms") / 1000
    if args.measure and args.schedule not in MEASURABLE:
        raise UserError(
            "the stages of a measurement sleep, which cannot be divided; and several stages on a rank would"
            " measure the time of the program itself",
            field="--schedule",
            got=args.schedule,
            allowed=", ".join(MEASURABLE) + " with --measure",
        )
    timeline, bubble = pipeline.simulated(shape), pipeline.bubble
    found = {"schedule": shape.schedule, "formula": shape.bubble, "simulated": bubble(timeline)}
    shown, column = timeline, 1.0
    if args.measure:
        shown, column = pipeline.measure(shape, unit), unit
        found["measured"] = bubble(shown)
    if args.json:
        print_json(
            {
                **found,
                "actions": {
                    rank: [[*s.action, s.start, s.end] for s in spans] for rank, spans in shown.items()
                },
            }
        )
    else:
        print("\n".join(pipeline.draw(shown, column)))
        print("bubble: " + ", ".join(f"{name} {found[name]:.4f}" for name in list(found)[1:]))
    if args.output:
        title = f"{shape.schedule}: {shape.num_ranks} ranks, {shape.num_microbatches} micro-batches"
        Path(args.output).write_text(pipeline.picture(shown, f"{title}, bubble {bubble(shown):.3f}"))
        print(args.output)
    return 0
