"""A dense block by torch's CUDA kernels: flash attention for half precision, memory-efficient for float32.

The operators' signatures were read from torch 2.13, and how their inputs must be padded from
`F.scaled_dot_product_attention`, which calls the same operators. Run under torch 2.11 on an H200: rows
``kernel`` of docs/benchmarks-gpu.md.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from distributed_kernels.attention.block_kernels_reference import Block, Grads

_HEAD_MULTIPLE = 8
"""Both kernels read heads in vectors of this many elements."""
_LSE_MULTIPLE = 32
"""The memory-efficient kernel writes and reads its lse in rows of a multiple of this."""


def _padded(*tensors: Tensor) -> list[Tensor]:
    """Heads grown by zeros, which change neither scores nor the first columns of the output."""
    missing = -tensors[0].shape[-1] % _HEAD_MULTIPLE
    return [pad(x, (0, missing)) if missing else x for x in tensors]


def _cropped(width: int, *tensors: Tensor) -> list[Tensor]:
    return [x[..., :width] for x in tensors]


def _philox(q: Tensor) -> tuple[Tensor, Tensor]:
    """The dropout state that the backward operators ask for; without dropout it is not read."""
    nothing = torch.empty(2, dtype=torch.uint64, device=q.device)
    return nothing, nothing


def flash_forward(block: Block) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a block of float16 or bfloat16 without a mask."""
    q, k, v, causal, scale, _ = block[:6]
    width = q.shape[-1]
    result = torch.ops.aten._scaled_dot_product_flash_attention(
        *_padded(q, k, v), 0.0, causal, False, scale=scale
    )
    return result[0][..., :width], result[1]


def flash_backward(block: Block, dout: Tensor, out: Tensor, lse: Tensor) -> Grads:
    """Return (dq, dk, dv) of a block of float16 or bfloat16 without a mask."""
    q, k, v, causal, scale, _ = block[:6]
    width = q.shape[-1]
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *_padded(dout, q, k, v, out),
        lse.contiguous(),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        *_philox(q),
        scale=scale,
    )
    dq, dk, dv = _cropped(width, dq, dk, dv)
    return dq, dk, dv


def efficient_forward(block: Block) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a block without a mask."""
    q, k, v, causal, scale, _ = block[:6]
    width = q.shape[-1]
    result = torch.ops.aten._scaled_dot_product_efficient_attention(
        *_padded(q, k, v), None, True, 0.0, causal, scale=scale
    )
    return result[0][..., :width], result[1][..., : q.shape[2]]


def efficient_backward(block: Block, dout: Tensor, out: Tensor, lse: Tensor) -> Grads:
    """Return (dq, dk, dv) of a block without a mask."""
    q, k, v, causal, scale, _ = block[:6]
    width = q.shape[-1]
    rows = pad(lse, (0, -lse.shape[-1] % _LSE_MULTIPLE), value=torch.inf).contiguous()
    dout, q, k, v, out = _padded(dout, q, k, v, out)
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        *(dout, q, k, v, None, out, rows, *_philox(q)),
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    dq, dk, dv = _cropped(width, dq, dk, dv)
    return dq, dk, dv
