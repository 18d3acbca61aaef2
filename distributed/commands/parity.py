"""``parity``: train two backends on the same data and name the first divergence."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from distributed.commands.parser import add_set, positive_int
from distributed.commands.tables import print_json, print_table
from distributed.config import parse_assignments
from distributed.errors import UserError

if TYPE_CHECKING:
    from distributed.testing.parity.diagnosis import Divergence, Row
    from distributed.testing.parity.measure import Exercise, Record

_DTYPES = ("float64", "float32", "bf16")
_OPTIMIZERS = ("sgd", "momentum", "adamw")
_EPILOG = """
A backend name can be followed by configuration fields: deepspeed:zero_stage=2,seed=3. A single-process
backend runs on one rank, whatever --ranks is. Exit code: 0 within the tolerance, 1 outside it, 2 for an
invalid argument.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``parity``."""
    parser.usage = f"{parser.prog} A B [flags], or {parser.prog} --table [BACKEND ...] [flags]"
    parser.epilog = _EPILOG
    parser.add_argument("backends", nargs="*", metavar="BACKEND", help="Backends to compare.")
    parser.add_argument(
        "--ranks", default=None, metavar="N", help="Number of ranks of both backends. Default: 2."
    )
    parser.add_argument("--ranks-a", default=None, metavar="N", help="Number of ranks of the first backend.")
    parser.add_argument("--ranks-b", default=None, metavar="N", help="Number of ranks of the second backend.")
    parser.add_argument("--steps", default="20", metavar="N", help="Optimizer steps. Default: 20.")
    parser.add_argument(
        "--accumulation", default="1", metavar="N", help="Micro-batches per step. Default: 1."
    )
    parser.add_argument(
        "--global-batch-size", default="24", metavar="N", help="Samples per step over all ranks. Default: 24."
    )
    parser.add_argument(
        "--samples", default="101", metavar="N", help="Number of samples in the dataset. Default: 101."
    )
    parser.add_argument(
        "--dtype",
        default="float64",
        metavar="{float64,float32,bf16}",
        help="Dtype of weights and data; bf16 computes in bfloat16 over float32 weights. Default: float64.",
    )
    parser.add_argument(
        "--optimizer",
        default="sgd",
        metavar="{sgd,momentum,adamw}",
        help="Optimizer. Default: sgd; adamw uses eps=1e-4.",
    )
    parser.add_argument("--learning-rate", default="0.1", metavar="X", help="Learning rate. Default: 0.1.")
    parser.add_argument(
        "--tolerance",
        default=None,
        metavar="X",
        help="Largest allowed difference of a weight. Default: depends on dtype and optimizer.",
    )
    add_set(parser, "Configuration field of both runs. Repeatable.")
    parser.add_argument(
        "--final-weights",
        action="store_true",
        help="Compare only the final weights, without a checkpoint of every step.",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON instead of a table.")
    parser.add_argument(
        "--table",
        action="store_true",
        help="Print a Markdown table of the final difference of each backend from serial, on --ranks 1,2,4.",
    )


def run(args: argparse.Namespace) -> int:
    """Train and compare.

    Raises:
        UserError: a wrong argument, or a backend that cannot do what is asked.
        WorkerError: a rank failed.
    """
    exercise = _exercise(args)
    return _run_table(args, exercise) if args.table else _run_pair(args, exercise)


def _run_pair(args: argparse.Namespace, exercise: Exercise) -> int:
    from distributed.testing.parity.diagnosis import TOLERANCES, compare, first_divergence
    from distributed.testing.parity.measure import parse_side, record

    if len(args.backends) != 2:
        raise UserError(
            "needs exactly two backends",
            field="BACKEND",
            got=" ".join(args.backends) or "none",
            remedy="Name two, e.g. `parity serial fsdp`",
        )
    ranks = [positive_int(given or args.ranks or "2", "--ranks") for given in (args.ranks_a, args.ranks_b)]
    sides = [parse_side(text, number) for text, number in zip(args.backends, ranks, strict=True)]
    tolerance = TOLERANCES[exercise.dtype, exercise.optimizer]
    if args.tolerance is not None:
        tolerance = _number(args.tolerance, "--tolerance")
    a, b = (record(side, exercise, every_step=not args.final_weights) for side in sides)
    rows, found = compare(a, b), first_divergence(a, b, exercise, tolerance)
    if args.json:
        print_json(_as_json(a, b, rows, found, tolerance))
    else:
        _print(a, b, rows, found, tolerance)
    return 0 if found is None else 1


def _run_table(args: argparse.Namespace, exercise: Exercise) -> int:
    from distributed.testing.parity.table import default_backends, measure, render

    ranks = [positive_int(word, "--ranks") for word in (args.ranks or "1,2,4").split(",")]
    rows = measure(
        args.backends or default_backends(), ranks, exercise, report=lambda text: print(text, file=sys.stderr)
    )
    lines = []
    for line in render(rows):
        print(line, flush=True)
        lines.append(line)
    return int(any("**" in line for line in lines))


def _exercise(args: argparse.Namespace) -> Exercise:
    from distributed.testing.parity.measure import Exercise

    return Exercise(
        steps=positive_int(args.steps, "--steps"),
        global_batch_size=positive_int(args.global_batch_size, "--global-batch-size"),
        accumulation=positive_int(args.accumulation, "--accumulation"),
        samples=positive_int(args.samples, "--samples"),
        dtype=_one_of(args.dtype, "--dtype", _DTYPES),
        optimizer=_one_of(args.optimizer, "--optimizer", _OPTIMIZERS),
        learning_rate=_number(args.learning_rate, "--learning-rate"),
        options=parse_assignments(args.set),
    )


def _print(a: Record, b: Record, rows: Sequence[Row], found: Divergence | None, tolerance: float) -> None:
    heads = ["step", "loss A", "loss B", "norm A", "norm B", "weights apart"]
    styles = ["bold" if found is not None and row.step == found.step else "" for row in rows]
    print_table(heads, [_cells(row) for row in rows], styles)
    if found is None:
        print(
            f"{_describe_side(a)} and {_describe_side(b)} agree within {tolerance:g} over {len(rows)} steps"
        )
        return
    first, second = found.values
    print(f"A = {_describe_side(a)}, B = {_describe_side(b)}")
    print(f"first divergence: step {found.step}, {found.figure}: {first:.10g} and {second:.10g}")
    for cause in found.causes:
        print(f"likely cause: {cause}")


def _cells(row: Row) -> list[str]:
    figures = [f"{value:.10g}" for value in (*row.loss, *row.norm)]
    return [str(row.step), *figures, "" if row.distance is None else f"{row.distance:.1e}"]


def _describe_side(side: Record) -> str:
    ranks = "1 rank" if side.side.ranks == 1 else f"{side.side.ranks} ranks"
    return f"{side.side} on {ranks}"


def _as_json(
    a: Record, b: Record, rows: Sequence[Row], found: Divergence | None, tolerance: float
) -> dict[str, Any]:
    return {
        "a": {"backend": str(a.side), "ranks": a.side.ranks},
        "b": {"backend": str(b.side), "ranks": b.side.ranks},
        "tolerance": tolerance,
        "steps": [asdict(row) for row in rows],
        "divergence": None if found is None else asdict(found),
    }


def _number(text: str, flag: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError("not a number", field=flag, got=text, allowed="e.g. 1e-6") from None


def _one_of(text: str, flag: str, allowed: tuple[str, ...]) -> str:
    if text not in allowed:
        raise UserError("unknown value", field=flag, got=text, allowed=", ".join(allowed))
    return text
