"""Local SGD, DiLoCo and streaming DiLoCo of n workers in one process: nothing but PyTorch, step by step.

Papers: local SGD, Stich 2019 (arXiv 1805.09767); DiLoCo, Douillard et al. 2023 (arXiv 2311.08105),
algorithm 1; streaming DiLoCo, Douillard et al. 2025 (arXiv 2501.18512), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distributed.testing.oracle import sample_order

__all__ = ["Oracle"]


@dataclass
class _Sent:
    """A part of the model that is on its way: when it was sent, and what arrives."""

    step: int
    delta: list[Tensor]


class Oracle:
    """`ranks` workers that each step on the mean over their own slice of a global batch.

    Attributes:
        shared: the parameters that all workers know.
        velocity: the outer momentum.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        optimizer: Callable[..., torch.optim.Optimizer],
        ranks: int,
        *,
        period: int,
        rate: float = 1.0,
        momentum: float = 0.0,
        nesterov: bool = False,
        parts: Sequence[Sequence[int]] | None = None,
        overlap: int = 0,
        mixing: float = 0.0,
        loss_fn: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
        count: Callable[[Tensor], int] = len,
        max_norm: float | None = None,
    ) -> None:
        self.workers = [build() for _ in range(ranks)]
        self.inner = [optimizer(worker.parameters()) for worker in self.workers]
        self.shared = [p.detach().clone() for p in self.workers[0].parameters()]
        self.velocity = [torch.zeros_like(p) for p in self.shared]
        self.parts = parts or [range(len(self.shared))]
        self.consumed = [[0] * ranks for _ in self.parts]  # samples since the part was last sent
        self.since_merge = [0] * ranks
        self.sent: dict[int, _Sent] = {}
        self.step = 0  # since all of the model was last equal on all workers
        self.apart = [False] * len(self.parts)
        self.period, self.rate, self.momentum, self.nesterov = period, rate, momentum, nesterov
        self.overlap, self.mixing, self.loss_fn, self.count = overlap, mixing, loss_fn, count
        self.max_norm = max_norm

    def train(self, x: Tensor, y: Tensor, global_batch: int, epochs: int, shuffle: bool = True) -> None:
        """Epochs of global batches; all workers are equal at the end of each."""
        for epoch in range(epochs):
            order = sample_order(len(x), 0, epoch, shuffle)
            for batch in order.split(global_batch):
                self.take_step(x, y, batch)
            self.merge()

    def take_step(self, x: Tensor, y: Tensor, batch: Tensor) -> None:
        """An inner step of each worker; then send the part that is due, and take in what has arrived."""
        for rank, own in enumerate(batch.tensor_split(len(self.workers))):
            if len(own):
                self._inner_step(rank, x[own], y[own])
        self.step += 1
        self.apart = [True] * len(self.parts)
        for part in range(len(self.parts)):
            first = self.period * (part + 1) // len(self.parts)
            if self.step >= first and (self.step - first) % self.period == 0:
                self._send(part)
            if part in self.sent and self.step == self.sent[part].step + self.overlap:
                self._take_in(part, self.mixing)

    def merge(self) -> None:
        """Make all workers equal."""
        if not any(self.apart):
            return
        for part in list(self.sent):
            self._take_in(part, self.mixing)
        for part, apart in enumerate(self.apart):
            if apart:
                self._send(part)
                self._take_in(part, 0.0)
        self._merge_buffers()
        self.step = 0
        self.consumed = [[0] * len(self.workers) for _ in self.parts]

    def begin_after(self, saved: Oracle) -> None:
        """Begin with what `saved`, equal workers of another number, have: parameters and outer momentum, and
        the mean of their inner momenta."""
        self.shared = [p.clone() for p in saved.shared]
        self.velocity = [v.clone() for v in saved.velocity]
        for worker, optimizer in zip(self.workers, self.inner, strict=True):
            for i, own in enumerate(_parameters(worker)):
                own.copy_(self.shared[i])
            for i, p in enumerate(worker.parameters()):
                found = [o.state[w] for o, w in saved.states_of(i)]
                optimizer.state[p]["momentum_buffer"] = sum(s["momentum_buffer"] for s in found) / len(found)

    def states_of(self, i: int) -> list[tuple[torch.optim.Optimizer, nn.Parameter]]:
        """Each worker's inner optimizer and parameter i."""
        parameters = [list(worker.parameters())[i] for worker in self.workers]
        return list(zip(self.inner, parameters, strict=True))

    def _inner_step(self, rank: int, x: Tensor, y: Tensor) -> None:
        worker, optimizer = self.workers[rank], self.inner[rank]
        optimizer.zero_grad()
        self.loss_fn(worker(x), y).backward()
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(worker.parameters(), self.max_norm)
        optimizer.step()
        for consumed in [*self.consumed, self.since_merge]:
            consumed[rank] += self.count(y)

    def _send(self, part: int) -> None:
        weights = _shares(self.consumed[part])
        delta = []
        for i in self.parts[part]:
            own = [self.shared[i] - _parameters(worker)[i] for worker in self.workers]
            delta.append(self._added_up(i, [w * change for w, change in zip(weights, own, strict=True)]))
        self.sent[part] = _Sent(self.step, delta)
        self.consumed[part] = [0] * len(self.workers)

    def _added_up(self, i: int, changes: Sequence[Tensor]) -> Tensor:
        """The sum of the workers' weighted changes of parameter `i`, as it arrives at all of them."""
        return sum(changes[1:], start=changes[0])

    def _take_in(self, part: int, mixing: float) -> None:
        """The outer step; each worker keeps `mixing` of its own parameters."""
        for i, delta in zip(self.parts[part], self.sent.pop(part).delta, strict=True):
            self.velocity[i] = self.momentum * self.velocity[i] + delta
            outward = delta + self.momentum * self.velocity[i] if self.nesterov else self.velocity[i]
            self.shared[i] = self.shared[i] - self.rate * outward
            for worker in self.workers:
                own = _parameters(worker)[i]
                own.copy_(mixing * own + (1 - mixing) * self.shared[i])
        if mixing == 0:
            self.apart[part] = False
            if not any(self.apart) and len(self.parts) == 1 and self.overlap == 0:
                self._merge_buffers()
                self.step = 0

    def _merge_buffers(self) -> None:
        weights = _shares(self.since_merge)
        for buffers in zip(*(worker.buffers() for worker in self.workers), strict=True):
            if buffers[0].is_floating_point():
                mean = sum(w * b for w, b in zip(weights, buffers, strict=True))
            else:
                mean = buffers[0].clone()
            for buffer in buffers:
                buffer.copy_(mean)
        self.since_merge = [0] * len(self.workers)


def _parameters(worker: nn.Module) -> list[Tensor]:
    return [p.detach() for p in worker.parameters()]


def _shares(consumed: list[int]) -> list[float]:
    """What each worker contributes: its share of the samples; equal shares if there was none."""
    total = sum(consumed)
    return [c / total if total else 1 / len(consumed) for c in consumed]
