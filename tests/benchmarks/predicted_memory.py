"""Predicted beside measured peaks of ranks, for all models and runs, as rows of a table.

python -m tests.benchmarks.predicted_memory [MODEL ...]
"""

from __future__ import annotations

import sys

from tests.support.predicted_memory import ALL, CODECS, DDP, DECIDING, MESHES, SMALL_BUCKETS, compare

RUNS = {
    "llama": [*MESHES, *CODECS, DDP | SMALL_BUCKETS, CODECS[1] | SMALL_BUCKETS, *ALL],
    "bert": ALL,
    "vit": ALL,
    "gpt2": ALL,
    **{name: [*CODECS, *DECIDING] for name in ("qwen2", "mistral", "phi")},
}
"""Model -> its runs. The rules come from a Llama, a BERT and a ViT; the last three were kept aside."""


def main() -> None:
    """Print a row for each run."""
    for name in sys.argv[1:] or RUNS:
        for entry, measured, predicted in compare(name, RUNS[name]):
            left_out = ("backend", "ranks", "pairs", "parallel")
            fields = {**{k: v for k, v in entry.items() if k not in left_out}, **entry.get("parallel", {})}
            cells = [
                name,
                f"{entry['backend']}, {entry['ranks']} ranks",
                " ".join(f"{key}={value}" for key, value in fields.items()),
                f"{measured / 2**20:.2f}",
                f"{predicted / 2**20:.2f}",
            ]
            error = f"{100 * (predicted / measured - 1):+.2f} %"
            print("| " + " | ".join([*cells, error]) + " |", flush=True)


if __name__ == "__main__":
    main()
