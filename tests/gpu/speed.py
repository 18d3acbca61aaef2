"""Steps beside a hand-written loop, asynchronous saves beside synchronous ones, and peak memory."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from tests.benchmarks.save_stall import EVERY, Clock, Stack, typical
from tests.benchmarks.step_overhead import interval
from tests.gpu.checks import Measured, Settings, Skipped
from tests.gpu.product import Callback
from tests.gpu.ranks import number_of_ranks, trainer
from tests.gpu.step_loops import LOG_EVERY, Blocks, EpochEnds, Workload

__all__ = ["BATCH", "WIDTH", "epoch_end", "overhead", "peak_memory", "save_stall", "stack"]

WIDTH, BATCH = 2048, 64
"""Of the model whose peak is measured, and of its micro-batches."""

_BLOCK, _SECONDS = 0.1, 30.0
"""Seconds that a block of steps takes at least, and all blocks of both loops."""


# -- steps -------------------------------------------------------------------------------


def overhead(setting: Settings, milliseconds: int) -> Iterator[Measured]:
    """One process and thread: the Trainer with its default callbacks, and the loop without any wrapper.

    The epoch is longer than the measurement, so that its end, which `epoch_end` measures, is not in it.
    """
    work = Workload(setting, milliseconds)
    steps = LOG_EVERY * setting.pick(max(1, round(_BLOCK / work.step / LOG_EVERY)), 1)
    num_pairs = setting.pick(max(12, min(60, round(_SECONDS / steps / work.step / 2))), 4)
    blocks = Blocks(work, steps, warm=LOG_EVERY)
    last = LOG_EVERY + steps * num_pairs
    work.fill(last + 1)
    work.train(blocks, max_steps=last)
    ratio, low, high = interval(blocks.pairs)
    base_ms, ours_ms = (1e3 * median(side) / steps for side in zip(*blocks.pairs, strict=True))
    detail = f"[{low:.3f}, {high:.3f}]; {base_ms:.3f} ms by hand, {ours_ms:.3f} ms"
    yield Measured(ratio, f"{detail}; {len(blocks.pairs)} pairs of {steps} steps, depth {work.depth}")


def epoch_end(setting: Settings) -> Iterator[Measured]:
    """What the end of an epoch of 512 steps without validation and checkpoint adds, in milliseconds."""
    work, num_batches, epochs = Workload(setting, 1), setting.pick(512, 8), setting.pick(9, 4)
    work.fill(num_batches)
    added: list[float] = []
    steps: list[float] = []

    def measure(across: float, within: float) -> None:
        added.append(across - within)
        steps.append(within)

    work.train(EpochEnds(work, num_batches, measure), epochs=epochs)
    low, high = 1e3 * min(added), 1e3 * max(added)
    detail = f"from {low:.2f} to {high:.2f} in {len(added)} epochs; a step {1e3 * median(steps):.2f}"
    yield Measured(1e3 * median(added), detail)


# -- saving ------------------------------------------------------------------------------


def save_stall(setting: Settings, gigabytes: float) -> Iterator[Measured]:
    """Model and AdamW state of `gigabytes` (in a dry run megabytes), float32, on one rank."""
    size = gigabytes * setting.pick(1e9, 1e6)
    _check_room(setting, size)
    later = _saves(setting, size, asynchronous=True)
    waited = _saves(setting, size, asynchronous=False)
    first, stall, whole = later[0][0], typical(later[1:])[0], typical(waited)[0]
    detail = f"stall {stall * 1e3:.1f} ms (the first {first * 1e3:.1f} ms), synchronous {whole * 1e3:.1f} ms"
    yield Measured(stall / whole, f"{detail}, {size / 1e9:.3g} GB")


def _check_room(setting: Settings, size: float) -> None:
    import psutil

    places = {"disk": shutil.disk_usage(setting.folder).free, "memory": psutil.virtual_memory().available}
    if setting.device == "cuda":
        places["GPU memory"] = torch.cuda.mem_get_info()[0]
    for name, free in places.items():
        if free < 3 * size:
            raise Skipped(f"{name}: {free / 1e9:.1f} GB free, {3 * size / 1e9:.1f} GB needed")


def _saves(setting: Settings, size: float, asynchronous: bool) -> list[list[float]]:
    """Per save: seconds in which training stood still (wall time, thread time)."""
    saves, folder = 3, setting.folder / "save"
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    # Weights and two moments of float32.
    ours = trainer(
        setting,
        Stack(int(size / 12)),
        "serial",
        "default",
        batch_size=2,
        checkpoint_dir=str(folder / "saved"),
        checkpoint={
            "every_n_steps": EVERY,
            "keep_last": 1,
            "asynchronous": asynchronous,
            "keep_best": False,
        },
        log_every_n_steps=1000,
        max_steps=EVERY * (saves + 1) + 1,
    )
    ours.callbacks = [Clock(str(folder), plain=False)]
    x = torch.randn(2 * EVERY * (saves + 2), 1)
    try:
        ours.fit((x, (x[:, 0] > 0).long()))
        found: list[list[float]] = json.loads((folder / "clock.json").read_text())["saves"]
        return found
    finally:
        shutil.rmtree(folder)


# -- memory ------------------------------------------------------------------------------


class Peak(Callback):
    """Writes the highest allocation of a run on rank 0's device, in bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_run_start(self, context: Any) -> None:
        torch.cuda.reset_peak_memory_stats()

    def on_run_end(self, context: Any, status: str) -> None:
        self.path.write_text(str(torch.cuda.max_memory_allocated()))


class Block(nn.Module):
    """One layer with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.layer(x))


def stack() -> nn.Module:
    """16 layers of 2048."""
    return nn.Sequential(*(Block(WIDTH) for _ in range(16)), nn.Linear(WIDTH, 10))


def peak_memory(setting: Settings, backend: str) -> Iterator[Measured]:
    """AdamW in float32 on `stack`."""
    transport = "default" if setting.num_gpus > 1 else "gloo"
    model = stack()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    path = Path(tempfile.mkdtemp(dir=setting.folder), "peak")  # other checks run beside this one
    ranks = number_of_ranks(setting, backend, transport)
    ours = trainer(setting, model, backend, transport, batch_size=BATCH)
    ours.callbacks = [Peak(path)]
    samples = BATCH * ranks * 6
    ours.fit((torch.randn(samples, WIDTH), torch.zeros(samples, dtype=torch.long)), max_steps=6)
    peak = int(path.read_text())
    yield Measured(peak / 2**20, f"{peak / weights:.2f} of the weights' bytes; {ranks} ranks")
