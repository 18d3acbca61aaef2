"""Whether a sketched layer runs as one kernel, and that kernel behind a function."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from distributed_kernels.errors import KernelError

__all__ = ["fused_linear", "fused_linear_available", "use_fused_linear", "wants_fused"]

LARGEST_RANK = 128
"""Above it, h no longer fits beside the tiles."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_VARIABLE = "DISTRIBUTED_KERNELS_FUSED_LINEAR"
_override: bool | None = None


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def fused_linear_available(device: torch.device) -> bool:
    """Whether the kernel can run there: Triton is installed, and `device` is a GPU or Triton interprets."""
    return _has_triton() and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


@contextmanager
def use_fused_linear(wanted: bool = True) -> Iterator[None]:
    """Let layers use the kernel where it can run, or forbid it, regardless of the environment."""
    global _override
    before, _override = _override, wanted
    try:
        yield
    finally:
        _override = before


def wants_fused(x: Tensor, factor_in: Tensor) -> bool:
    """Whether `SKLinear` is to use the kernel here: it was asked for (`use_fused_linear`, or
    DISTRIBUTED_KERNELS_FUSED_LINEAR=1), no gradient is, and sizes and device allow it."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    asked = os.environ.get(_VARIABLE) == "1" if _override is None else _override
    return (
        asked
        and not torch.is_autocast_enabled(x.device.type)
        and x.dtype is factor_in.dtype
        and x.dtype in _DTYPES
        and len(factor_in) <= LARGEST_RANK
        and x.numel() > 0
        and fused_linear_available(x.device)
    )


def fused_linear(x: Tensor, factor_in: Tensor, factor_out: Tensor, bias: Tensor | None = None) -> Tensor:
    """x A^T B^T + b in one kernel, without gradient.

    Args:
        x: (..., in), of float16, bfloat16 or float32.
        factor_in: A, (rank, in), rank at most 128.
        factor_out: B, (out, rank).
        bias: (out,) or None.

    Returns:
        (..., out).

    Raises:
        KernelError: it cannot run here, or not with this rank or dtype.
    """
    if not fused_linear_available(x.device):
        raise KernelError(
            "fused_linear: not available without Triton and a GPU",
            got=str(x.device),
            allowed="cuda, with triton installed",
            remedy="Use SKLinear, which computes the same with two matrix products",
        )
    if len(factor_in) > LARGEST_RANK or x.dtype not in _DTYPES:
        raise KernelError(
            "fused_linear: unsupported rank or dtype",
            got=(len(factor_in), x.dtype),
            allowed=f"rank 1 to {LARGEST_RANK}; float16, bfloat16, float32",
            remedy="Use SKLinear",
        )
    from distributed_kernels.sketching.triton_linear import launch

    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y = launch(rows, factor_in.contiguous(), factor_out.contiguous(), bias)
    return y.view(*x.shape[:-1], len(factor_out))
