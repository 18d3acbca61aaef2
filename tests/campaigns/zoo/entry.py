"""What a row of the zoo trains, and how far a backend is from plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from distributed import Trainer
from distributed.errors import UserError
from distributed.interfaces.launcher import Launcher
from tests.campaigns.backends import BACKENDS

__all__ = ["BATCH", "STEPS", "Entry", "Result", "compare"]

STEPS, BATCH, RATE = 4, 2, 0.1
"""Optimizer steps, samples of a rank's batch, learning rate."""


def _own_loss(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    return model(**batch).loss


@dataclass(frozen=True)
class Entry:
    """A model with its data.

    Attributes:
        library: the distribution that the model comes from.
        build: the model, the same weights every time. Its dropout is 0.
        samples: as many samples as `STEPS` global batches need, or more.
        collate: a list of samples -> a batch.
        loss: the loss of a whole global batch, as plain PyTorch has it: a mean over what counts.
        given: arguments of `Trainer` that the model needs, such as a loss function.
        lines: lines of the user's code for `given`.
        accuracy: distance up to which a result is exact.
        loader: of the samples, in this order; None is torch's DataLoader over a list of them.
    """

    library: str
    build: Callable[[], nn.Module]
    samples: Callable[[], list[Any]]
    collate: Callable[[list[Any]], Any] = default_collate
    loss: Callable[[nn.Module, Any], Tensor] = _own_loss
    given: Mapping[str, Any] = field(default_factory=dict)
    lines: int = 0
    accuracy: float = 1e-5
    loader: Callable[[], Any] | None = None

    def model(self) -> nn.Module:
        """The model under one seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build()


@dataclass(frozen=True)
class Result:
    """Of one entry under one backend.

    Attributes:
        distance: largest difference of a parameter or buffer from plain PyTorch's; None if refused.
        moved: largest difference that training has made.
        refused: the error's text; None if trained.
    """

    distance: float | None
    moved: float
    refused: str | None = None

    def passes(self, entry: Entry) -> bool:
        """Whether the entry was trained exactly, and so that a difference would show, or refused."""
        if self.distance is None:
            return True
        return self.distance <= entry.accuracy and self.moved > 100 * entry.accuracy


def compare(entry: Entry, name: str, launcher: Launcher | None = None) -> Result:
    """Train by a backend of `BACKENDS` and by plain PyTorch, over the same global batches."""
    backend, ranks, options = BACKENDS[name]
    model = entry.model()
    before = _tensors(model)
    trainer = Trainer(
        model, backend=backend, num_processes=ranks, device="cpu", tracking={"progress": "off"},
        optimizer="sgd", learning_rate=RATE, max_steps=STEPS, data={"shuffle": False},
        **{**entry.given, **options},
    )  # fmt: skip
    trainer.launcher = launcher if ranks > 1 else None
    samples = entry.samples()
    try:
        given = DataLoader(samples, batch_size=BATCH, collate_fn=entry.collate)
        trainer.fit(entry.loader() if entry.loader else given)
    except UserError as refusal:
        if not refusal.remedy:
            raise
        return Result(None, 0.0, str(refusal))
    plain = _train_plainly(entry, samples, BATCH * ranks)
    return Result(_distance(_tensors(model), _tensors(plain)), _distance(before, _tensors(plain)))


def _train_plainly(entry: Entry, samples: list[Any], size: int) -> nn.Module:
    model = entry.model()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    starts = range(0, len(samples), size)
    for step in range(STEPS):
        start = starts[step % len(starts)]
        optimizer.zero_grad()
        entry.loss(model, entry.collate(samples[start : start + size])).backward()
        optimizer.step()
    return model


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().double().clone() for name, tensor in named}


def _distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a if a[name].numel())
