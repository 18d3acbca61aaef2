"""MicrobatchPipelineTrainer: the accumulation of a pipeline, for loops of one's own in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from distributed.errors import UserError
from distributed.training.objective import Objective

__all__ = ["MicrobatchPipelineTrainer"]


class MicrobatchPipelineTrainer:
    """Steps whose batch goes through the model in pieces, in this process.

    Under a `Trainer`, ``parallel.pipeline`` and ``parallel.num_microbatches`` let ranks compute the pieces at
    the same time.

    Args:
        model: whose stages may be on several devices.
        num_microbatches: pieces of a batch.

    Raises:
        UserError: there is no piece.
    """

    def __init__(self, model: nn.Module, num_microbatches: int = 4) -> None:
        if num_microbatches < 1:
            raise UserError(
                "a batch has at least one piece",
                field="num_microbatches",
                got=num_microbatches,
                allowed="1, ...",
            )
        self.model, self.num_microbatches = model, num_microbatches

    def forward_backward_pipeline(
        self,
        batch_data: Tensor,
        batch_targets: Tensor,
        criterion: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
    ) -> float:
        """Take one step with the gradient of the mean over the whole batch, also where its pieces have
        different sizes or numbers of masked targets.

        Args:
            batch_data: (samples, ...).
            batch_targets: (samples, ...).
            criterion: as the `loss_fn` of a `Trainer`: the mean of a batch.

        Returns:
            The loss: the same mean.

        Raises:
            UserError: the batch has fewer samples than pieces.
        """
        samples = len(batch_data)
        if samples < self.num_microbatches:
            raise UserError(
                f"a batch of {samples} samples cannot be cut into {self.num_microbatches} pieces",
                field="num_microbatches",
                got=self.num_microbatches,
                allowed=f"1 to {samples}",
                remedy="Use fewer pieces, or a larger batch",
            )
        optimizer.zero_grad()
        objective, total, count = Objective(criterion), 0.0, 0.0
        pieces = (part.tensor_split(self.num_microbatches) for part in (batch_data, batch_targets))
        for data, targets in zip(*pieces, strict=True):
            summed, number = objective(self._on_one_device, (data, targets), len(data))
            summed.backward()
            total, count = total + float(summed), count + float(number)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(max(count, 1.0))
        optimizer.step()
        optimizer.zero_grad()
        return total / count if count else 0.0

    def _on_one_device(self, data: Tensor) -> Any:
        """The output, on the device of the data and with it of the targets."""
        output = self.model(data)
        return output.to(data.device) if isinstance(output, Tensor) else output
