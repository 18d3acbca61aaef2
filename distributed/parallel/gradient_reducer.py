"""Gradients added over the ranks that hold copies of a parameter, in buckets, while backward runs.

torch's DistributedDataParallel does the same for plain parameters, and refuses DTensors (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from distributed.checkpoint.dtensor import is_sharded, local_part
from distributed.checkpoint.torch_state import canonical_name
from distributed.communication.exchange import DenseSum, Exchange, PendingExchange
from distributed.communication.wire import Wire
from distributed.errors import UserError
from distributed.interfaces.backend import CommunicationTimes
from distributed.training.flight_clock import FlightClock
from distributed.training.torch_backend import TorchBackend

__all__ = ["GradientReducer", "align_gradient", "build_reducer"]


def align_gradient(parameter: Any) -> None:
    """Give a DTensor's gradient the layout of its parameter; torch's own layers leave another (torch 2.13).
    Collective along the mesh of the parameter where it has."""
    gradient = parameter.grad
    if is_sharded(parameter) and gradient is not None and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


class GradientReducer:
    """Hooks on parameters that start the reduction of a bucket as soon as its gradients are there.

    Args:
        names: trainable parameter -> its name, for errors and codecs; the same order on all ranks.
        wire: connects the ranks that hold copies; None for a single rank.
        bucket_bytes: size of a bucket.
        find_unused: parameters may take no part in some steps. Without it a gradient that is missing is an
            error, as under DDP.
        wires: parameter -> its own wire, where that is another than `wire`.
        coded: ``(wire, names) ->`` the exchange of gradients over a wire, if they are not sent as they are.
        early: send a bucket from the hooks, and not in `finish`, after which gradients may still be scaled.

    Attributes:
        active: whether this backward is the window's last, whose gradients are final.
    """

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        wire: Wire | None,
        bucket_bytes: float,
        find_unused: bool,
        wires: Mapping[nn.Parameter, Wire | None] | None = None,
        coded: Callable[[Wire, list[str]], Exchange] | None = None,
        early: bool = True,
    ) -> None:
        self._names, self._wire, self._find_unused = dict(names), wire, find_unused
        # What no rank has a gradient of must not be exchanged: it would send what was kept of earlier steps.
        self._use_first = find_unused and coded is not None
        self._early, self._timed = early and not self._use_first, coded is None
        self._wires = {p: (wires or {}).get(p, wire) for p in self._names}
        self._buckets = _buckets(list(self._names), bucket_bytes, self._wires)
        self._bucket_of: dict[Tensor, int] = {
            p: number for number, bucket in enumerate(self._buckets) for p in bucket
        }
        self._missing = [len(bucket) for bucket in self._buckets]
        members: dict[Wire | None, list[str]] = {wire: []}
        for parameter, own in self._wires.items():
            members.setdefault(own, []).append(self._names[parameter])
        self._exchanges: dict[Wire, Exchange] = {
            own: DenseSum(own) if coded is None else coded(own, found)
            for own, found in members.items()
            if own is not None
        }
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
        wire = self._wires[bucket[0]]
        gradients = {self._names[p]: local_part(p.grad) for p in bucket if not used or used[p]}
        if wire is None or not gradients:
            self._sent.append(None)
            return
        pending = self._exchanges[wire].begin(gradients)
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
        if self._wire is not None:
            used = self._exchanges[self._wire].add(used)
        return dict(zip(self._names, used.tolist(), strict=True))


def build_reducer(
    backend: TorchBackend,
    parameters: Iterable[tuple[str, nn.Parameter]],
    wire: Wire | None,
    find_unused: bool,
    wires: Mapping[nn.Parameter, Wire | None] | None = None,
) -> GradientReducer:
    """The reducer of a backend's gradients, with the codec of its run.

    Args:
        parameters: by name, in the same order on all ranks; those that are trained and have values on this
            rank are reduced.
        wire, find_unused, wires: as of `GradientReducer`.
    """
    codec = backend.compression
    return GradientReducer(
        {p: canonical_name(name) for name, p in parameters if p.requires_grad and not p.is_meta},
        wire,
        backend.config.bucket_cap_mb * 2**20,
        find_unused,
        wires,
        coded=None if codec is None else codec.over,
        # With a codec, gradients are scaled by the true count before they are sent: see `count_first`.
        early=codec is None or not backend.objective.counted,
    )


def _buckets(
    parameters: list[nn.Parameter], limit: float, wires: Mapping[nn.Parameter, Wire | None]
) -> list[list[nn.Parameter]]:
    """Parameters in the order in which backward reaches them, as far as known: from the last to the first.
    Those of a bucket have one dtype and one wire."""
    buckets: list[list[nn.Parameter]] = []
    size = 0.0
    for parameter in reversed(parameters):
        nbytes = local_part(parameter).nbytes
        last = buckets[-1][0] if buckets else parameter
        fits = last.dtype == parameter.dtype and wires[last] is wires[parameter]
        if not buckets or size + nbytes > limit or not fits:
            buckets.append([])
            size = 0.0
        buckets[-1].append(parameter)
        size += nbytes
    return buckets
