"""``bench comm``: time and bandwidth of collectives, on ranks of its own or on those of a launcher."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.commands.parser import add_set, byte_count, positive_int
from distributed.commands.tables import print_json, print_table
from distributed.communication.collective_costs import OPERATIONS
from distributed.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from distributed.interfaces.plan import RunPlan
    from distributed.operations.bench.comm import Plan, Report

__all__ = ["add_arguments", "run"]

_FIELDS = ("num_processes", "num_gpus", "device", "communication_backend")


def add_arguments(actions: Any) -> None:
    """Add the action and its flags."""
    summary = "Measure time and bandwidth of collectives over a range of sizes, and check their results."
    parser = actions.add_parser("comm", help=summary, description=summary, epilog=_EPILOG)
    flags = parser.add_argument
    flags("--num-processes", metavar="N", help="Ranks to start, as CPU processes where there is no GPU.")
    flags("--num-gpus", metavar="N", help="The same. Default: all GPUs if there are several, else 2 ranks.")
    flags("--device", metavar="auto|cpu|cuda", help="Device of the tensors. Default: GPUs where there are.")
    flags(
        "--communication-backend",
        metavar="auto|nccl|gloo",
        help="Transport. Default: nccl on GPUs, else gloo.",
    )
    flags(
        "--operations",
        default=",".join(OPERATIONS),
        metavar="A,B",
        help=f"Operations to measure. Default: {','.join(OPERATIONS)}.",
    )
    flags(
        "--algorithm",
        default="library",
        metavar="A,B",
        help="All-reduce: library, ring, tree, halving-doubling, or all of them. Default: library.",
    )
    flags("--min-bytes", default="1K", metavar="N", help="Smallest size, such as 512 or 64K. Default: 1K.")
    flags("--max-bytes", default="16M", metavar="N", help="Largest size. Default: 16M.")
    flags(
        "--factor", default="4", metavar="N", help="Each size is this multiple of the one before. Default: 4."
    )
    flags("--iterations", default="20", metavar="N", help="Timed calls of each size. Default: 20.")
    flags("--warmup", default="5", metavar="N", help="Calls before those that are timed. Default: 5.")
    flags("--dtype", default="float32", metavar="NAME", help="Type of the elements. Default: float32.")
    add_set(parser, "Any configuration field, as for train. Repeatable.")
    flags("--json", action="store_true", help="Print JSON with every timed call.")
    flags("--output", metavar="FILE", help="Also write an HTML page with plots.")


_EPILOG = """
Under torchrun it measures on the ranks of torchrun, of one host or several:
torchrun --nproc-per-node 8 -m distributed.cli bench comm. Rank 0 prints.
"""


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        UserError: a wrong argument, a single rank, or something that the transport cannot do.
        WorkerError: a rank failed, or has a wrong result.
    """
    from distributed.operations.bench import comm

    plan, ranks = _plan(args), _ranks(args)
    comm.check_memory(plan, ranks.local_size)
    if args.output:
        from distributed.operations.report.html import check_plotly

        check_plotly("a page of bench comm")
    if ranks.joined is None:
        report: Report | None = comm.start_ranks(ranks, plan)
    else:
        from distributed.operations.bench.comm_rank import measure, print_progress

        report = measure(plan, comm.rank_fields(ranks.config), print_progress)
    if report is None:
        return 0
    if args.json:
        print_json(report.to_json())
    else:
        _print(report)
    if args.output:
        from distributed.operations.bench.comm_page import write_page

        write_page(Path(args.output), report)
        print(args.output, file=sys.stderr if args.json else sys.stdout)
    return 0


# -- arguments -----------------------------------------------------------------------------------------------


def _plan(args: argparse.Namespace) -> Plan:
    from distributed.operations.bench.comm import ALGORITHM_NAMES, DTYPES, LIBRARY, Plan

    operations = _names(args.operations, OPERATIONS, "--operations")
    algorithms = _names(args.algorithm, ALGORITHM_NAMES, "--algorithm")
    if algorithms != [LIBRARY] and "all-reduce" not in operations:
        raise UserError(
            "the algorithms are those of all-reduce, which is not among the operations",
            field="--algorithm",
            got=args.algorithm,
            remedy="Add all-reduce to --operations, or leave --algorithm out",
        )
    (dtype,) = _names(args.dtype, DTYPES, "--dtype", most=1)
    return Plan(
        operations=operations,
        algorithms=algorithms,
        sizes=_sizes(args),
        dtype=dtype,
        warmup=0 if args.warmup.strip() == "0" else positive_int(args.warmup, "--warmup"),
        iterations=positive_int(args.iterations, "--iterations"),
    )


