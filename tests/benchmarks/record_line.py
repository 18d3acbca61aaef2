"""What a line of the run's record costs, beside the 50 steps between two of them.

    python tests/benchmarks/record_line.py

A step is the bundled model's, on one thread; both are measured in CPU time, in turns.
"""

from __future__ import annotations

import tempfile
import time
from statistics import median

import torch

from distributed.commands.bundled.digits import build_model
from distributed.operations.report.record_format import append

TURNS, STEPS = 40, 50


def main() -> None:
    """Print the ratio."""
    torch.set_num_threads(1)
    model, x, y = build_model(), torch.randn(32, 64), torch.randint(0, 10, (32,))
    optimizer = torch.optim.AdamW(model.parameters())
    figures = {"attempt": "12345678", "step": 1, "figures": {f"figure_{n}": n / 7 for n in range(20)}}
    lines, steps = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(TURNS):
            begin = time.process_time()
            for _ in range(STEPS):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            steps.append(time.process_time() - begin)
            begin = time.process_time()
            append(folder, "log", figures)
            lines.append(time.process_time() - begin)
    line, step = median(lines), median(steps) / STEPS
    share = line / (STEPS * step)
    print(f"a line {line * 1e6:.0f} us, a step {step * 1e6:.0f} us: {share:.2%} of {STEPS} steps")


if __name__ == "__main__":
    main()
