"""A long run on two ranks: memory, descriptors, threads and disk have to stay as they are.

``python -m tests.campaigns.soak --epochs 300`` trains with asynchronous checkpoints, validation, best
checkpoint, a tracker and loader workers, in as many calls of `fit` as ``--fits`` says, and records every
process of the run after each epoch. Exit code 1 when descriptors, threads, processes or files grow after the
first third of the run, or resident memory or disk use by more than ``--limit`` KiB per epoch. The history
that `fit` returns grows by about 100 bytes per step and 1 kB per log line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Callback, Trainer

__all__ = ["Figures", "main", "problems_of"]

Figures = dict[str, dict[str, list[float]]]
"""Process -> quantity -> its value after each epoch."""


class Recorder(Callback):
    """Writes what this rank's process holds after each epoch; rank 0 also the launcher's and the disk's.

    Args:
        folder: where the figures are written, and which is measured.
    """

    all_ranks = True

    def __init__(self, folder: Path) -> None:
        self.folder, self.launcher = folder, os.getpid()

    def on_epoch_end(self, context: Any, metrics: dict[str, float]) -> None:
        """Record."""
        rank = context.world.rank
        self._write(f"rank {rank}", holdings(psutil.Process()))
        if rank == 0:
            self._write("launcher", holdings(psutil.Process(self.launcher)))
            self._write("disk", usage(self.folder))

    def _write(self, who: str, figures: dict[str, float]) -> None:
        with (self.folder / "figures.jsonl").open("a") as file:
            file.write(json.dumps({"who": who, **figures}) + "\n")


def holdings(process: psutil.Process) -> dict[str, float]:
    """Memory of its own and resident memory in KiB, open descriptors, threads and child processes."""
    return {
        "memory": (memory := process.memory_full_info()).uss / 1024,
        "resident": memory.rss / 1024,
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "children": len(process.children()),
    }


def usage(folder: Path) -> dict[str, float]:
    """Number of files below `folder` but for the records of the run, and their bytes in KiB."""
    sizes = []
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if path.suffix != ".jsonl" and ".tfevents." not in name and path.exists():
                sizes.append(path.stat().st_size)
    return {"files": len(sizes), "bytes": sum(sizes) / 1024}


def train(folder: Path, epochs: int, fits: int) -> None:
    """The run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    x = torch.randn(96, 16)
    data = TensorDataset(x, x[:, 0].gt(0).long())
    trainer = Trainer(
        model,
        callbacks=[Recorder(folder)],
        num_processes=2,
        device="cpu",
        batch_size=8,
        tensorboard_dir=str(folder / "events"),
        checkpoint_dir=str(folder / "checkpoints"),
        checkpoint={"asynchronous": True, "keep_last": 2, "every_n_steps": 4},
    )
    for number in range(fits):
        trainer.fit(
            DataLoader(data, batch_size=8, shuffle=True, num_workers=1),
            TensorDataset(x[:32], x[:32, 0].gt(0).long()),
            epochs=epochs * (number + 1) // fits,
        )


def read(folder: Path) -> Figures:
    """What `Recorder` has written."""
    found: Figures = {}
    for line in (folder / "figures.jsonl").read_text().splitlines():
        record = json.loads(line)
        who = found.setdefault(record.pop("who"), {})
        for name, value in record.items():
            who.setdefault(name, []).append(value)
    return found


def slope(values: Sequence[float]) -> float:
    """Growth per epoch over the last two thirds of `values`, by least squares."""
    kept = values[len(values) // 3 :]
    return statistics.linear_regression(range(len(kept)), kept).slope


def problems_of(figures: Figures, limit: float) -> list[str]:
    """What has grown."""
    problems = []
    for who, quantities in figures.items():
        for name, values in quantities.items():
            third = len(values) // 3
            middle, last = max(values[third : 2 * third]), max(values[2 * third :])
            if name in ("resident", "bytes"):
                if (growth := slope(values)) > limit:
                    problems.append(f"{name} of {who} grows by {growth:.2f} KiB per epoch")
            elif name != "memory" and last > middle:
                problems.append(f"{name} of {who} grew from {middle:.0f} to {last:.0f}")
    return problems


def main(words: list[str] | None = None) -> int:
    """Train, print a table, and return 1 if anything has grown."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.soak", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--fits", type=int, default=1, help="Calls of fit, each for an equal share.")
    parser.add_argument("--limit", type=float, default=8.0, metavar="KIB", help="Default: %(default)s.")
    args = parser.parse_args(words)
    with TemporaryDirectory() as folder:
        train(Path(folder), args.epochs, args.fits)
        figures = read(Path(folder))
    print("| process | quantity | after 1 epoch | after a third | at the end | growth per epoch |")
    print("|---|---|---|---|---|---|")
    for who, quantities in figures.items():
        for name, values in quantities.items():
            first, middle, last = values[0], values[len(values) // 3], values[-1]
            print(f"| {who} | {name} | {first:,.0f} | {middle:,.0f} | {last:,.0f} | {slope(values):+.3f} |")
    problems = problems_of(figures, args.limit)
    print("\n".join(problems) or "Nothing has grown.")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
