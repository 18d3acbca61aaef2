"""AsynchronousMerging: one rank's side of asynchronous SGD with bounded staleness.

The first rank holds a `ParameterServer` beside its own worker. Before a step, a worker reads the parameters.
It takes the step with its own optimizer. The server subtracts the change from the parameters as they are
then: other workers may have updated them meanwhile.

    θ_{t+1} = θ_t - (θ_{t-s} - θ')        s: the staleness; θ': after a step from θ_{t-s}

With plain SGD this is θ_{t+1} = θ_t - η ∇L_m(θ_{t-s}): Downpour SGD (Dean et al. 2012, "Large scale
distributed deep networks") with the bound of Ho et al. 2013.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from distributed.communication.broadcast import broadcast_values
from distributed.communication.exchange import DenseSum
from distributed.communication.wire import Wire
from distributed.system.tensors import assign_values
from distributed.training.low_communication.arrivals import ArrivalRecord
from distributed.training.low_communication.channels import (
    GroupServerEnd,
    GroupWorkerEnd,
    Packed,
    QueueChannel,
)
from distributed.training.low_communication.merging import AddNumbers, Merging
from distributed.training.low_communication.outer_step import OuterRule, wide
from distributed.training.low_communication.parameter_server import ParameterServer, ServerEnd

__all__ = ["AsynchronousMerging"]

_SERVER = 0


class AsynchronousMerging(Merging):
    """Workers that read parameters from a server and send updates to it.

    The server runs from the first step after all ranks had the same parameters to where they have them again:
    when all updates are applied, for a checkpoint or the end of an epoch.

    Args:
        limit: largest staleness of an update.
        timeout: seconds for which a worker waits for parameters.
        arrivals: on the first rank, where its updates are counted.
    """

    server_class = ParameterServer

    def __init__(
        self,
        limit: int,
        timeout: float,
        arrivals: ArrivalRecord | None,
        parameters: Mapping[str, Tensor],
        buffers: Iterable[Tensor],
        total: AddNumbers,
        wire: Wire | None,
    ) -> None:
        super().__init__(OuterRule(period=1), parameters, buffers, total, DenseSum(wire), wire)
        self._limit, self._timeout, self._arrivals = limit, timedelta(seconds=timeout), arrivals
        self._values, self._deltas = self._packed()
        self._server: ParameterServer | None = None
        self._channel: QueueChannel | GroupWorkerEnd | None = None
        self._master: dict[str, Tensor] = {}
        self._has_read = False

    @torch.no_grad()
    def before_step(self, has_samples: bool) -> None:
        if self._wire is None:
            return
        if self._channel is None:
            self._channel = self._connect(self._wire)
        if has_samples:
            self._channel.read(self.step + 1)
            for name, value in self._values.tensors.items():
                self.parameters[name].copy_(value)
            self._has_read = True

    @torch.no_grad()
    def after_step(self, count: Any) -> None:
        self.step += 1
        self.weight = self.weight + count
        if self._channel is None or not self._has_read:
            return
        self._has_read = False
        for name, delta in self._deltas.tensors.items():
            own = self.parameters[name].detach().to("cpu", delta.dtype)
            torch.sub(self._values.tensors[name].to(delta.dtype), own, out=delta)
        self._channel.update(self.step)

    @torch.no_grad()
    def settle(self) -> None:
        """Make the server's parameters, with all updates so far, those that all ranks know. Collective. What
        a rank computes next does not depend on it: it reads the parameters before its next step anyway."""
        if self._wire is None:
            self._take_anchors(self.parameters)
        elif self._channel is not None:
            self.close()
            self._take_anchors(self._master)
            broadcast_values(self.anchors.values(), source=_SERVER)

    def close(self) -> None:
        """End the server, when all updates are applied. To be called on all ranks."""
        if self._channel is not None:
            self._channel.end()
        if self._server is not None:
            self._server.finish()
        if self._arrivals is not None:
            self._arrivals.flush()
        self._server = self._channel = None

    def _take_anchors(self, source: Mapping[str, Tensor]) -> None:
        for name, value in source.items():
            self.anchors[name].copy_(value)

    @torch.no_grad()
    def merge(self) -> None:
        """Give all ranks the parameters with all updates so far. Collective."""
        self.settle()
        for name, anchor in self.anchors.items():
            assign_values(self.parameters[name], anchor)
        if self.step:
            self._begin_period()

    def take_metrics(self) -> dict[str, float]:
        """Number of ``updates``, and their staleness, on the first rank."""
        return {} if self._arrivals is None else self._arrivals.take()

    def _packed(self) -> tuple[Packed, Packed]:
        """Buffers for parameters and for their changes."""
        shapes = {name: (p.shape, p.dtype) for name, p in self.parameters.items()}
        return Packed(shapes), Packed({name: (s, wide(dtype)) for name, (s, dtype) in shapes.items()})

    def _connect(self, wire: Wire) -> QueueChannel | GroupWorkerEnd:
        if wire.rank != _SERVER:
            return GroupWorkerEnd(self._values, self._deltas, self._timeout)
        own = QueueChannel(self._values, self._deltas)
        ends: dict[int, ServerEnd] = {_SERVER: own}
        for rank in range(wire.size):
            if rank != _SERVER:
                ends[rank] = GroupServerEnd(*self._packed(), rank)
        assert self._arrivals is not None
        self._master = {name: anchor.to("cpu", copy=True) for name, anchor in self.anchors.items()}
        self._server = self.server_class(self._master, ends, self._limit, self._arrivals)
        return own
