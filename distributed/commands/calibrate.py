"""``calibrate``: measure a hardware profile of this machine, which `plan` predicts with."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from distributed.commands.parser import positive_int
from distributed.commands.tables import print_table
from distributed.errors import UserError

if TYPE_CHECKING:
    from distributed.planner.estimates.hardware import HardwareProfile

__all__ = ["add_arguments", "run"]

_DEFAULT = "hardware.yaml"
_EPILOG = """
Nothing else should run on the machine meanwhile. On CPUs, ranks have the threads that they have in a run:
OMP_NUM_THREADS, or an equal share of the cores.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``calibrate``."""
    parser.epilog = _EPILOG
    flags = parser.add_argument
    flags("-o", "--output", default=_DEFAULT, metavar="FILE", help=f"The profile. Default: {_DEFAULT}.")
    flags(
        "--ranks",
        metavar="N,N",
        help="Numbers of ranks at work on this node. Default: 1,2,4 and so on, up to the GPUs or cores, at"
        " least 4.",
    )
    flags("--device", choices=["auto", "cpu", "cuda"], default="auto", help="Default: GPUs where there are.")
    flags("--name", default="this-machine", metavar="NAME", help="Of the profile. Default: this-machine.")
    flags(
        "--duration",
        metavar="SECONDS",
        help="Time for each size of an operation. Default: 0.02; all of it takes less than a minute on an"
        " idle machine.",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, write the profile, and print a summary.

    Raises:
        UserError: a wrong argument, or a folder that does not exist.
        WorkerError: a rank failed.
    """
    from distributed.operations.planning.calibrate import DURATION, calibrate, default_ranks, write_profile
    from distributed.system.devices import visible_gpus

    path = Path(args.output)
    if not path.absolute().parent.is_dir():
        raise UserError(
            "the folder of the profile does not exist",
            field="--output",
            got=args.output,
            remedy="Create the folder, or choose another one",
        )
    gpus = 0 if args.device == "cpu" else visible_gpus()
    ranks = default_ranks(gpus) if args.ranks is None else _ranks(args.ranks)
    start = perf_counter()
    profile = calibrate(
        ranks,
        duration=DURATION if args.duration is None else _seconds(args.duration),
        device=args.device,
        name=args.name,
        report=lambda text: print(text, file=sys.stderr, flush=True),
    )
    write_profile(profile, path)
    _print(profile)
    print(f"\n{path} written in {perf_counter() - start:.0f} s")
    return 0


def _ranks(text: str) -> list[int]:
    return sorted({positive_int(word.strip(), "--ranks") for word in text.split(",")})


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= 10:
        raise UserError(
            "not a duration",
            field="--duration",
            got=text,
            allowed="more than 0 and at most 10 seconds",
            remedy="Leave it out for the default",
        )
    return seconds


def _print(profile: HardwareProfile) -> None:
    from distributed.planner.estimates.measured_node import seconds_of

    assert profile.measured is not None
    print(f"{profile.name}: {profile.summary}")
    rows = []
    for number, rates in sorted(profile.measured.ranks.items()):
        matmul = max(size / seconds for size, seconds in rates.operations["matmul"])
        memory = rates.operations["elementwise"]
        reduce = rates.collectives.get("all-reduce", {}).get(number)
        rows.append(
            [
                str(number),
                str(rates.threads),
                f"{matmul / 1e9:,.1f}",
                f"{max(size / seconds for size, seconds in memory) / 1e9:,.1f}",
                f"{memory[-1][0] / memory[-1][1] / 1e9:,.1f}",
                f"{rates.forward_seconds * 1e6:,.0f} / {rates.backward_seconds * 1e6:,.0f}",
                "" if reduce is None else f"{reduce[0][1] * 1e6:,.0f}",
                "" if reduce is None else f"{2**20 / seconds_of(reduce, 2**20) / 1e9:,.2f}",
                "" if reduce is None else f"{rates.overlap:.0%}",
            ]
        )
    print_table(_HEADS, rows)
    print(f"memory: {profile.memory / 1e9:,.1f} GB for each of {profile.devices_per_node} ranks")
    assumed = [name for name, source in profile.sources.items() if source.startswith("an assumption")]
    print(f"not measured: {', '.join(assumed)}; correct them in the file for runs on several nodes")


_HEADS = [
    "ranks",
    "threads",
    "GFLOP/s",
    "GB/s in cache",
    "GB/s",
    "us/operation fwd / bwd",
    "all-reduce us",
    "GB/s at 1 MiB",
    "hidden",
]
