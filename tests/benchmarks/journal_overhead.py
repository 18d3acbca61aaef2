"""What the journal, and the comparison of replicas, cost a step.

    OMP_NUM_THREADS=1 taskset -c 1 python tests/benchmarks/journal_overhead.py [--width 192] [--depth 3]

One rank trains; every other block of steps it keeps no journal. The ratio of the thread's CPU time is the
median over pairs of neighbouring blocks, with a 95 % bootstrap interval. The journal's own calls and the
checksum are timed alone besides, because they are less than what a step varies by.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import tempfile
import timeit
from pathlib import Path
from time import thread_time
from typing import Any

import torch
from torch import nn

from distributed import Callback, Trainer
from distributed.resilience.divergence import checksum, trained
from distributed.resilience.phase_journal import Journal, no_op

PHASES = ("data", "forward", "backward", "optimizer", "callback", "optimizer")
"""What a step enters on a rank with one callback per step, and without a log step."""


class InTurns(Callback):
    """Keeps a journal every other block of steps; remembers the blocks' seconds."""

    all_ranks = True

    def __init__(self, folder: str, steps: int, blocks: int) -> None:
        self.folder, self.steps, self.blocks = folder, steps, blocks
        self.seconds: list[float] = []

    def on_run_start(self, context: Any) -> None:
        """Begin with a journal, so that the loop asks for the hook anew every epoch."""
        self.journal = Journal(Path(self.folder), 0)
        self.journal.begin()
        self.timers, self.start = context.timers, thread_time()

    def on_step_end(self, context: Any) -> None:
        """An epoch is a block."""
        if context.progress.step % self.steps == 0:
            self.seconds.append(thread_time() - self.start)
            # The loop takes the hook at the start of an epoch.
            self.timers.enter = self.journal.enter if len(self.seconds) % 2 else no_op
            if len(self.seconds) == self.blocks:
                context.request_stop("measured")

    def on_epoch_end(self, context: Any, metrics: Any) -> None:
        """What happens between blocks counts for none."""
        self.start = thread_time()


def mlp(width: int, depth: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def interval(ratios: list[float]) -> tuple[float, float, float]:
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[50], medians[-51]


def in_turns(args: argparse.Namespace) -> None:
    samples = args.steps * 32
    data = torch.randn(samples, args.width), torch.randint(0, 10, (samples,))
    with tempfile.TemporaryDirectory() as folder:
        turns = InTurns(folder, args.steps, args.blocks)
        trainer = Trainer(
            mlp(args.width, args.depth),
            device="cpu",
            batch_size=32,
            callbacks=[turns],
            log_every_n_steps=10**6,
        )
        trainer.fit(data, epochs=args.blocks + 1)
    seconds = turns.seconds[4 : len(turns.seconds) // 2 * 2]
    without, kept = seconds[0::2], seconds[1::2]
    ratio, low, high = interval([b / a for a, b in zip(without, kept, strict=True)])
    step = 1e6 * statistics.median(without) / args.steps
    print(f"step {step:.0f} us of CPU time; with a journal {ratio:.4f} of it [{low:.4f}, {high:.4f}]")


def alone(args: argparse.Namespace) -> None:
    number = 20_000
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder), 0)
        journal.begin()
        for name, enter in (("journal", journal.enter), ("none", no_op)):

            def step(enter: Any = enter) -> None:
                enter(PHASES[0], 7)
                for phase in PHASES[1:]:
                    enter(phase)

            best = min(timeit.repeat(step, timer=thread_time, number=number, repeat=5)) / number
            print(f"{len(PHASES)} phases of a step, {name}: {1e6 * best:.2f} us")
    parameters = trained(mlp(args.width, args.depth))
    best = min(timeit.repeat(lambda: checksum(parameters), timer=thread_time, number=50, repeat=5)) / 50
    held = sum(p.numel() for p in parameters.values())
    print(f"checksum of {held} parameters: {1e6 * best:.0f} us, every 100 steps {1e4 * best:.2f} us a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50, help="steps per block")
    parser.add_argument("--blocks", type=int, default=120)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    in_turns(args)
    alone(args)


if __name__ == "__main__":
    main()
