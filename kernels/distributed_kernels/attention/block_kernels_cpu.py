"""A dense block by torch's flash attention for the CPU: time as a matrix product, memory linear.

Two things that the operator leaves to its caller are done here. A row whose keys are all masked
returns lse 0 there; it is -inf here. And a causal block costs nearly what a full one costs unless it
is thousands of rows long, for the kernel drops only key blocks of 512; so a causal block is halved: two
causal halves in one call, and the second half's queries against the first half's keys, a full block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distributed_kernels.attention.block_kernels_reference import accumulator

__all__ = ["backward", "forward"]

_HALVE_ABOVE = 128
"""Rows above which a causal block is halved; below, the calls cost more than the products saved."""

Grads = tuple[Tensor, Tensor, Tensor]


def forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse); `out` is in the accumulator's dtype where halves were merged."""
    if causal and mask is None and _can_halve(q, k):
        return _halves_forward(q, k, v, scale)
    bias = _bias(mask, causal, q, k)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal and mask is None, attn_mask=bias, scale=scale
    )
    if bias is not None:
        lse = lse.masked_fill((bias == -torch.inf).all(-1), -torch.inf)
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None,
) -> Grads:
    """Return (dq, dk, dv), in the accumulator's dtype where halves were added."""
    if causal and mask is None and _can_halve(q, k):
        return _halves_backward(dout, q, k, v, out, lse, scale)
    grads: Grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        0.0,
        causal and mask is None,
        attn_mask=_bias(mask, causal, q, k),
        scale=scale,
    )
    return grads


def _bias(mask: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if causal:
        mask = mask & torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    mask = mask[(None,) * (4 - mask.dim())]
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)


def _can_halve(q: Tensor, k: Tensor) -> bool:
    rows = q.shape[2]
    return rows == k.shape[2] and rows > _HALVE_ABOVE and rows % 2 == 0


def _halved(x: Tensor) -> Tensor:
    """(b, h, 2m, ...) -> (b, 2h, m, ...), a view where strides allow."""
    halves: Tensor = x.unflatten(2, (2, -1))
    return halves.flatten(1, 2)


def _joined(x: Tensor) -> Tensor:
    """(b, 2h, m, ...) -> (b, h, 2m, ...): undoes `_halved`."""
    halves: Tensor = x.unflatten(1, (-1, 2))
    return halves.flatten(2, 3)


def _halves_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    half = q.shape[2] // 2
    out, lse = forward(_halved(q), _halved(k), _halved(v), True, scale, None)
    out, lse = _joined(out).to(accumulator(q.dtype)), _joined(lse)
    early, early_lse = forward(q[:, :, half:], k[:, :, :half], v[:, :, :half], False, scale, None)
    late_lse = lse[:, :, half:]
    out[:, :, half:].lerp_(early.to(out.dtype), torch.sigmoid(early_lse - late_lse).unsqueeze(-1))
    late_lse.copy_(torch.logaddexp(late_lse, early_lse))
    return out, lse


def _halves_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> Grads:
    half = q.shape[2] // 2
    late_dout, late_q, late_out, late_lse = (x[:, :, half:] for x in (dout, q, out, lse))
    late_dq, early_dk, early_dv = backward(
        late_dout, late_q, k[:, :, :half], v[:, :, :half], late_out, late_lse, False, scale, None
    )
    dout, q, k, v, out, lse = (_halved(x) for x in (dout, q, k, v, out, lse))
    grads = backward(dout, q, k, v, out, lse, True, scale, None)
    dq, dk, dv = (_joined(grad).to(accumulator(q.dtype)) for grad in grads)
    dq[:, :, half:] += late_dq
    dk[:, :, :half] += early_dk
    dv[:, :, :half] += early_dv
    return dq, dk, dv
