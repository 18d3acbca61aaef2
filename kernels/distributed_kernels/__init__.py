"""Attention and sketched-layer kernels; they import torch alone.

Public names are loaded when first used: what needs `torch.distributed.tensor` is slow to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed_kernels.costs import break_even_rank
    from distributed_kernels.errors import KernelError
    from distributed_kernels.linear import SKLinear
    from distributed_kernels.signs import SIGN_ALGORITHM, sketch_signs
    from distributed_kernels.sketches import GivenSketch, SignSketch, Sketch

_HOMES = {
    "GivenSketch": "sketches",
    "KernelError": "errors",
    "SIGN_ALGORITHM": "signs",
    "SKLinear": "linear",
    "SignSketch": "sketches",
    "Sketch": "sketches",
    "break_even_rank": "costs",
    "sketch_signs": "signs",
}

__all__ = [
    "GivenSketch",
    "KernelError",
    "SIGN_ALGORITHM",
    "SKLinear",
    "SignSketch",
    "Sketch",
    "break_even_rank",
    "sketch_signs",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'distributed_kernels' has no attribute {name!r}")
    value = getattr(import_module(f"distributed_kernels.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
