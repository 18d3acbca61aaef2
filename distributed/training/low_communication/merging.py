"""Merging: the exchanges of local SGD, DiLoCo and streaming DiLoCo, and the state between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distributed.communication.broadcast import broadcast_values
from distributed.communication.exchange import DenseSum, PendingExchange
from distributed.communication.wire import Wire
from distributed.system.tensors import assign_values
from distributed.training.low_communication.outer_step import (
    OuterRule,
    divide,
    is_due,
    share_of,
    take_outer_step,
    wide,
)
from distributed.training.low_communication.sums import NamedSum

__all__ = ["AddNumbers", "Fragment", "Merging"]

AddNumbers = Callable[[Sequence[float]], list[float]]
"""Adds up numbers, element by element, over the ranks. Collective."""


class Fragment:
    """Parameters that are exchanged at once.

    Attributes:
        names: names of the parameters.
        weight: samples, or unmasked tokens, that this rank has consumed since the last exchange began;
            possibly on the device.
        apart: whether the parameters may differ between ranks.
        begun: step at which the exchange under way began; None if none is.
        deltas: tensors of the exchange under way, by name: anchors less parameters, times this rank's share.
        pending: the exchange under way; None once its sums are in `deltas`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.weight: Any = 0.0
        self.apart = False
        self.begun: int | None = None
        self.deltas: dict[str, Tensor] = {}
        self.pending: PendingExchange | None = None

    def wait(self) -> None:
        """Wait until the deltas are those of all ranks. Collective."""
        if self.pending is not None:
            self.pending.finish()
            self.pending = None


