"""Precision: autocast and, under fp16, a gradient scaler."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from distributed.training.mixins.accumulation import NO_CONTEXT

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Runs forward passes in another precision while weights keep their own.

    Args:
        name: ``fp32`` (no autocast), ``bf16`` or ``fp16``.
        device_type: ``cpu`` or ``cuda``.
        init_scale: initial loss scale under fp16.
        growth_interval: finite steps after which the loss scale doubles.
        scaler_class: class of the scaler; backends that shard gradients need their own.

    Attributes:
        scaler: scales the loss so that fp16 gradients do not underflow; None otherwise.
    """

    def __init__(
        self,
        name: str,
        device_type: str,
        init_scale: float,
        growth_interval: int,
        scaler_class: type[torch.amp.GradScaler] = torch.amp.GradScaler,
    ) -> None:
        self._autocast = (device_type, _DTYPES[name]) if name in _DTYPES else None
        self.scaler: torch.amp.GradScaler | None = None
        if name == "fp16":
            self.scaler = scaler_class(device_type, init_scale=init_scale, growth_interval=growth_interval)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        if self._autocast is None:
            return NO_CONTEXT
        device_type, dtype = self._autocast
        return torch.autocast(device_type, dtype=dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of the (scaled) loss."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step unless the scaler found a non-finite gradient; True when the step was skipped.

        The scaler checks reduced gradients, which are equal on all ranks, so all ranks
        decide the same (C8).
        """
        if self.scaler is None:
            optimizer.step()
            return False
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            # A fused step is called in any case, and decides on the device.
            before = self.scaler.get_scale()
            self.scaler.step(optimizer)
            self.scaler.update()
            return self.scaler.get_scale() < before
        # Torch reads the decision from the device; a comparison of scales would read it two times more.
        taken: list[bool] = []
        handle = optimizer.register_step_post_hook(lambda *_: taken.append(True))
        try:
            self.scaler.step(optimizer)
        finally:
            handle.remove()
        self.scaler.update()
        return not taken
