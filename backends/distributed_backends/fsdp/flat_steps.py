"""Steps of LBFGS, which sees all parameters as one vector, where ranks hold parts of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distributed.checkpoint.dtensor import cut_like, is_sharded, local_part, whole
from distributed.checkpoint.optimizer_state import WHOLE_STATE


def flatten_whole(optimizer: Any) -> None:
    """Let LBFGS flatten whole gradients, and each rank move its part of the parameters (as of torch 2.13).
    Its history has the size of the whole model on every rank. Collective in every step."""
    parameters = optimizer.param_groups[0]["params"]

    def gather() -> Tensor:
        gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)
        return torch.cat([whole(gradient).reshape(-1) for gradient in gradients])

    def add(size: float, direction: Tensor) -> None:
        for p, part in zip(parameters, direction.split([p.numel() for p in parameters]), strict=True):
            own = cut_like(p, part.view(p.shape)) if is_sharded(p) else part.view(p.shape)
            local_part(p).add_(local_part(own), alpha=size)

    optimizer._params, optimizer._gather_flat_grad, optimizer._add_grad = parameters, gather, add
    setattr(optimizer, WHOLE_STATE, True)
