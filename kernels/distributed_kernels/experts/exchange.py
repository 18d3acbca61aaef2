"""Exchange rows between ranks in uneven numbers, and differentiate it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["exchange_counts", "exchange_rows"]


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Row r of the result: what rank r of `group` has in the row of `counts` for this rank. Collective.

    Args:
        counts: (ranks, n) int64.
    """
    received = counts.new_empty(counts.shape)
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    return received


def exchange_rows(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Send consecutive rows to each rank of `group`, and get theirs. Collective, forward and backward.

    Args:
        rows: (sum of `send`, width).
        send: number of rows for each rank; 0 is allowed.
        receive: number of rows from each rank.

    Returns:
        (sum of `receive`, width), in the order of the ranks. The gradient of a row returns to its sender.
    """
    function: Any = _Exchange
    exchanged: Tensor = function.apply(rows, list(send), list(receive), group)
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchange(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _exchange(grads[0], ctx.receive, ctx.send, ctx.group), None, None, None


def _exchange(rows: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
    return received
