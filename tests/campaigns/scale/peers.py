"""Rank 0 of a run of any size: the product's own training loop, whose peers are fake.

A `PeersBackend` is a torch backend of one process. Its collectives return what they would if every other rank
had given the same value, and count what rank 0 sends and receives in each phase.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import process_time
from typing import Any

import torch
from torch import nn

from distributed import Trainer
from distributed.interfaces.placement import World
from distributed.interfaces.plan import RunPlan
from distributed.registry.catalog import get_catalog
from distributed.training.loop import TrainingLoop
from distributed.training.torch_backend import TorchBackend

__all__ = ["RANKS_PER_HOST", "Costs", "PeersBackend", "train"]

RANKS_PER_HOST = 8
_FLOAT = 8


@dataclass
class Costs:
    """What rank 0 has spent in each phase (`phase_journal.JOURNAL_PHASES`).

    Attributes:
        calls: phase -> number of collectives.
        bytes: phase -> bytes of the vectors that it summed, and of the objects that it received.
        seconds: phase -> CPU time of the process.
        entered: phase -> how often it began.
    """

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    entered: Counter[str] = field(default_factory=Counter)
    phase: str = "setup"
    since: float = field(default_factory=process_time)

    def enter(self, phase: str, step: int | None = None, epoch: int | None = None) -> str:
        """In place of `Journal.enter`."""
        now = process_time()
        self.seconds[self.phase] += now - self.since
        before, self.phase, self.since = self.phase, phase, now
        self.entered[phase] += 1
        return before

    def add(self, num_bytes: int) -> None:
        """One collective of that many bytes, in the current phase."""
        self.calls[self.phase] += 1
        self.bytes[self.phase] += num_bytes


class PeersBackend(TorchBackend):
    """Rank 0, whose ``plan.world_size - 1`` peers do the same as it does."""

    def setup(self, plan: RunPlan) -> World:
        self.adopt(plan)
        size = plan.world_size
        self.costs = Costs()
        self.timers.enter = self.costs.enter
        self.world = World(
            size=size,
            local_size=plan.local_size,
            num_nodes=plan.num_nodes,
            data_parallel_size=size,
        )
        return self.world

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        self.costs.add(_FLOAT * len(values))
        return [value * self.world.size for value in values]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        self.costs.add(len(pickle.dumps(value)))
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        raw = pickle.dumps(value)
        self.costs.add(len(raw) * self.world.size)
        return [pickle.loads(raw) for _ in range(self.world.size)]

    def barrier(self) -> None:
        self.costs.add(_FLOAT)

    def replicated(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.module.named_parameters()}


@contextmanager
def _environment(size: int) -> Iterator[None]:
    """The variables that torchrun would set for rank 0."""
    hosts = max(1, size // RANKS_PER_HOST)
    names = {
        "RANK": 0,
        "WORLD_SIZE": size,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": size // hosts,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": hosts,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
        "TORCHELASTIC_RUN_ID": "scale",
    }
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Without warnings of stragglers: the fake peers take no time."""
    logger = logging.getLogger("distributed")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def model_of(num_layers: int) -> nn.Module:
    """A chain of small linear layers, two parameters each."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(4, 4) for _ in range(num_layers)])


def train(size: int, num_layers: int = 2, steps: int = 8, callbacks: Sequence[Any] = ()) -> Costs:
    """Train as rank 0 of `size`: two log steps, one epoch, one validation; what it has cost.

    Args:
        num_layers: of the model, which has two parameters in each.
        callbacks: the user's.
    """
    x = torch.randn(size * steps, 4, generator=torch.Generator().manual_seed(0))
    data = (x, x)
    with _environment(size):
        trainer = Trainer(
            model_of(num_layers),
            backend="pytorch-ddp",
            device="cpu",
            batch_size=1,
            loss_fn=nn.functional.mse_loss,
            log_every_n_steps=steps // 2,
            epochs=1,
            divergence_check_steps=1,
            callbacks=list(callbacks),
            tracking={"progress": "off"},
        )
        catalog, config = get_catalog(), trainer.config
        task = trainer.task_of(config, data, data)
        plan = trainer._plan(config, catalog, task)
    target = f"{__name__}:PeersBackend"
    plan = replace(plan, spec=replace(plan.spec, target=target))
    backend = catalog.load_backend(plan.spec)
    if not isinstance(backend, PeersBackend):
        raise TypeError(f"{type(backend)} from {sys.modules[__name__]}")
    backend.setup(plan)
    with _without_warnings():
        TrainingLoop(plan, task, backend, catalog).run()
    backend.costs.enter("idle")
    return backend.costs
