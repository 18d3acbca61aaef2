"""Gradients summed over all ranks by Horovod, each as soon as backward has made it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from time import perf_counter
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from distributed.errors import UserError
from distributed.interfaces.backend import CommunicationTimes
from distributed.training.flight_clock import FlightClock
from distributed_backends.horovod.collectives import wait


class GradientSum:
    """Hooks on parameters that hand their gradient to Horovod while backward continues.

    Horovod's own optimizer wrapper is not used: it builds another optimizer object, which a
    user's scheduler would not drive, and averages.

    Args:
        names: parameter -> its name in errors; the same order on every rank.
        find_unused: parameters may take no part in some steps. Without it a gradient that is
            missing is an error, as under DDP.

    Attributes:
        active: whether this backward is the window's last, whose gradients are final.
    """

    def __init__(
        self,
        names: Mapping[Tensor, str],
        *,
        find_unused: bool = False,
    ) -> None:
        self._names = dict(names)
        self._keys = {parameter: f"gradient.{i}" for i, parameter in enumerate(self._names)}
        self._find_unused = find_unused
        self._sent: dict[Tensor, tuple[int, Tensor]] = {}
        self.active, self._flights = False, FlightClock()
        self._waited, self._steps = 0.0, 0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._ready)
            for parameter in self._names
            if parameter.requires_grad
        ]

    def remove(self) -> None:
        """Take the hooks off the model again."""
        while self._hooks:
            self._hooks.pop().remove()

    def finish(self) -> None:
        """Send what no hook has sent, wait for all, and leave the sums in ``.grad``. Collective.

        Raises:
            UserError: a gradient is missing, or is of a kind that Horovod cannot send.
        """
        self.active, start = False, perf_counter()
        self._flights.look()
        trained = [parameter for parameter in self._names if parameter.requires_grad]
        used = self._share_use(trained)
        for parameter in trained:
            if parameter not in self._sent:
                self._send(parameter)
        for parameter, (handle, wire) in self._sent.items():
            wait(handle)
            assert parameter.grad is not None
            if wire.data_ptr() != parameter.grad.data_ptr():
                parameter.grad.copy_(wire)
        self._flights.end()
        self._sent.clear()
        if used is not None:
            for parameter, ranks in zip(trained, wait(used).tolist(), strict=True):
                if ranks == 0:  # an optimizer skips parameters that no rank used
                    parameter.grad = None
        self._waited, self._steps = self._waited + perf_counter() - start, self._steps + 1

    def times_per_step(self) -> CommunicationTimes | None:
        """Means since the last call: seconds in `finish`, and seconds in which a gradient was under way.
        None on GPUs, for whose work the host waits, too, and without a step."""
        seconds, self._waited = self._waited, 0.0
        steps, self._steps = self._steps, 0
        flown = self._flights.take()
        if not steps or any(parameter.is_cuda for parameter in self._names):
            return None
        return CommunicationTimes(seconds / steps, flown / steps)

    def _ready(self, parameter: Tensor) -> None:
        if not self.active:
            return
        if parameter in self._sent:
            raise UserError(
                f"backward made the gradient of {self._names[parameter]} twice; the first is being sent",
                field="model",
                remedy="Under activation checkpointing use use_reentrant=False",
            )
        self._flights.look()
        self._send(parameter)

    def _send(self, parameter: Tensor) -> None:
        wire = self._encode(parameter)
        handle = hvd.allreduce_async_(wire, op=hvd.Sum, name=self._keys[parameter])
        self._flights.launch(partial(hvd.poll, handle))
        self._sent[parameter] = handle, wire

    def _encode(self, parameter: Tensor) -> Tensor:
        gradient: Any = parameter.grad
        if gradient.is_sparse:
            raise UserError(
                f"the gradient of {self._names[parameter]} is sparse; Horovod sums only dense ones here",
                field="model",
                remedy="Build the embedding with sparse=False",
            )
        # Horovod does not have bfloat16.
        dtype = torch.float32 if gradient.dtype == torch.bfloat16 else gradient.dtype
        wire: Tensor = gradient.to(dtype).contiguous()
        return wire

    def _share_use(self, trained: list[Tensor]) -> int | None:
        """Handle of the number of ranks that have each gradient; fills in zeros for those missing."""
        missing = [parameter for parameter in trained if parameter.grad is None]
        if missing and not self._find_unused:
            raise UserError(
                f"no gradient for {', '.join(self._names[parameter] for parameter in missing)}: not used"
                " in this step",
                field="find_unused_parameters",
                got=False,
                remedy="Set find_unused_parameters=True, or requires_grad_(False) on unused parameters",
            )
        if not self._find_unused:
            return None
        used = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
        for parameter in missing:
            parameter.grad = torch.zeros_like(parameter)
        handle: int = hvd.allreduce_async_(used, op=hvd.Sum, name="used")
        return handle
