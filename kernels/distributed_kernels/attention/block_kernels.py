"""Compute a dense block of attention by the chosen implementation.

A block is every query row of (b, h, m, D) against every key row of (b, h, n, D), or the top-left
aligned causal part of it. The backward takes the (out, lse) of the *whole* softmax that the block is a
part of: with P = exp(scores - lse) the gradients of all blocks then simply add up (FlashAttention,
arXiv:2205.14135, appendix B.4, whose proof nowhere needs lse to be the block's own).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from distributed_kernels.attention import (
    block_kernels_cpu,
    block_kernels_cuda,
    block_kernels_flex,
    block_kernels_reference,
)
from distributed_kernels.attention.block_kernels_reference import Block, Grads
from distributed_kernels.attention.patterns import KeptBlocks
from distributed_kernels.errors import KernelError

_VARIABLE = "DISTRIBUTED_KERNELS"
_MAX_FLASH_HEAD = 256
"""Columns of a head that the CUDA flash kernel takes."""


class _Blocks(NamedTuple):
    forward: Callable[[Block], tuple[Tensor, Tensor]]
    backward: Callable[[Block, Tensor, Tensor, Tensor], Grads]
    device: str | None
    dtypes: tuple[torch.dtype, ...] | None
    masks: bool


_PLAIN = _Blocks(block_kernels_reference.forward, block_kernels_reference.backward, None, None, True)
_IMPLEMENTATIONS = {
    "plain": _PLAIN,
    "cpu-flash": _Blocks(
        block_kernels_cpu.forward,
        block_kernels_cpu.backward,
        "cpu",
        (torch.float32, torch.float64, torch.bfloat16),
        True,
    ),
    "cuda-flash": _Blocks(
        block_kernels_cuda.flash_forward,
        block_kernels_cuda.flash_backward,
        "cuda",
        (torch.float16, torch.bfloat16),
        False,
    ),
    "cuda-efficient": _Blocks(
        block_kernels_cuda.efficient_forward,
        block_kernels_cuda.efficient_backward,
        "cuda",
        (torch.float16, torch.bfloat16, torch.float32),
        False,
    ),
}
_KEPT = _Blocks(block_kernels_flex.forward, block_kernels_flex.backward, "cuda", None, False)
"""For pieces that keep some of their blocks."""
_NAMES = ("auto", *_IMPLEMENTATIONS)
_override: ContextVar[str | None] = ContextVar("blocks", default=None)


@contextmanager
def use_blocks(name: str) -> Iterator[None]:
    """Compute every attention begun inside the ``with`` by the implementation `name`, backward included.

    Args:
        name: ``auto`` (the fastest that takes the tensors), ``plain`` (the reference), ``cpu-flash``,
            ``cuda-flash`` or ``cuda-efficient``. The environment variable DISTRIBUTED_KERNELS does the
            same for a whole process.

    Raises:
        KernelError: there is no implementation of that name.
    """
    token = _override.set(_known(name, "use_blocks"))
    try:
        yield
    finally:
        _override.reset(token)


def chosen_blocks(q: Tensor) -> str:
    """Return the name of the implementation that attention on tensors like `q` uses now.

    Raises:
        KernelError: the override names one that cannot take the device or dtype of `q`.
    """
    name = _override.get() or _known(os.environ.get(_VARIABLE, "auto"), _VARIABLE)
    if name == "auto":
        return next(each for each in reversed(_IMPLEMENTATIONS) if _auto_takes(each, q))
    if not _takes(name, q):
        kind = _IMPLEMENTATIONS[name]
        raise KernelError(
            f"blocks: {name} cannot compute {q.dtype} on {q.device.type}",
            allowed=f"device {kind.device}, {', '.join(map(str, kind.dtypes or ()))}",
            remedy="Choose 'auto' or 'plain'",
        )
    return name


def fuses_kept_blocks(q: Tensor) -> bool:
    """Return True where one kernel computes all kept blocks of attention on tensors like `q`.

    Elsewhere, and where an implementation of dense blocks is named, blocks are computed one after another.
    """
    named = _override.get() or _known(os.environ.get(_VARIABLE, "auto"), _VARIABLE)
    return named == "auto" and block_kernels_flex.takes(q)


def _known(name: str, where: str) -> str:
    if name not in _NAMES:
        raise KernelError(f"{where}: unknown implementation", got=name, allowed=", ".join(_NAMES))
    return name


def _takes(name: str, q: Tensor) -> bool:
    kind = _IMPLEMENTATIONS[name]
    fits = kind.device in (None, q.device.type) and (kind.dtypes is None or q.dtype in kind.dtypes)
    return fits and not (name == "cuda-flash" and q.shape[-1] > _MAX_FLASH_HEAD)


def _auto_takes(name: str, q: Tensor) -> bool:
    # Half precision goes to flash where it fits; the other CUDA kernel is for float32 and wide heads.
    return _takes(name, q) and not (name == "cuda-efficient" and _takes("cuda-flash", q))


def _implementation(name: str, block: Block) -> _Blocks:
    q, k, _, _, _, mask, factors, kept = block
    if kept is not None:
        return _KEPT if block_kernels_flex.takes(q) else _PLAIN
    kind = _IMPLEMENTATIONS[name]
    # The native kernels divide by the number of keys or rows; an empty block is not performance-critical.
    # They draw dropout themselves, in a way that cannot be repeated for a block of a larger softmax.
    plain = 0 in q.shape or 0 in k.shape or factors is not None
    return _PLAIN if plain or (mask is not None and not kind.masks) else kind


def block_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    *,
    mask: Tensor | None = None,
    factors: Tensor | None = None,
    kept: KeptBlocks | None = None,
    blocks: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of every row of `q` over the rows of `k`.

    Args:
        q: (b, h, m, D).
        k: (b, h, n, D).
        v: (b, h, n, D).
        causal: row i sees keys 0..i; then m == n.
        scale: factor on the scores.
        mask: bool, broadcastable to (b, h, m, n), True where a key may be seen.
        factors: (b, h, m, n), of the weights after the softmax: 0 for a dropped one, 1 / (1 - p) for others.
        kept: the blocks of (m, n) that are seen, without `mask`, `factors` or `causal`; all when None.
        blocks: implementation; chosen by `chosen_blocks` when None.

    Returns:
        out (b, h, m, D), in q's dtype or wider, and lse (b, h, m), the logarithm of the softmax's
        denominator in float32 (float64 for float64). A row with no key: out 0, lse -inf.
    """
    block = Block(q, k, v, causal, scale, mask, factors, kept)
    return _implementation(blocks or chosen_blocks(q), block).forward(block)


def block_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    *,
    mask: Tensor | None = None,
    factors: Tensor | None = None,
    kept: KeptBlocks | None = None,
    blocks: str | None = None,
) -> Grads:
    """Gradients of this block, as a part of a softmax over it and possibly other blocks.

    Args:
        dout: (b, h, m, D), gradient of the whole output.
        q, k, v, causal, scale, mask, factors, kept, blocks: as for `block_forward`.
        out: (b, h, m, D), output of the whole softmax.
        lse: (b, h, m), of the whole softmax, +inf (not -inf) for rows with no key.

    Returns:
        (dq, dk, dv), in q's dtype or wider.
    """
    block = Block(q, k, v, causal, scale, mask, factors, kept)
    return _implementation(blocks or chosen_blocks(q), block).backward(block, dout, out, lse)
