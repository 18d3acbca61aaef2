"""PrecisionMixin: mixed precision for a torch backend."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from distributed.training.precision import Precision


class PrecisionMixin:
    """Holds a `Precision` as `precision`; a backend overrides a verb where its engine does the work.

    Attributes:
        scaler_class: set it before `setup_precision` to use another gradient scaler.
    """

    precision: Precision
    scaler_class: type[torch.amp.GradScaler] = torch.amp.GradScaler

    def setup_precision(self, name: str, device_type: str, init_scale: float, growth_interval: int) -> None:
        """Choose by name: ``fp32``, ``bf16`` or ``fp16``."""
        self.precision = Precision(name, device_type, init_scale, growth_interval, self.scaler_class)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler, None unless under fp16."""
        return self.precision.scaler

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        return self.precision.autocast()

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of the (scaled) loss."""
        self.precision.backward(loss)

    def scaled_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step unless a gradient is not finite; True when the step was skipped."""
        return self.precision.step(optimizer)
