"""A dense block by torch's flash attention for the CPU: time as a matrix product, memory linear.

Two things that the operator leaves to its caller are done here. A row whose keys are all masked
returns lse 0 there; it is -inf here. And a causal block costs nearly what a full one costs unless it
is thousands of rows long, for the kernel drops only key blocks of 512; so a causal block is halved: two
causal halves in one call, and the second half's queries against the first half's keys, a full block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distributed_kernels.attention.block_kernels_reference import Block, Grads, accumulator

_HALVE_ABOVE = 128
"""Rows above which a causal block is halved; below, the calls cost more than the products saved."""


def forward(block: Block) -> tuple[Tensor, Tensor]:
    """Return (out, lse); `out` is in the accumulator's dtype where halves were merged."""
    if _can_halve(block):
        return _halves_forward(block)
    q, k, v, causal, scale, mask = block[:6]
    bias = _bias(block)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal and mask is None, attn_mask=bias, scale=scale
    )
    if bias is not None:
        lse = lse.masked_fill((bias == -torch.inf).all(-1), -torch.inf)
    return out, lse


def backward(block: Block, dout: Tensor, out: Tensor, lse: Tensor) -> Grads:
    """Return (dq, dk, dv), in the accumulator's dtype where halves were added."""
    if _can_halve(block):
        return _halves_backward(block, dout, out, lse)
    q, k, v, causal, scale, mask = block[:6]
    grads: Grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal and mask is None, attn_mask=_bias(block), scale=scale
    )
    return grads


def _bias(block: Block) -> Tensor | None:
    q, k, _, causal, _, mask = block[:6]
    if mask is None:
        return None
    if causal:
        mask = mask & torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    mask = mask[(None,) * (4 - mask.dim())]
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)


def _can_halve(block: Block) -> bool:
    rows = block.q.shape[2]
    square = block.causal and block.mask is None and rows == block.k.shape[2]
    return square and rows > _HALVE_ABOVE and rows % 2 == 0


def _halved(x: Tensor) -> Tensor:
    """(b, h, 2m, ...) -> (b, 2h, m, ...), a view where strides allow."""
    halves: Tensor = x.unflatten(2, (2, -1))
    return halves.flatten(1, 2)


def _joined(x: Tensor) -> Tensor:
    """(b, 2h, m, ...) -> (b, h, 2m, ...): undoes `_halved`."""
    halves: Tensor = x.unflatten(1, (-1, 2))
    return halves.flatten(2, 3)


def _diagonal_blocks(block: Block) -> Block:
    """The two causal halves, as heads of one block."""
    return Block(_halved(block.q), _halved(block.k), _halved(block.v), True, block.scale)


def _early_keys(block: Block) -> Block:
    """The second half's queries against the first half's keys."""
    q, k, v, _, scale, _ = block[:6]
    half = q.shape[2] // 2
    return Block(q[:, :, half:], k[:, :, :half], v[:, :, :half], False, scale)


def _halves_forward(block: Block) -> tuple[Tensor, Tensor]:
    half = block.q.shape[2] // 2
    out, lse = forward(_diagonal_blocks(block))
    out, lse = _joined(out).to(accumulator(block.q.dtype)), _joined(lse)
    early, early_lse = forward(_early_keys(block))
    late_lse = lse[:, :, half:]
    out[:, :, half:].lerp_(early.to(out.dtype), torch.sigmoid(early_lse - late_lse).unsqueeze(-1))
    late_lse.copy_(torch.logaddexp(late_lse, early_lse))
    return out, lse


def _halves_backward(block: Block, dout: Tensor, out: Tensor, lse: Tensor) -> Grads:
    half = block.q.shape[2] // 2
    late = (x[:, :, half:] for x in (dout, out, lse))
    late_dq, early_dk, early_dv = backward(_early_keys(block), *late)
    grads = backward(_diagonal_blocks(block), _halved(dout), _halved(out), _halved(lse))
    dq, dk, dv = (_joined(grad).to(accumulator(block.q.dtype)) for grad in grads)
    dq[:, :, half:] += late_dq
    dk[:, :, :half] += early_dk
    dv[:, :, :half] += early_dv
    return dq, dk, dv
