"""Costs that depend on the number of ranks, as the Markdown tables of docs/scaling.md.

python -m tests.campaigns.scale [--inventory] [--measure] [--simulate] [--ranks 16,64,256,1024,4096,16384]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from time import monotonic

from distributed.launch.fork_server import ForkServer
from distributed.launch.forked import ADDRESS
from tests.campaigns.scale.inventory import INVENTORY
from tests.campaigns.scale.measure import measure
from tests.campaigns.scale.simulate import simulate
from tests.campaigns.scale.tables import inventory_table, measured_table, seconds_table, simulated_table

_MEASURED = (1, 2, 4, 8, 16)
_SIMULATED = (16, 64, 256, 1024, 4096, 16384)


def main(arguments: Sequence[str]) -> int:
    """Print the tables that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.scale", description=__doc__)
    parser.add_argument("--inventory", action="store_true", help="Print what depends on the number of ranks.")
    parser.add_argument("--measure", action="store_true", help="Train 1 to 16 ranks on this machine.")
    parser.add_argument("--simulate", action="store_true", help="Run the product's code on fake peers.")
    parser.add_argument("--ranks", type=_numbers, help="Numbers of ranks, with commas between them.")
    args = parser.parse_args(arguments)
    if args.inventory:
        print(inventory_table(INVENTORY))
    if args.measure:
        with ForkServer(["distributed.testing.preload:torch_ranks"]) as server:
            os.environ[ADDRESS] = server.address
            print(measured_table(_collect(measure, args.ranks or _MEASURED)))
    if args.simulate:
        found = _collect(simulate, args.ranks or _SIMULATED)
        print(simulated_table(INVENTORY, found))
        print(seconds_table(found))
    return 0


def _collect(run: Callable[[int], dict[str, float]], sizes: Sequence[int]) -> dict[int, dict[str, float]]:
    found = {}
    for size in sizes:
        started = monotonic()
        found[size] = run(size)
        print(f"{size} ranks: {monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    return found


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
