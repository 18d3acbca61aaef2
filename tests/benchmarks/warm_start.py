"""Seconds to the next trained step: second fit, tuner trial and restart, beside a start from nothing.

    python tests/benchmarks/warm_start.py [--ranks 2] [--rounds 3] [--start auto fresh]

One process trains twice with `fit`, then a model whose rank 1 kills itself, with a restart, and then three
trials of a tuner. A start from nothing is the time from the command to the first step of the first `fit`.
Figures are the least of all rounds, and the ratio to the start from nothing with `launch_start=fresh`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
from distributed import Callback, DistributedConfig, DistributedTuner, Trainer

start, ranks = sys.argv[1], int(sys.argv[2])
TIMES = os.path.abspath("times")

def note(what):
    with open(TIMES, "a") as file:
        file.write(f"{what} {time.time()}\\n")

class Steps(Callback):
    all_ranks = True
    def __init__(self, what):
        self.what = what
    def on_step_end(self, context):
        if context.world.rank == 0:
            note(f"{self.what}-step")

class Kill(Steps):
    def on_run_start(self, context):
        self.what = "restart" if os.path.exists("killed") else "before"
    def on_step_end(self, context):
        super().on_step_end(context)
        if context.world.rank == 1 and context.progress.step == 3 and not os.path.exists("killed"):
            note("restart-begin")
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

def build():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))

data = (torch.rand(1437, 64), torch.randint(0, 10, (1437,)))
given = dict(num_processes=ranks, batch_size=32, device="cpu", launch_start=start)

def train_trial(sampled):
    note("trial-begin")
    trainer = Trainer(build(), callbacks=[Steps("trial")], **given, learning_rate=sampled["rate"])
    trainer.fit(data, max_steps=2)

if __name__ == "__main__":
    trainer = Trainer(build(), callbacks=[Steps("first")], **given)
    trainer.fit(data, max_steps=2)
    trainer.callbacks[0].what = "second"
    note("second-begin")
    trainer.fit(data, max_steps=4)
    killed = Trainer(build(), callbacks=[Kill("before")], **given, checkpoint_dir="saved",
                     elastic={"max_restarts": 1}, checkpoint_frequency=1)
    killed.fit(data, max_steps=6)
    space = {"rate": {"grid": [1e-3, 1e-2, 1e-1]}}
    DistributedTuner(
        train_trial, space, num_cpus=ranks, ranks_per_trial=ranks, output_dir="tuned", metric="train_loss"
    ).tune(num_samples=1)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--start", nargs="*", default=["fresh", "auto"])
    args = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {start: {} for start in args.start}
    for _ in range(args.rounds):
        for start in args.start:
            for what, seconds in measure(start, args.ranks).items():
                found[start].setdefault(what, []).append(seconds)
    base = min(next(iter(found.values()))["first"])
    print(f"{args.ranks} ranks, least of {args.rounds}")
    for start, figures in found.items():
        for what, seconds in figures.items():
            print(f"{start:<6} {what:<8} {min(seconds):6.2f} s   ratio {min(seconds) / base:.2f}")


def measure(start: str, ranks: int) -> dict[str, float]:
    """Seconds to the next trained step, for each event of the script. Of the trials, the last one counts."""
    with TemporaryDirectory() as folder:
        Path(folder, "script.py").write_text(SCRIPT)
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        begin = time.time()
        command = [sys.executable, "script.py", start, str(ranks)]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
        lines = [line.split() for line in Path(folder, "times").read_text().splitlines()]
    begins, seconds = {"first": begin}, dict[str, float]()
    for name, moment in lines:
        what, _, event = name.partition("-")
        if event == "begin":
            begins[what] = float(moment)
        elif what in begins:  # the first step after the event
            seconds[what] = float(moment) - begins.pop(what)
    return seconds


if __name__ == "__main__":
    main()
