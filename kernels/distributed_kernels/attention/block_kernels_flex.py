"""Kept blocks of a score matrix in one fused kernel: torch's flex attention, compiled for CUDA.

The kernel walks over the kept tiles of each row of tiles; forward it is one launch, backward two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils._triton import has_triton

from distributed_kernels.attention.block_kernels_reference import Block, Grads
from distributed_kernels.attention.tile_masks import LARGEST_TILE, tile_mask

_DTYPES = (torch.float16, torch.bfloat16)
_HEAD = (16, 256)
"""Columns of a head that the kernel takes."""
_OWN_KERNELS = 8
"""Lengths that get a kernel of their own, which knows them and tests no bounds."""
_VARIANTS = 512
"""Compiled variants that may be kept: one for each combination of length, head, dtype and form of mask."""


def takes(q: Tensor) -> bool:
    """Return True where the compiled kernel computes attention on tensors like `q`: not on fake ones, as
    those of a prediction of memory, which a compiled function does not take and which must not be kept."""
    fits = q.device.type == "cuda" and q.dtype in _DTYPES and 0 not in q.shape and type(q) is not FakeTensor
    return fits and _HEAD[0] <= q.shape[-1] <= _HEAD[1] and has_triton()


def attend(q: Tensor, k: Tensor, v: Tensor, tiles: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    """softmax over the pairs that `tiles` sees, differentiable in both outputs.

    Args:
        q: (B, H, N, D).
        k: (B, h, M, D); h divides H.
        v: (B, h, M, D).
        tiles: see `tile_mask`.
        scale: factor on the scores.

    Returns:
        out (B, H, N, D) in q's dtype and lse (B, H, N) in float32; a row without a key has out 0, lse -inf.
    """
    with torch.autocast(q.device.type, enabled=False):
        out, found = _kernel(q, k, tiles)(
            q,
            k,
            v,
            block_mask=tiles,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
            kernel_options=_options(q),
            return_aux=AuxRequest(lse=True),
        )
    return out, found.lse


def _kernel(q: Tensor, k: Tensor, tiles: BlockMask) -> Callable[..., Any]:
    """Compiled on CUDA, unless a caller compiles it; elsewhere step by step, without a gradient."""
    if q.device.type != "cuda" or torch.compiler.is_compiling():
        return flex_attention
    return _compiled(dynamic=_is_one_too_many((q.shape[2], k.shape[2])), tile=tiles.BLOCK_SIZE[0])


def _options(q: Tensor) -> Any:
    """Eight warps on Hopper for heads of 64 columns, where torch 2.11 takes four and twice the time."""
    hopper = q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) == (9, 0)
    return {"fwd_num_warps": 8} if hopper and 32 < q.shape[-1] <= 64 else None


@cache
def _compiled(dynamic: bool, tile: int) -> Callable[..., Any]:
    # Hopper's default for the backward has tiles of 128 rows; for smaller ones torch chooses by trying.
    options: dict[str, Any] | None = None if tile == LARGEST_TILE else {"max_autotune": True}
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=dynamic, options=options)

    def kernel(*args: Any, **options: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=_VARIANTS, accumulated_recompile_limit=_VARIANTS):
            return compiled(*args, **options)

    return kernel


_lengths: set[tuple[int, int]] = set()


def _is_one_too_many(lengths: tuple[int, int]) -> bool:
    """True where so many lengths have a kernel of their own that others share one for any length."""
    if len(_lengths) < _OWN_KERNELS:
        _lengths.add(lengths)
    return lengths not in _lengths


def forward(block: Block) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of the kept blocks of a block."""
    return attend(block.q, block.k, block.v, _tiles_of(block), block.scale)


def backward(block: Block, dout: Tensor, out: Tensor, lse: Tensor) -> Grads:
    """Return (dq, dk, dv) of the kept blocks of a block, as a part of a softmax over it and others.

    With w = exp(own lse - lse) the whole output is the sum of w * (own out) over all parts. So the gradient
    of this part's output is w * dout, and that of its lse is w * (dout . (own out - out)), by which torch's
    backward of the kernel gives the gradients. Its forward is computed once more.
    """
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (block.q, block.k, block.v))
        own, own_lse = attend(q, k, v, _tiles_of(block), block.scale)
    weight = torch.exp(own_lse.detach() - lse).unsqueeze(-1)
    down = weight * dout
    down_lse = (down * (own.detach() - out)).sum(-1)
    given = down.to(own.dtype), down_lse.to(own_lse.dtype)
    dq, dk, dv = torch.autograd.grad((own, own_lse), (q, k, v), given)
    return dq, dk, dv


def _tiles_of(block: Block) -> BlockMask:
    assert block.kept is not None
    return tile_mask(block.kept, block.q.shape[2], block.k.shape[2])
