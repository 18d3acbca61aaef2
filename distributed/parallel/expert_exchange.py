"""Compute tokens by experts that other ranks hold: there and back, in forward and in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.errors import UserError
from distributed.parallel.collectives import exchange_rows

__all__ = ["compute_elsewhere"]

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]


def compute_elsewhere(
    compute: Compute, name: str, num_experts: int, group: Any, *args: Any, **kwargs: Any
) -> Tensor:
    """What the experts of all ranks make of this rank's tokens. Collective over `group`.

    Args:
        compute: called with (tokens, index, weights) whose experts this rank holds, numbered from 0.
        name: of the module, for errors.
        num_experts: over all ranks.
        args, kwargs: what the module was called with: tokens (n, width), index of the k experts of each,
            (n, k) integers, and their weights, (n, k).

    Raises:
        UserError: it was called with something else.
    """
    tokens, index, weights = _arguments(name, num_experts, args, kwargs)
    chosen = index.flatten()
    order = chosen.argsort(stable=True)
    of_ranks = chosen.bincount(minlength=num_experts).view(dist.get_world_size(group), -1)
    received = torch.empty_like(of_ranks)
    dist.all_to_all_single(received, of_ranks, group=group)
    send, receive = of_ranks.sum(1).tolist(), received.sum(1).tolist()
    arrived = exchange_rows(tokens[order // index.shape[1]], send, receive, group)
    # They are sorted by sender, and by expert of each sender.
    numbers = torch.arange(received.shape[1], device=index.device).repeat(len(received))
    computed = _compute(compute, arrived, numbers.repeat_interleave(received.flatten()).to(index.dtype))
    returned = exchange_rows(computed, receive, send, group)
    placed = torch.zeros_like(returned).index_copy(0, order, returned).unflatten(0, index.shape)
    combined: Tensor = (placed * weights.unsqueeze(-1).to(placed.dtype)).sum(1).to(tokens.dtype)
    return combined


def _compute(compute: Compute, rows: Tensor, expert: Tensor) -> Tensor:
    """Each row by one expert, with weight 1."""
    number = len(rows)
    if number == 0:
        # One row that counts nothing, so that backward reaches the weights and the exchange on this rank.
        rows, expert = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), expert.new_zeros(1)
    return compute(rows, expert.unsqueeze(1), rows.new_ones(len(rows), 1))[:number]


def _arguments(
    name: str, num_experts: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    given = [*args, *kwargs.values()]
    tensors = [value for value in given if isinstance(value, Tensor)]
    if len(given) == len(tensors) == 3:
        tokens, index, weights = tensors
        fits = tokens.dim() == index.dim() == 2 and index.shape == weights.shape
        if fits and len(tokens) == len(index) and not index.is_floating_point():
            return tokens, index, weights
    shapes = [f"{tuple(v.shape)} {v.dtype}" if isinstance(v, Tensor) else repr(v) for v in given]
    raise UserError(
        f"the experts '{name}' are called with other arguments than those whose tokens can be exchanged",
        field="parallel.expert",
        got=", ".join(shapes),
        allowed=f"tokens (n, width), index (n, k) of {num_experts} experts, weights (n, k)",
        remedy="Leave parallel.expert out, or give the layer the methods expert_parameters and"
        " set_expert_group (docs/experts.md)",
    )