class Merging:
    """One rank's side of local SGD, DiLoCo or streaming DiLoCo.

    Args:
        rule: hyperparameters of the algorithm.
        parameters: trained parameters by name, equal on all ranks.
        buffers: buffers of the model, equal on all ranks.
        total: adds up numbers over the ranks.
        summed: adds up differences of parameters over the ranks.
        wire: connects this rank to the others; None for a single rank.

    Attributes:
        anchors: parameters after the last outer step, by name, equal on all ranks.
        velocities: momentum buffers of the outer optimizer, by name, equal on all ranks; empty without
            momentum.
        step: number of optimizer steps since all ranks had the same weights.
        weight: samples, or unmasked tokens, that this rank has consumed since then.
        outer_steps: number of outer steps of fragments since the last `take_metrics`.
        sent_bytes: bytes that this rank has sent in exchanges since the last `take_metrics`.
    """

    def __init__(
        self,
        rule: OuterRule,
        parameters: Mapping[str, Tensor],
        buffers: Iterable[Tensor],
        total: AddNumbers,
        summed: NamedSum,
        wire: Wire | None,
    ) -> None:
        self.rule, self.parameters, self.buffers = rule, dict(parameters), list(buffers)
        self._total, self._summed, self._wire = total, summed, wire
        sizes = {name: p.numel() for name, p in parameters.items()}
        self.fragments = [Fragment(names) for names in divide(sizes, rule.fragments)]
        self.anchors = {name: p.detach().clone() for name, p in parameters.items()}
        self.velocities: dict[str, Tensor] = {}
        if rule.momentum:
            self.velocities = {
                name: torch.zeros_like(p, dtype=wide(p.dtype), requires_grad=False)
                for name, p in parameters.items()
            }
        self.step = 0
        self.weight: Any = 0.0
        self.outer_steps, self.sent_bytes = 0, 0.0

    def before_step(self, has_samples: bool) -> None:
        """Prepare the parameters for an optimizer step.

        Args:
            has_samples: whether this rank has samples in the step.
        """

    def after_step(self, count: Any) -> None:
        """Begin and end the exchanges that are due after an optimizer step. Collective where one is.

        Args:
            count: samples, or unmasked tokens, of this rank in the step.
        """
        self.step += 1
        self.weight = self.weight + count
        for fragment in self.fragments:
            fragment.weight, fragment.apart = fragment.weight + count, True
        self._begin([f for i, f in enumerate(self.fragments) if is_due(self.step, i, self.rule)])
        for fragment in self.fragments:
            if fragment.begun is not None and self.step >= fragment.begun + self.rule.overlap:
                self._end(fragment, self.rule.mixing)
        if self.rule.merges_all and not self.fragments[0].apart:
            self._begin_period()

    def merge(self) -> None:
        """Give all ranks the same weights: end the exchanges under way, then take one more outer step with
        the fragments that differ between ranks, whose parameters become the anchors. Collective. Does nothing
        without an optimizer step since all ranks had the same weights."""
        if not any(fragment.apart for fragment in self.fragments):
            return
        for fragment in self.fragments:
            if fragment.begun is not None:
                self._end(fragment, self.rule.mixing)
        apart = [fragment for fragment in self.fragments if fragment.apart]
        self._begin(apart)
        for fragment in apart:
            self._end(fragment, 0.0)
        self._begin_period()

    def settle(self) -> None:
        """Bring the anchors, which a checkpoint holds as the model, up to date. Collective."""

    def close(self) -> None:
        """End threads and connections. Collective."""

    def restart(self) -> None:
        """Begin a period with parameters that are equal on all ranks, and take them as anchors."""
        with torch.no_grad():
            for name, anchor in self.anchors.items():
                anchor.copy_(self.parameters[name])
        self._reset()

    def take_metrics(self) -> dict[str, float]:
        """``outer_steps``, of fragments, and ``outer_bytes_sent``, by this rank, since the last call."""
        found = {"outer_steps": float(self.outer_steps), "outer_bytes_sent": self.sent_bytes}
        self.outer_steps, self.sent_bytes = 0, 0.0
        return found

    @torch.no_grad()
    def _begin(self, fragments: Sequence[Fragment]) -> None:
        if not fragments:
            return
        shares = self._shares([fragment.weight for fragment in fragments])
        for fragment, share in zip(fragments, shares, strict=True):
            fragment.deltas = {name: self._delta(name).mul_(share) for name in fragment.names}
            self.sent_bytes += self._summed.sent_bytes(fragment.deltas)
            fragment.pending = self._summed.begin(fragment.deltas)
            fragment.begun, fragment.weight = self.step, 0.0

    def _delta(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        dtype = wide(parameter.dtype)
        return self.anchors[name].to(dtype) - parameter.detach().to(dtype)

    def _shares(self, weights: Sequence[Any]) -> list[float]:
        """This rank's shares in what all ranks have consumed. Collective.

        Args:
            weights: what this rank has consumed of each fragment.
        """
        own = [float(weight) for weight in weights]
        *totals, ranks = self._total([*own, 1.0])
        return [share_of(w, total, round(ranks)) for w, total in zip(own, totals, strict=True)]

    @torch.no_grad()
    def _end(self, fragment: Fragment, mixing: float) -> None:
        fragment.wait()
        for name, delta in fragment.deltas.items():
            anchor, parameter = self.anchors[name], self.parameters[name]
            take_outer_step(anchor, delta, self.velocities.get(name), self.rule)
            if mixing:
                parameter.mul_(mixing).add_(anchor, alpha=1.0 - mixing)
            else:
                parameter.copy_(anchor)
        fragment.begun, fragment.deltas, fragment.apart = None, {}, mixing != 0.0
        self.outer_steps += 1

    def _begin_period(self) -> None:
        """Begin a period when all parameters are equal on all ranks. Collective."""
        self._merge_buffers()
        self._reset()

    def _reset(self) -> None:
        self.step, self.weight = 0, 0.0
        for fragment in self.fragments:
            fragment.weight, fragment.apart, fragment.begun, fragment.deltas = 0.0, False, None, {}

    @torch.no_grad()
    def _merge_buffers(self) -> None:
        """Average floating-point buffers, such as BatchNorm statistics, over the ranks; all ranks take rank
        0's values of the others. Collective."""
        if self._wire is None or not self.buffers:
            return
        exact = DenseSum(self._wire)
        (share,) = self._shares([self.weight])
        floating = {str(i): b for i, b in enumerate(self.buffers) if b.is_floating_point()}
        sums = {key: b.to(wide(b.dtype), copy=True).mul_(share) for key, b in floating.items()}
        self.sent_bytes += exact.sent_bytes(sums)
        exact.begin(sums).finish()
        for key, buffer in floating.items():
            assign_values(buffer, sums[key])
        broadcast_values(b for b in self.buffers if not b.is_floating_point())
