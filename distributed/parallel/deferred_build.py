"""Build a model on rank 0 only; the others receive just what they hold of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.checkpoint.dtensor import copy_part, is_sharded
from distributed.communication.broadcast import broadcast_values
from distributed.system.tensors import assign_values
from distributed.training.optimizers import build_model

__all__ = ["build_without_data", "fill", "fill_from_rank_zero", "tensors_of"]


def build_without_data(factory: Any, seed: int) -> nn.Module:
    """Call `factory` on the meta device: shapes and names without memory.

    A factory that computes with values while it builds (``.item()``, ``.numpy()``, a tensor kept
    outside parameters and buffers) cannot do without them, and builds on the CPU.
    """
    try:
        with torch.device("meta"):
            built = build_model(factory, seed)
    except (RuntimeError, TypeError, ValueError):
        # A fault of the factory's own is raised again here.
        return build_model(factory, seed)
    return build_model(factory, seed) if _holds_other_tensors(built) else built


def _holds_other_tensors(model: nn.Module) -> bool:
    """Whether a module keeps a meta tensor outside its parameters and buffers, which is never filled."""
    loose = (value for module in model.modules() for value in vars(module).values())
    return any(_has_meta(value) for value in loose)


def _has_meta(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_meta
    # A module's own tables of parameters and buffers hold what is filled.
    return isinstance(value, (list, tuple, set)) and any(_has_meta(item) for item in value)


@torch.no_grad()
def fill(tensor: Tensor, full: Tensor) -> None:
    """Copy into `tensor` what it holds of `full`, the whole one."""
    if is_sharded(tensor):
        copy_part(tensor, full)
    else:
        assign_values(tensor, full)


@torch.no_grad()
def fill_from_rank_zero(model: nn.Module, built: dict[str, Tensor], device: str) -> None:
    """Fill every rank's share of `model` from rank 0's tensors, one at a time. Collective.

    Args:
        model: sharded model; on ranks other than 0 its tensors hold memory and no data yet.
        built: rank 0's unsharded tensors by name; not read elsewhere.
        device: device of the collective.
    """
    first = dist.get_rank() == 0
    for name, tensor in tensors_of(model):
        full = (
            built[name].to(device).contiguous()
            if first
            else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        )
        broadcast_values([full])
        fill(tensor, full)


def tensors_of(model: nn.Module) -> Iterable[tuple[str, Any]]:
    """(name, tensor) of the parameters and buffers, tied ones once."""
    yield from model.named_parameters()
    yield from model.named_buffers()
