"""StepModule: model and objective as one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from distributed.communication.process_group import num_collectives
from distributed.training.loss_sum import LossSum
from distributed.training.model_traits import sparse_parameters
from distributed.training.objective import Objective
from distributed.training.placeholders import without_gradient

__all__ = ["StepModule"]

_ROUNDING = 1e-12


class StepModule(nn.Module):
    """Model and objective as one module, so that a wrapper such as DDP sees the whole step.

    Args:
        model: the user's module.
        objective: its loss.
        reduced_count: carry the count of tokens, times this number, as the gradient of a parameter of its
            own. It then is reduced in the same buckets as the gradients: no collective is added (C2). 0
            does not.

    Attributes:
        placeholders: as `TorchBackend.placeholders`, but ``skipped`` where no parameter needs a gradient.
        met_collectives: called where the user's code ran collectives in its first micro-batch, which a rank
            without samples would not; None does not look for them.
    """

    placeholders = "computed"
    met_collectives: Callable[[str], None] | None = None

    def __init__(self, model: nn.Module, objective: Objective, reduced_count: int) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        if reduced_count:
            dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
            # Half-precision counts would round; a wider parameter costs a bucket of its own.
            dtype = torch.float64 if torch.float64 in dtypes else torch.float32
            device = next(model.parameters()).device
            self.count = nn.Parameter(torch.zeros((), dtype=dtype, device=device))
        self.reduced_count = reduced_count

    def forward(
        self, batch: Any, num_samples: int, scale: float, known: float | None = None
    ) -> tuple[Tensor, Any, Any]:
        """(loss to differentiate, detached sum of losses, count) of one micro-batch.

        Args:
            batch: on this rank's device.
            num_samples: samples that count; 0 for a placeholder.
            scale: what the sum of losses is multiplied by; its inverse is the count of the
                whole global batch wherever that is known.
            known: how many samples or tokens count, where that is known before.

        Returns:
            Where the count is known, the sum is a number if the loss is on the CPU, otherwise a `LossSum`.
        """
        total: Any
        if num_samples == 0 and self.placeholders != "computed":
            self.objective.skip(batch)
            loss = self._nothing()
            return (self._carry(loss, 0) if self.reduced_count else loss), 0.0, 0
        before = num_collectives() if self.met_collectives else 0
        if known is not None:
            mean = self.objective.mean(self.model, batch, num_samples)
            weight = known * scale  # of a whole batch, 1 up to the rounding of 1 / known
            loss = mean if abs(weight - 1.0) < _ROUNDING else mean * weight
            total = mean.item() * known if mean.is_cpu else LossSum((mean.detach(), known))
            count: Any = known
        else:
            total, count = self.objective(self.model, batch, num_samples)
            loss, total = total * scale, total.detach()
        if self.met_collectives and num_collectives() != before:
            self.met_collectives("the model or its loss runs collectives over the ranks' samples")
        if num_samples:
            self.met_collectives = None
        if num_samples == 0:
            loss, total, count = without_gradient(loss), 0.0, 0
        return (self._carry(loss, count) if self.reduced_count else loss), total, count

    def _nothing(self) -> Tensor:
        """A loss of zero, of which the trainable parameters get gradients of zero where the ranks wait for
        them."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if self.placeholders == "skipped":
            return torch.zeros((), device=next(self.model.parameters()).device)
        return without_gradient(*parameters, sparse=sparse_parameters(self.model))

    def _carry(self, loss: Tensor, count: Any) -> Tensor:
        """`loss` as it is, with the count as derivative with respect to `self.count`, which is 0."""
        if not isinstance(count, Tensor):
            return torch.add(loss, self.count, alpha=count * self.reduced_count)
        # In the parameter's own width: an integer count times a float would be float32.
        number = count.to(self.count.dtype) * self.reduced_count
        return loss + (self.count * number).to(loss.dtype)
