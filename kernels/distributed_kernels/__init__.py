"""Attention and sketched-layer kernels; they import torch alone.

Public names are loaded when first used: what needs `torch.distributed.tensor` is slow to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed_kernels.block_sparse import block_sparse_attention
    from distributed_kernels.blocks import chosen_blocks, use_blocks
    from distributed_kernels.calibration import input_covariance
    from distributed_kernels.comm import Traffic, count_traffic
    from distributed_kernels.conv import SKConv2d
    from distributed_kernels.convert import SketchReport, sketch_model
    from distributed_kernels.costs import CostlyError, break_even_rank
    from distributed_kernels.dense import attention_with_lse, merge_attention
    from distributed_kernels.dilated import dilated_attention
    from distributed_kernels.errors import KernelError
    from distributed_kernels.factorize import LayerReport, factorize_conv, factorize_linear
    from distributed_kernels.fused import fused_linear, fused_linear_available, use_fused_linear
    from distributed_kernels.language_model import PRESETS, DilatedLanguageModel, create_distributed_model
    from distributed_kernels.linear import SKLinear
    from distributed_kernels.modules import (
        BlockSparseRingDistributedDilatedAttention,
        DilatedTransformerBlock,
        DistributedImprovedMultiheadDilatedAttention,
        DistributedMultiheadDilatedAttention,
        MultiheadDilatedAttention,
        RingDistributedDilatedAttention,
    )
    from distributed_kernels.patterns import block_density, block_pattern
    from distributed_kernels.ring import ring_attention, zigzag_gather, zigzag_positions, zigzag_slice
    from distributed_kernels.signs import SIGN_ALGORITHM, sketch_signs
    from distributed_kernels.sketched_mlp import DistributedSketchedModel, SketchedMLP
    from distributed_kernels.sketches import GivenSketch, SignSketch, Sketch
    from distributed_kernels.sparse_dilated import block_sparse_dilated_attention
    from distributed_kernels.sync import check_sketch_sync, sketch_checksums, synchronize_sketches
    from distributed_kernels.tensor_parallel import (
        SKColwiseParallel,
        SKRowwiseParallel,
        TensorParallelSKLinear,
    )
    from distributed_kernels.ulysses import ulysses_attention

_HOMES = {
    "BlockSparseRingDistributedDilatedAttention": "modules",
    "CostlyError": "costs",
    "DilatedLanguageModel": "language_model",
    "DilatedTransformerBlock": "modules",
    "DistributedImprovedMultiheadDilatedAttention": "modules",
    "DistributedMultiheadDilatedAttention": "modules",
    "DistributedSketchedModel": "sketched_mlp",
    "GivenSketch": "sketches",
    "KernelError": "errors",
    "LayerReport": "factorize",
    "MultiheadDilatedAttention": "modules",
    "PRESETS": "language_model",
    "RingDistributedDilatedAttention": "modules",
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
    "Traffic": "comm",
    "attention_with_lse": "dense",
    "block_density": "patterns",
    "block_pattern": "patterns",
    "block_sparse_attention": "block_sparse",
    "block_sparse_dilated_attention": "sparse_dilated",
    "break_even_rank": "costs",
    "check_sketch_sync": "sync",
    "chosen_blocks": "blocks",
    "count_traffic": "comm",
    "create_distributed_model": "language_model",
    "dilated_attention": "dilated",
    "factorize_conv": "factorize",
    "factorize_linear": "factorize",
    "fused_linear": "fused",
    "fused_linear_available": "fused",
    "input_covariance": "calibration",
    "merge_attention": "dense",
    "ring_attention": "ring",
    "sketch_checksums": "sync",
    "sketch_model": "convert",
    "sketch_signs": "signs",
    "synchronize_sketches": "sync",
    "ulysses_attention": "ulysses",
    "use_blocks": "blocks",
    "use_fused_linear": "fused",
    "zigzag_gather": "ring",
    "zigzag_positions": "ring",
    "zigzag_slice": "ring",
}

__all__ = [
    "BlockSparseRingDistributedDilatedAttention",
    "CostlyError",
    "DilatedLanguageModel",
    "DilatedTransformerBlock",
    "DistributedImprovedMultiheadDilatedAttention",
    "DistributedMultiheadDilatedAttention",
    "DistributedSketchedModel",
    "GivenSketch",
    "KernelError",
    "LayerReport",
    "MultiheadDilatedAttention",
    "PRESETS",
    "RingDistributedDilatedAttention",
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
    "Traffic",
    "attention_with_lse",
    "block_density",
    "block_pattern",
    "block_sparse_attention",
    "block_sparse_dilated_attention",
    "break_even_rank",
    "check_sketch_sync",
    "chosen_blocks",
    "count_traffic",
    "create_distributed_model",
    "dilated_attention",
    "factorize_conv",
    "factorize_linear",
    "fused_linear",
    "fused_linear_available",
    "input_covariance",
    "merge_attention",
    "ring_attention",
    "sketch_checksums",
    "sketch_model",
    "sketch_signs",
    "synchronize_sketches",
    "ulysses_attention",
    "use_blocks",
    "use_fused_linear",
    "zigzag_gather",
    "zigzag_positions",
    "zigzag_slice",
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
