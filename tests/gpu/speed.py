"""Steps beside a hand-written loop, asynchronous saves beside synchronous ones, and peak memory."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.save_stall import EVERY, Clock, Stack, typical
from tests.benchmarks.step_overhead import Turns, interval
from tests.gpu.checks import Measured, Settings, Skipped
from tests.gpu.product import Callback
from tests.gpu.ranks import number_of_ranks, trainer

__all__ = ["BATCH", "WIDTH", "overhead", "peak_memory", "save_stall", "stack"]

_SIZES = {1: (256, 128), 5: (1024, 1024), 20: (2048, 2048)}
"""Milliseconds a step -> (width, batch) of an MLP whose depth is then found."""
WIDTH, BATCH = 2048, 64
"""Of the model whose peak is measured, and of its micro-batches."""

_BLOCK = 0.1
"""Seconds that a block of steps takes."""


def synchronize(setting: Settings) -> None:
    """Wait for the device."""
    if setting.device == "cuda":
        torch.cuda.synchronize()


# -- steps -------------------------------------------------------------------------------


def _mlp(width: int, depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


class Workload:
    """The model and data that both loops train."""

    def __init__(self, setting: Settings, width: int, batch: int) -> None:
        self.setting, self.width, self.batch, self.depth = setting, width, batch, 1
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(16 * batch, width, generator=generator)
        self.y = torch.randint(0, 10, (len(self.x),), generator=generator)

    def loop(self, depth: int, tick: Callable[[], bool]) -> None:
        """The loop that everybody writes, until `tick` has enough."""
        device = self.setting.device
        model = _mlp(self.width, depth).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        while True:
            for index in torch.randperm(len(self.x)).split(self.batch):
                x = self.x[index].to(device, non_blocking=True)
                y = self.y[index].to(device, non_blocking=True)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                if tick():
                    return

    def seconds(self, depth: int, steps: int = 10) -> float:
        """Median time of a step of the hand-written loop."""
        marks: list[float] = []

        def tick() -> bool:
            synchronize(self.setting)
            marks.append(perf_counter())
            return len(marks) > steps

        self.loop(depth, tick)
        return median(b - a for a, b in pairwise(marks[2:]))

    def fit_depth(self, target: float) -> float:
        """Choose the depth at which a step takes about `target` seconds; return what it takes."""
        self.depth, step = 4, self.seconds(4)
        for _ in range(4):
            if abs(step / target - 1) < 0.2:
                break
            # What a step costs without any layer stays, so this is reached in a few rounds.
            self.depth = max(1, min(512, round(self.depth * target / step)))
            step = self.seconds(self.depth)
        return step


class TakeTurns(Callback):
    """Takes turns with the other loop, and asks to stop when enough was measured."""

    def __init__(self, start: Callable[[], Callable[[], bool]]) -> None:
        self.start, self.enough = start, False

    def on_run_start(self, context: Any) -> None:
        self.tick = self.start()

    def on_step_end(self, context: Any) -> None:
        if not self.enough and self.tick():
            self.enough = True
            context.request_stop("enough was measured")


def overhead(setting: Settings, milliseconds: int) -> Iterator[Measured]:
    """One process: the Trainer with its default callbacks, and the loop without any wrapper, in turns."""
    work = Workload(setting, *setting.pick(_SIZES[milliseconds], (64, 32)))
    step = work.fit_depth(milliseconds / setting.pick(1e3, 2e4))
    steps = max(2, round(setting.pick(_BLOCK, 0.005) / step))
    turns = Turns(steps, setting.pick(60, 8))
    base = threading.Thread(
        target=lambda: work.loop(work.depth, _synced(setting, turns.clock(0), steps)), daemon=True
    )
    base.start()
    turns.base_is_ready.wait()
    model = _mlp(work.width, work.depth)
    ours = trainer(
        setting,
        model,
        "pytorch-ddp",
        "default",
        num_processes=1,
        batch_size=work.batch,
        learning_rate=1e-3,
        log_every_n_steps=10,
    )
    ours.callbacks = [TakeTurns(lambda: _synced(setting, turns.clock(1), steps))]
    ours.fit((work.x, work.y), epochs=100_000)
    base.join()
    warm = max(1, turns.blocks // 10)
    pairs = list(zip(turns.seconds[0][warm:], turns.seconds[1][warm:], strict=False))
    ratio, low, high = interval(pairs)
    base_ms, ours_ms = (1e3 * median(side) / steps for side in zip(*pairs, strict=True))
    yield Measured(
        ratio, f"[{low:.3f}, {high:.3f}]; {base_ms:.2f} ms by hand, {ours_ms:.2f} ms; {len(pairs)} pairs"
    )


def _synced(setting: Settings, tick: Callable[[], bool], steps: int) -> Callable[[], bool]:
    """`tick`, behind the device's work at the end of each block."""
    done = 0

    def synced() -> bool:
        nonlocal done
        done += 1
        if done % steps == 0:
            synchronize(setting)
        return tick()

    return synced


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
