"""How long the light paths take beside ``import torch``, in fresh processes by turns.

python tests/benchmarks/imports.py [--repeat 9]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

TIMED = "import time; t = time.perf_counter(); import {0}; print(time.perf_counter() - t)"
WHAT = {
    "import torch": [sys.executable, "-c", TIMED.format("torch")],
    "import distributed": [sys.executable, "-c", TIMED.format("distributed")],
    "distributed.DistributedConfig": [
        sys.executable,
        "-c",
        "import time; t = time.perf_counter(); from distributed import DistributedConfig;"
        " print(time.perf_counter() - t)",
    ],
    "python -m distributed.cli --help": [sys.executable, "-m", "distributed.cli", "--help"],
    "python -c pass": [sys.executable, "-c", "pass"],
}


def seconds(command: list[str]) -> float:
    """What the process printed, or how long it took as a whole."""
    start = time.perf_counter()
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    elapsed = time.perf_counter() - start
    try:
        return float(output)
    except ValueError:
        return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=9)
    repeat = parser.parse_args().repeat
    found: dict[str, list[float]] = {name: [] for name in WHAT}
    for _ in range(repeat):
        for name, command in WHAT.items():
            found[name].append(seconds(command))
    torch = statistics.median(found["import torch"])
    for name, times in found.items():
        middle = statistics.median(times)
        print(f"{name:<34} {middle:6.3f} s   {middle / torch:6.3f} of import torch   (best {min(times):.3f})")


if __name__ == "__main__":
    main()
