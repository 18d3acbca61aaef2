"""Gradients added over the ranks that hold copies of a parameter, in buckets, while backward runs.

torch's DistributedDataParallel does the same for plain parameters, and refuses DTensors (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from distributed.checkpoint.dtensor import is_sharded, local_part
from distributed.errors import UserError
from distributed.interfaces.backend import CommunicationTimes
from distributed.training.flight_clock import FlightClock

__all__ = ["Exchange", "GradientReducer", "PendingExchange", "align_gradient"]


class PendingExchange(Protocol):
    """Gradients on their way.

    Attributes:
        is_completed: whether they have arrived; None if that is not known.
    """

    is_completed: Callable[[], bool] | None

    def finish(self) -> None:
        """Wait, and leave the sums in the gradients. Collective."""


class Exchange(Protocol):
    """How the ranks of a group add up gradients."""

    def begin(self, gradients: Mapping[str, Tensor]) -> PendingExchange:
        """Start to add up gradients of one dtype, by name, in the same order on all ranks. Collective."""

    def add(self, values: Tensor) -> Tensor:
        """Add up a small tensor as it is, which may be overwritten. Collective."""


class _PendingDense:
    def __init__(self, work: Any, flat: Tensor, gradients: list[Tensor]) -> None:
        self._work, self._flat, self._gradients = work, flat, gradients
        self.is_completed: Callable[[], bool] | None = None if flat.is_cuda else work.is_completed

    def finish(self) -> None:
        self._work.wait()
        torch._foreach_copy_(self._gradients, list(_unflatten_dense_tensors(self._flat, self._gradients)))


class _DenseExchange:
    """All-reduces gradients as they are."""

    def __init__(self, group: Any, names: list[str]) -> None:
        self._group = group

    def begin(self, gradients: Mapping[str, Tensor]) -> PendingExchange:
        parts = list(gradients.values())
        flat = _flatten_dense_tensors(parts)
        return _PendingDense(dist.all_reduce(flat, group=self._group, async_op=True), flat, parts)

    def add(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self._group)
        return values


def align_gradient(parameter: Any) -> None:
    """Give a DTensor's gradient the layout of its parameter; torch's own layers leave another (torch 2.13).
    Collective along the mesh of the parameter where it has."""
    gradient = parameter.grad
    if is_sharded(parameter) and gradient is not None and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


class GradientReducer:
    """Hooks on parameters that start the reduction of a bucket as soon as its gradients are there.

    Args:
        names: trainable parameter -> its name in errors; the same order on all ranks.
        group: process group of the ranks that hold copies; None for a single one.
        bucket_bytes: size of a bucket.
        find_unused: parameters may take no part in some steps. Without it a gradient that is missing is an
            error, as under DDP.
        groups: parameter -> its own group, where that is another than `group`.
        coded: ``(group, names) ->`` the exchange of gradients in a group, if they are not sent as they are.
        early: send a bucket from the hooks, and not in `finish`, after which gradients may still be scaled.

    Attributes:
        active: whether this backward is the window's last, whose gradients are final.
    """

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        group: Any,
        bucket_bytes: float,
        find_unused: bool,
        groups: Mapping[nn.Parameter, Any] | None = None,
        coded: Callable[[Any, list[str]], Exchange] | None = None,
        early: bool = True,
    ) -> None:
        self._names, self._group, self._find_unused = dict(names), group, find_unused
        # What no rank has a gradient of must not be exchanged: it would send what was kept of earlier steps.
        self._use_first = find_unused and coded is not None
        self._early, self._timed = early and not self._use_first, coded is None
        self._groups = {p: (groups or {}).get(p, group) for p in self._names}
        self._buckets = _buckets(list(self._names), bucket_bytes, self._groups)
        self._bucket_of: dict[Tensor, int] = {
            p: number for number, bucket in enumerate(self._buckets) for p in bucket
        }
        self._missing = [len(bucket) for bucket in self._buckets]
        make = coded or _DenseExchange
        members: dict[Any, list[str]] = {group: []}
        for parameter, own in self._groups.items():
            members.setdefault(own, []).append(self._names[parameter])
        self._exchanges = {own: make(own, found) for own, found in members.items() if own is not None}
        self._sent: list[PendingExchange | None] = []
        self.active = False
        self._waited, self._steps, self._flights = 0.0, 0, FlightClock()
        self._hooks = [p.register_post_accumulate_grad_hook(self._ready) for p in self._names]

    def remove(self) -> None:
        """Take the hooks off the model again."""
        while self._hooks:
            self._hooks.pop().remove()

    def times_per_step(self) -> CommunicationTimes | None:
        """Means since the last call: seconds in `finish`, and seconds in which a bucket was under way, which
        is not known of a codec. None on GPUs, whose work the host does not see, and without a step."""
        seconds, self._waited = self._waited, 0.0
        steps, self._steps = self._steps, 0
        flown = self._flights.take()
        if not steps or any(parameter.is_cuda for parameter in self._names):
            return None
        return CommunicationTimes(seconds / steps, flown / steps if self._timed else None)

    def finish(self) -> None:
        """Send what no hook has sent, wait for all, and leave the sums in ``.grad``. Collective.

        Raises:
            UserError: a gradient is missing.
        """
        self.active, start = False, perf_counter()
        self._flights.look()
        for parameter in self._names:
            align_gradient(parameter)
        present = self._fill_missing()
        used = self._share_use(present) if self._use_first else None
        while len(self._sent) < len(self._buckets):
            self._send(used)
        # After the buckets, of which each rank may have sent another number from its hooks.
        used = self._share_use(present) if used is None else used
        for pending in self._sent:
            if pending is not None:
                pending.finish()
        self._flights.end()
        self._sent, self._missing = [], [len(bucket) for bucket in self._buckets]
        for parameter, count in used.items():
            if not count:
                parameter.grad = None  # no rank has used it, and an optimizer would decay it
        self._waited, self._steps = self._waited + perf_counter() - start, self._steps + 1

    def _ready(self, parameter: Tensor) -> None:
        if not self.active or not self._early:
            return
        self._flights.look()
        align_gradient(parameter)
        self._missing[self._bucket_of[parameter]] -= 1
        # In the same order on all ranks, in whatever order backward makes the gradients.
        while len(self._sent) < len(self._buckets) and self._missing[len(self._sent)] == 0:
            self._send(None)

    def _send(self, used: Mapping[nn.Parameter, float] | None) -> None:
        """Send the next bucket, without the parameters that no rank has used."""
        bucket = self._buckets[len(self._sent)]
        group = self._groups[bucket[0]]
        gradients = {self._names[p]: local_part(p.grad) for p in bucket if not used or used[p]}
        if group is None or not gradients:
            self._sent.append(None)
            return
        pending = self._exchanges[group].begin(gradients)
        if pending.is_completed is not None:
            self._flights.launch(pending.is_completed)
        self._sent.append(pending)

    def _fill_missing(self) -> list[float]:
        """1.0 for each parameter that has a gradient, 0.0 for the others, whose gradient becomes zero."""
        missing = [p for p in self._names if p.grad is None]
        if missing and not self._find_unused:
            raise UserError(
                f"the loss of a step did not depend on all trainable parameters, such as"
                f" '{self._names[missing[0]]}', and the ranks wait for the gradients of all",
                field="find_unused_parameters",
                got=False,
                allowed="true, if some steps leave parameters out",
                remedy="Set find_unused_parameters=true, or freeze the unused parameters with"
                " requires_grad_(False)",
            )
        present = [float(p.grad is not None) for p in self._names]
        for parameter in missing:
            parameter.grad = torch.zeros_like(parameter)
        return present

    def _share_use(self, present: list[float]) -> dict[nn.Parameter, float]:
        """How many ranks have each gradient; empty if all have all."""
        if not self._find_unused:
            return {}
        used = torch.tensor(present)
        if self._group is not None:
            used = self._exchanges[self._group].add(used)
        return dict(zip(self._names, used.tolist(), strict=True))


def _buckets(
    parameters: list[nn.Parameter], limit: float, groups: Mapping[nn.Parameter, Any]
) -> list[list[nn.Parameter]]:
    """Parameters in the order in which backward reaches them, as far as known: from the last to the first.
    Those of a bucket have one dtype and one group."""
    buckets: list[list[nn.Parameter]] = []
    size = 0.0
    for parameter in reversed(parameters):
        nbytes = local_part(parameter).nbytes
        last = buckets[-1][0] if buckets else parameter
        fits = last.dtype == parameter.dtype and groups[last] is groups[parameter]
        if not buckets or size + nbytes > limit or not fits:
            buckets.append([])
            size = 0.0
        buckets[-1].append(parameter)
        size += nbytes
    return buckets
