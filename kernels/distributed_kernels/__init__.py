"""Attention and sketched-layer kernels; they import torch alone.

Public names are loaded when first used: what needs `torch.distributed.tensor` is slow to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed_kernels.calibration import input_covariance
    from distributed_kernels.conv import SKConv2d
    from distributed_kernels.convert import SketchReport, sketch_model
    from distributed_kernels.costs import CostlyError, break_even_rank
    from distributed_kernels.errors import KernelError
    from distributed_kernels.factorize import LayerReport, factorize_conv, factorize_linear
    from distributed_kernels.linear import SKLinear
    from distributed_kernels.signs import SIGN_ALGORITHM, sketch_signs
    from distributed_kernels.sketches import GivenSketch, SignSketch, Sketch

_HOMES = {
    "CostlyError": "costs",
    "GivenSketch": "sketches",
    "KernelError": "errors",
    "LayerReport": "factorize",
    "SIGN_ALGORITHM": "signs",
    "SKConv2d": "conv",
    "SKLinear": "linear",
    "SignSketch": "sketches",
    "Sketch": "sketches",
    "SketchReport": "convert",
    "break_even_rank": "costs",
    "factorize_conv": "factorize",
    "factorize_linear": "factorize",
    "input_covariance": "calibration",
    "sketch_model": "convert",
    "sketch_signs": "signs",
}

__all__ = [
    "CostlyError",
    "GivenSketch",
    "KernelError",
    "LayerReport",
    "SIGN_ALGORITHM",
    "SKConv2d",
    "SKLinear",
    "SignSketch",
    "Sketch",
    "SketchReport",
    "break_even_rank",
    "factorize_conv",
    "factorize_linear",
    "input_covariance",
    "sketch_model",
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
