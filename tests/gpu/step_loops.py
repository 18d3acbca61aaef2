"""The Trainer's steps and those of a hand-written loop in one thread, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.gpu.checks import Settings
from tests.gpu.product import Callback
from tests.gpu.ranks import trainer

__all__ = ["LOG_EVERY", "SIZES", "Blocks", "Workload", "synchronize"]

SIZES = {1: (256, 128), 5: (1024, 1024), 20: (2048, 2048)}
"""Milliseconds a step -> (width, batch) of an MLP whose depth is then found."""

LOG_EVERY = 50
"""Steps in a log interval, the default: blocks of as many steps, or a multiple, have the same number of log
steps each."""

_STRIDE = 8
"""Elements from a sample to the next one: samples overlap, so that epochs of any length fit into memory."""


def synchronize(setting: Settings) -> None:
    """Wait for the device."""
    if setting.device == "cuda":
        torch.cuda.synchronize()


def _mlp(width: int, depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


class Workload:
    """The model and data that both loops train.

    The data is in host memory; both loops index a batch at a time, pin it, and copy it without waiting.

    Args:
        milliseconds: that a step should take; see `SIZES`.
    """

    def __init__(self, setting: Settings, milliseconds: int) -> None:
        self.setting = setting
        self.width, self.batch = setting.pick(SIZES[milliseconds], (64, 32))
        self.depth = 1
        self.fill(64)
        self.step = self._fit_depth(milliseconds / setting.pick(1e3, 2e4))

    def fill(self, num_batches: int) -> None:
        """Make the data of an epoch of `num_batches` steps."""
        generator, samples = torch.Generator().manual_seed(0), num_batches * self.batch
        numbers = torch.randn(samples * _STRIDE + self.width, generator=generator)
        self.x = numbers.as_strided((samples, self.width), (_STRIDE, 1))
        self.y = torch.randint(0, 10, (samples,), generator=generator)

    def by_hand(self, depth: int | None = None) -> Iterator[None]:
        """The loop that everybody writes; yields after each step, for ever."""
        device, pins = self.setting.device, self.setting.device == "cuda"
        model = _mlp(self.width, depth or self.depth).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        while True:
            for index in torch.randperm(len(self.x)).split(self.batch):
                x, y = self.x[index], self.y[index]
                if pins:
                    x, y = x.pin_memory(), y.pin_memory()
                x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                yield

    def train(self, callback: Callback, **limits: int) -> None:
        """Train with the Trainer in this thread, with its default callbacks and `callback`.

        Args:
            limits: ``max_steps`` or ``epochs``.
        """
        ours = trainer(
            self.setting,
            _mlp(self.width, self.depth),
            "pytorch-ddp",
            "default",
            num_processes=1,
            batch_size=self.batch,
            learning_rate=1e-3,
            log_every_n_steps=LOG_EVERY,
            **limits,
        )
        ours.callbacks = [callback]
        pins = self.setting.device == "cuda"
        ours.fit(DataLoader(TensorDataset(self.x, self.y), self.batch, shuffle=True, pin_memory=pins))

    def _seconds(self, depth: int, steps: int = 10) -> float:
        """Median time of a step of the hand-written loop."""
        marks: list[float] = []
        for _ in zip(range(steps + 3), self.by_hand(depth), strict=False):
            synchronize(self.setting)
            marks.append(perf_counter())
        return median(b - a for a, b in pairwise(marks[2:]))

    def _fit_depth(self, target: float) -> float:
        """Choose the depth at which a step takes about `target` seconds; return what it takes."""
        self.depth, step = 4, self._seconds(4)
        for _ in range(4):
            if abs(step / target - 1) < 0.2:
                break
            # What a step costs without any layer stays, so this is reached in a few rounds.
            self.depth = max(1, min(512, round(self.depth * target / step)))
            step = self._seconds(self.depth)
        return step


class Blocks(Callback):
    """Between two blocks of the Trainer's steps, a block of the hand-written loop, in the same thread.

    A block of the Trainer begins behind `on_step_end`, and with what follows it, as the log record.

    Args:
        steps: in a block.
        warm: steps of both loops before the first block.

    Attributes:
        pairs: (seconds by hand, seconds of the Trainer) of every block.
    """

    def __init__(self, work: Workload, steps: int, warm: int) -> None:
        self.work, self.steps, self.warm = work, steps, warm
        self.pairs: list[tuple[float, float]] = []

    def on_run_start(self, context: Any) -> None:
        self._base, self._taken = self.work.by_hand(), 0

    def on_step_end(self, context: Any) -> None:
        self._taken += 1
        taken = self._taken - self.warm
        if taken < 0 or taken % self.steps:
            return
        if taken:
            ours = self._seconds_since(self._start)
            self.pairs.append((self._block(self.steps), ours))
        else:
            self._block(self.warm)
        self._start = perf_counter()

    def _block(self, steps: int) -> float:
        """Seconds of `steps` steps by hand."""
        synchronize(self.work.setting)
        start = perf_counter()
        for _ in range(steps):
            next(self._base)
        return self._seconds_since(start)

    def _seconds_since(self, start: float) -> float:
        synchronize(self.work.setting)
        return perf_counter() - start


class EpochEnds(Callback):
    """Seconds from the last step of an epoch to the end of the first step of the next one, and of the step
    after that.

    Args:
        measure: called with both.
    """

    def __init__(self, work: Workload, num_batches: int, measure: Callable[[float, float], None]) -> None:
        self.work, self.num_batches, self.measure = work, num_batches, measure
        self._marks: list[float] = []

    def on_step_end(self, context: Any) -> None:
        place = context.progress.step % self.num_batches
        if place > 2 or context.progress.step < self.num_batches:
            return
        synchronize(self.work.setting)
        self._marks = [*(self._marks if place else []), perf_counter()]
        if place == 2:
            first, second, third = self._marks
            self.measure(second - first, third - second)
