"""Linear maps of which one half is trained: the forward pass is one GEMM over both halves, the backward
pass computes the gradient of the trained half alone.

Gradients are written in terms of the inputs, so they can be differentiated again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def half_frozen_rows(x: Tensor, trained: Tensor, frozen: Tensor) -> Tensor:
    """x (..., in) -> x @ [trained; frozen]^T of shape (..., r1 + r2).

    Args:
        trained: (r1, in), takes a gradient.
        frozen: (r2, in), takes none.
    """
    result: Tensor = _Rows.apply(x, trained, frozen)  # type: ignore[no-untyped-call]
    return result


def half_frozen_columns(h: Tensor, frozen: Tensor, trained: Tensor, bias: Tensor | None) -> Tensor:
    """h (..., r1 + r2) -> h @ [frozen, trained]^T + bias of shape (..., out).

    Args:
        frozen: (out, r1), takes no gradient.
        trained: (out, r2), takes one.
        bias: (out,) or None.
    """
    result: Tensor = _Columns.apply(h, frozen, trained, bias)  # type: ignore[no-untyped-call]
    return result


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trained: Tensor, frozen: Tensor) -> Tensor:
        ctx.save_for_backward(x, trained, frozen)
        return F.linear(x, torch.cat([trained, frozen]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, trained, frozen = ctx.saved_tensors  # put together again: sharded weights may be gone meanwhile
        grad_x = grad_trained = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ torch.cat([trained, frozen])
        if ctx.needs_input_grad[1]:
            grad_trained = _rows(grad)[:, : len(trained)].mT @ _rows(x)
        return grad_x, grad_trained, None


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, frozen: Tensor, trained: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(h, frozen, trained)
        return F.linear(h, torch.cat([frozen, trained], 1), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        h, frozen, trained = ctx.saved_tensors
        grad_h = grad_trained = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_h = grad @ torch.cat([frozen, trained], 1)
        if ctx.needs_input_grad[2]:
            grad_trained = _outer(_rows(grad), _rows(h)[:, frozen.shape[1] :])
        if ctx.needs_input_grad[3]:
            grad_bias = _rows(grad).sum(0)
        return grad_h, None, grad_trained, grad_bias


def _outer(grad: Tensor, h: Tensor) -> Tensor:
    """grad^T h, (out, r2)."""
    if 8 * h.shape[1] < grad.shape[1]:
        return (h.mT @ grad).mT.contiguous()  # a fifth faster than a tall thin product, measured on a CPU
    return grad.mT @ h


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
