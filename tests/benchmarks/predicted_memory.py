"""Predicted beside measured peaks of ranks, for all models and runs, as rows of a table.

python -m tests.benchmarks.predicted_memory [MODEL ...]
"""

from __future__ import annotations

import sys

from tests.support.predicted_memory import ALL, compare
from tests.support.small_transformers import MODELS


def main() -> None:
    """Print a row for each run."""
    for name in sys.argv[1:] or MODELS:
        for entry, measured, predicted in compare(name, ALL):
            rest = [f"{key}={value}" for key, value in entry.items() if key not in ("backend", "ranks")]
            cells = [
                name,
                entry["backend"],
                " ".join(rest),
                f"{measured / 2**20:.2f}",
                f"{predicted / 2**20:.2f}",
            ]
            print(
                "| " + " | ".join([*cells, f"{100 * (predicted / measured - 1):+.2f} %"]) + " |", flush=True
            )


if __name__ == "__main__":
    main()
