"""ShardedScaler: fp16 gradients that the ranks hold in parts, and an overflow that counts on all of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.checkpoint.dtensor import local_part
from distributed.training.gradient_scaling import group_by_dtype

__all__ = ["ShardedScaler"]


class ShardedScaler(torch.amp.GradScaler):
    """Unscale this rank's gradients; an overflow on one rank counts on all (C8)."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
        found: dict[torch.device, Tensor] = {}
        for part in group_by_dtype(gradients):
            device = part[0].device
            if part[0].dtype is torch.float16 and not allow_fp16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            seen = found.setdefault(device, found_inf.to(device, copy=True))
            torch._amp_foreach_non_finite_check_and_unscale_(part, seen, inv_scale.to(device))
        for seen in found.values():
            dist.all_reduce(seen, dist.ReduceOp.MAX)
        return found
