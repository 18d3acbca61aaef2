"""EvaluationMixin: sums and counts of one window of validation data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distributed.interfaces.backend import Window
from distributed.training.mixins.precision import PrecisionMixin
from distributed.training.module_modes import ModuleModes
from distributed.training.objective import Objective
from distributed.training.placeholders import Untouched, stand_in

__all__ = ["EvaluationMixin"]


class EvaluationMixin(PrecisionMixin):
    """Evaluates the model. Placeholders do not reach it, unless a forward pass needs every rank."""

    module: nn.Module
    objective: Objective
    needs_every_rank_in_evaluation: Any
    to_device: Callable[[Any], Any]

    def __init__(self) -> None:
        super().__init__()
        self._modes = ModuleModes()

    def set_training(self, training: bool) -> None:
        """Enter evaluation mode, or return to the modes before it: see `ModuleModes`."""
        self._modes.set_training(self.module, training)

    def evaluate_window(self, window: Window) -> dict[str, tuple[Any, Any]]:
        """``{metric: (sum, count)}`` of this rank's samples."""
        found: dict[str, tuple[Any, Any]] = {}
        with torch.no_grad(), self.autocast():
            for batch, num_samples in window.micro_batches:
                if not num_samples:
                    self.evaluate_stand_in(batch)
                    continue
                terms = self.evaluate(self.to_device(batch), num_samples)
                for name, (total, count) in terms.items():
                    before = found.get(name, (0, 0))
                    found[name] = (before[0] + total, before[1] + count)
        return found

    def evaluate_stand_in(self, batch: Any) -> None:
        """Take part in the collectives of a forward pass of the other ranks."""
        if self.needs_every_rank_in_evaluation:
            before = Untouched(self.module)
            self.evaluate(self.to_device(stand_in(batch)), 0)
            before.restore()

    def evaluate(self, batch: Any, num_samples: int) -> dict[str, Any]:
        """``{name: (sum, count)}`` of one micro-batch that is on this rank's device."""
        return self.objective.evaluate(self.module, batch, num_samples)
