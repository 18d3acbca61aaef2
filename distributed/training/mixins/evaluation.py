"""EvaluationMixin: losses and metrics of validation batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from distributed.interfaces.backend import Window
from distributed.training.forward_state import Buffers
from distributed.training.objective import Objective
from distributed.training.placeholders import Untouched, stand_in

__all__ = ["EvaluationMixin"]


class EvaluationMixin:
    """Evaluates windows without gradients, unless they are needed, and without a trace in buffers.

    Attributes:
        module: the model.
        objective: its loss and metrics.
    """

    module: nn.Module
    objective: Objective
    autocast: Any
    to_device: Any
    _differentiates = False

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        before = Buffers(self.module)
        yield
        before.restore_values()

    def evaluate_window(self, window: Window) -> dict[str, tuple[Any, Any]]:
        found: dict[str, tuple[Any, Any]] = {}
        with torch.no_grad(), self.autocast():
            for batch, num_samples in window.micro_batches:
                if not num_samples:
                    self.evaluate_stand_in(batch)
                    continue
                for name, pair in self._evaluate(self.to_device(batch), num_samples).items():
                    before = found.get(name, (0, 0))
                    total, count = (p.detach() if isinstance(p, Tensor) else p for p in pair)
                    found[name] = (before[0] + total, before[1] + count)
        return found

    def _evaluate(self, batch: Any, num_samples: int) -> dict[str, Any]:
        """`evaluate`, with gradients where model, loss or step take derivatives in validation, too."""
        if not self._differentiates:
            try:
                return self.evaluate(batch, num_samples)
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
        with torch.enable_grad():
            terms = self.evaluate(batch, num_samples)
        self._differentiates = True
        return terms

    def evaluate(self, batch: Any, num_samples: int) -> dict[str, Any]:
        """``{name: (sum, count)}`` of one micro-batch that is on this rank's device."""
        return self.objective.evaluate(self.module, batch, num_samples)

    def evaluate_stand_in(self, batch: Any) -> None:
        """Take part in the collectives of a forward pass of the other ranks, where it has any."""
        if not self.copies_in_evaluation:  # type: ignore[attr-defined]  # of `Backend`
            return
        before = Untouched(self.module)
        self._evaluate(self.to_device(stand_in(batch)), 0)
        before.restore()
