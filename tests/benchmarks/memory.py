"""What a dataset in memory costs when two ranks train on it.

    OMP_NUM_THREADS=1 python tests/benchmarks/memory.py [--megabytes 1024] [--kind torch|numpy]

Sums the ranks' proportional set sizes (a page that k processes share counts 1/k in each)
after an epoch that has read every sample, for the large dataset and for a tiny one.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from distributed import Callback, Trainer

WIDTH = 1024


class Measure(Callback):
    """Writes this rank's proportional set size, in bytes, at the end of the first epoch."""

    all_ranks = True

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_epoch_end(self, context: Any, metrics: Any) -> None:
        text = Path("/proc/self/smaps_rollup").read_text()
        pss = next(line for line in text.splitlines() if line.startswith("Pss:"))
        Path(self.folder, str(context.world.rank)).write_text(str(int(pss.split()[1]) * 1024))


class Arrays(Dataset[Any]):
    """A NumPy array held by a dataset of one's own."""

    def __init__(self, rows: int) -> None:
        self.rows = np.ones((rows, WIDTH), dtype=np.float32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.rows[index], index % 10


def total_pss(rows: int, kind: str) -> int:
    data: Any = Arrays(rows) if kind == "numpy" else (torch.ones(rows, WIDTH), torch.arange(rows) % 10)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            nn.Linear(WIDTH, 10),
            num_processes=2,
            device="cpu",
            batch_size=64,
            log_every_n_steps=10_000,
            callbacks=[Measure(folder)],
        )
        trainer.fit(data, epochs=1)
        return sum(int(path.read_text()) for path in Path(folder).iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--kind", default="torch", choices=["torch", "numpy"])
    args = parser.parse_args()
    rows = args.megabytes * 2**20 // (4 * WIDTH)
    tiny, large = total_pss(256, args.kind), total_pss(rows, args.kind)
    data = rows * WIDTH * 4
    print(
        f"two ranks, {args.kind} dataset of {data / 1e9:.2f} GB: {large / 1e9:.2f} GB in all; tiny dataset"
        f" {tiny / 1e9:.2f} GB; difference {(large - tiny) / 1e9:.2f} GB ="
        f" {(large - tiny) / data:.2f} x the dataset"
    )


if __name__ == "__main__":
    main()
