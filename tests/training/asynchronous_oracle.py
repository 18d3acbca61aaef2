"""Asynchronous SGD of n workers in one process, update by update in a given order: nothing but PyTorch.

Papers: Dean et al. 2012, "Large scale distributed deep networks" (Downpour SGD); Ho et al. 2013, "More
effective distributed ML via a stale synchronous parallel parameter server".
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from distributed.testing.oracle import sample_order

__all__ = ["read_log", "replay"]


def read_log(path: Path) -> list[dict[str, int]]:
    """Updates in the order in which they were applied: of which worker, in which step, and how stale."""
    with path.open(encoding="utf-8") as file:
        return [{name: int(value) for name, value in row.items()} for row in csv.DictReader(file)]


def replay(
    log: list[dict[str, int]],
    build: Callable[[], nn.Module],
    optimizer: Callable[..., torch.optim.Optimizer],
    ranks: int,
    x: Tensor,
    y: Tensor,
    global_batch: int,
    *,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
    max_norm: float | None = None,
) -> nn.Module:
    """The model after all updates of a log. Each worker has a slice of each global batch, and an optimizer of
    its own."""
    workers = [build() for _ in range(ranks)]
    optimizers = [optimizer(worker.parameters()) for worker in workers]
    shared = [p.detach().clone() for p in workers[0].parameters()]
    versions = [shared]  # the parameters after 0, 1, 2, ... updates
    epochs, last_steps = [0] * ranks, [0] * ranks
    for number, row in enumerate(log):
        rank, step = row["worker"], row["step"]
        epochs[rank] += step <= last_steps[rank]  # steps are counted within an epoch
        last_steps[rank] = step
        batch = sample_order(len(x), 0, epochs[rank]).split(global_batch)[step - 1]
        own = batch.tensor_split(ranks)[rank]
        worker, read = workers[rank], versions[number - row["staleness"]]
        _set(worker, read)
        optimizers[rank].zero_grad()
        loss_fn(worker(x[own]), y[own]).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(worker.parameters(), max_norm)
        optimizers[rank].step()
        changes = [p.detach() - before for p, before in zip(worker.parameters(), read, strict=True)]
        shared = [p + change for p, change in zip(shared, changes, strict=True)]
        versions.append(shared)
    _set(workers[0], shared)
    return workers[0]


@torch.no_grad()
def _set(model: nn.Module, values: list[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)