def _names(text: str, known: Sequence[str], flag: str, most: int | None = None) -> list[str]:
    """The names in `text`, each once; ``all`` is all that are known."""
    names = list(dict.fromkeys(word.strip().replace("_", "-") for word in text.split(",") if word.strip()))
    if names == ["all"] and most is None:
        return list(known)
    for name in names:
        if name not in known:
            near = did_you_mean(name, known)
            raise UserError(
                f"bench comm has no '{name}'.{near}",
                field=flag,
                got=text,
                allowed=", ".join(known),
                remedy="Correct the name, or leave the flag out",
            )
    if not names or len(names) > (most or len(names)):
        raise UserError(
            "takes one name" if most == 1 else "takes names with commas between them",
            field=flag,
            got=text,
            allowed=", ".join(known),
            remedy="Correct the names, or leave the flag out",
        )
    return names


def _sizes(args: argparse.Namespace) -> list[int]:
    lowest, highest = byte_count(args.min_bytes, "--min-bytes"), byte_count(args.max_bytes, "--max-bytes")
    factor = positive_int(args.factor, "--factor")
    if lowest > highest:
        raise UserError(
            "the smallest size is above the largest one",
            field="--min-bytes",
            got=args.min_bytes,
            allowed=f"at most --max-bytes, {args.max_bytes}",
        )
    if factor == 1 and lowest < highest:
        raise UserError(
            "sizes that do not grow never reach the largest one",
            field="--factor",
            got=factor,
            allowed="2, 3, ..., or 1 with equal --min-bytes and --max-bytes",
        )
    sizes = [lowest]
    while factor > 1 and sizes[-1] * factor <= highest:
        sizes.append(sizes[-1] * factor)
    return sizes


def _ranks(args: argparse.Namespace) -> RunPlan:
    """The ranks that the configuration asks for, at least two of them."""
    from distributed.communication.environment import detect
    from distributed.config import Layer, load_layers, parse_assignments
    from distributed.interfaces.plan import Facts, Resources
    from distributed.planner.resolve import resolve
    from distributed.registry.catalog import get_catalog
    from distributed.system.devices import visible_gpus

    given = {name: getattr(args, name) for name in _FIELDS if getattr(args, name) is not None}
    layers = [Layer("flag", given), Layer("--set", parse_assignments(args.set))]
    joined = detect(os.environ)
    config = load_layers(layers)
    gpus = 0 if config.device == "cpu" else visible_gpus()
    if joined is None:
        own: dict[str, Any] = {"launch": "spawn", "launch_start": "fresh"}
        if config.num_ranks is None:
            own |= {"num_processes": max(2, gpus)} | ({"device": "cpu"} if gpus < 2 else {})
        layers = [Layer("default of bench comm", own), *layers]
        config = load_layers(layers)
        gpus = 0 if config.device == "cpu" else gpus
    plan = resolve(config, get_catalog(), Facts(), Resources(gpus), joined)
    if plan.world_size < 2:
        raise UserError(
            "a single rank has no other to communicate with",
            field="--num-processes",
            got=plan.world_size,
            allowed="2, 3, ...",
        )
    if joined is None and plan.num_nodes > 1:
        raise UserError(
            "it starts ranks on this host only",
            field="num_nodes",
            got=plan.num_nodes,
            allowed="1",
            remedy="Start it with torchrun on each host",
        )
    return plan


# -- output --------------------------------------------------------------------------------------------------


def _print(report: Report) -> None:
    from distributed.operations.bench.comm_page import HEADS, NOTES, cells_of, headline

    print(headline(report))
    print_table(HEADS, [cells_of(row) for row in report.rows])
    print("\n".join(NOTES))
