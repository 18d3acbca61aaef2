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
    from distributed_kernels.fused import fused_linear, fused_linear_available, use_fused_linear
    from distributed_kernels.linear import SKLinear
    from distributed_kernels.signs import SIGN_ALGORITHM, sketch_signs
    from distributed_kernels.sketched_mlp import DistributedSketchedModel, SketchedMLP
    from distributed_kernels.sketches import GivenSketch, SignSketch, Sketch
    from distributed_kernels.sync import check_sketch_sync, sketch_checksums, synchronize_sketches
    from distributed_kernels.tensor_parallel import (
        SKColwiseParallel,
        SKRowwiseParallel,
        TensorParallelSKLinear,
    )

_HOMES = {
    "CostlyError": "costs",
    "DistributedSketchedModel": "sketched_mlp",
    "GivenSketch": "sketches",
    "KernelError": "errors",
    "LayerReport": "factorize",
    "SIGN_ALGORITHM": "signs",
    "SKColwiseParallel": "tensor_parallel",
    "SKConv2d": "conv",
    "SKLinear": "linear",
    "SKRowwiseParallel": "tensor_parallel",
    "SignSketch": "sketches",
    "Sketch": "sketches",
    "SketchReport": "convert",
    "SketchedMLP": "sketched_mlp",
    "TensorParallelSKLinear": "tensor_parallel",
    "break_even_rank": "costs",
    "check_sketch_sync": "sync",
    "factorize_conv": "factorize",
    "factorize_linear": "factorize",
    "fused_linear": "fused",
    "fused_linear_available": "fused",
    "input_covariance": "calibration",
    "sketch_checksums": "sync",
    "sketch_model": "convert",
    "sketch_signs": "signs",
    "synchronize_sketches": "sync",
    "use_fused_linear": "fused",
}

__all__ = [
    "CostlyError",
    "DistributedSketchedModel",
    "GivenSketch",
    "KernelError",
    "LayerReport",
    "SIGN_ALGORITHM",
    "SKColwiseParallel",
    "SKConv2d",
    "SKLinear",
    "SKRowwiseParallel",
    "SignSketch",
    "Sketch",
    "SketchReport",
    "SketchedMLP",
    "TensorParallelSKLinear",
    "break_even_rank",
    "check_sketch_sync",
    "factorize_conv",
    "factorize_linear",
    "fused_linear",
    "fused_linear_available",
    "input_covariance",
    "sketch_checksums",
    "sketch_model",
    "sketch_signs",
    "synchronize_sketches",
    "use_fused_linear",
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
