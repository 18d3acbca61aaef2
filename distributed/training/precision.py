"""PrecisionMixin: autocast and, under fp16, a gradient scaler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["PrecisionMixin"]

_NOTHING: AbstractContextManager[Any] = nullcontext()
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class PrecisionMixin:
    """Runs forward passes in `precision` while weights stay in their own.

    Attributes:
        scaler: multiplies the loss so that fp16 gradients do not vanish; None otherwise.
        scaler_class: what it is an instance of.
    """

    scaler_class: type[torch.amp.GradScaler] = torch.amp.GradScaler
    scaler: torch.amp.GradScaler | None = None
    _autocast: tuple[str, torch.dtype] | None = None

    def setup_precision(
        self, precision: str, device_type: str, init_scale: float, growth_interval: int
    ) -> None:
        """Choose by name: ``fp32`` (no autocast), ``bf16`` or ``fp16``."""
        self._autocast = (device_type, _DTYPES[precision]) if precision in _DTYPES else None
        self.scaler = (
            self.scaler_class(device_type, init_scale=init_scale, growth_interval=growth_interval)
            if precision == "fp16"
            else None
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        if self._autocast is None:
            return _NOTHING
        device_type, dtype = self._autocast
        return torch.autocast(device_type, dtype=dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of the (scaled) loss."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def scaled_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step unless the scaler saw a non-finite gradient; True when it was skipped.

        The scaler looks at reduced gradients, which are equal on all ranks, so all ranks
        decide alike (C8).
        """
        if self.scaler is None:
            optimizer.step()
            return False
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.get_scale() < before
