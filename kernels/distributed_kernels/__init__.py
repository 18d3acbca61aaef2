"""Attention and sketched-layer kernels; they import torch alone.

Public names are loaded when first used: what needs `torch.distributed.tensor` is slow to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed_kernels.attention.block_kernels import chosen_blocks, use_blocks
    from distributed_kernels.attention.block_sparse import block_sparse_attention
    from distributed_kernels.attention.dense import attention_with_lse, merge_attention
    from distributed_kernels.attention.dilated import dilated_attention
    from distributed_kernels.attention.language_model import (
        PRESETS,
        DilatedLanguageModel,
        create_distributed_model,
    )
    from distributed_kernels.attention.modules import (
        BlockSparseRingDistributedDilatedAttention,
        DilatedTransformerBlock,
        DistributedImprovedMultiheadDilatedAttention,
        DistributedMultiheadDilatedAttention,
        MultiheadDilatedAttention,
        RingDistributedDilatedAttention,
    )
    from distributed_kernels.attention.patterns import block_density, block_pattern
    from distributed_kernels.attention.ring import (
        ring_attention,
        zigzag_gather,
        zigzag_positions,
        zigzag_slice,
    )
    from distributed_kernels.attention.ring_exchange import Traffic, count_traffic
    from distributed_kernels.attention.sparse_dilated import block_sparse_dilated_attention
    from distributed_kernels.attention.ulysses import ulysses_attention
    from distributed_kernels.errors import KernelError
    from distributed_kernels.sketching.calibration import input_covariance
    from distributed_kernels.sketching.conv import SKConv2d
    from distributed_kernels.sketching.convert_model import SketchReport, sketch_model
    from distributed_kernels.sketching.costs import CostlyError, break_even_rank
    from distributed_kernels.sketching.factorize import factorize_conv, factorize_linear
    from distributed_kernels.sketching.frozen_sketches import GivenSketch, SignSketch, Sketch
    from distributed_kernels.sketching.fused import fused_linear, fused_linear_available, use_fused_linear
    from distributed_kernels.sketching.layer_report import LayerReport
    from distributed_kernels.sketching.linear import SKLinear
    from distributed_kernels.sketching.mlp import DistributedSketchedModel, SketchedMLP
    from distributed_kernels.sketching.random_signs import SIGN_ALGORITHM, sketch_signs
    from distributed_kernels.sketching.sketch_sync import (
        check_sketch_sync,
        sketch_checksums,
        synchronize_sketches,
    )
    from distributed_kernels.sketching.tensor_parallel import (
        SKColwiseParallel,
        SKRowwiseParallel,
        TensorParallelSKLinear,
    )

_HOMES = {
    "BlockSparseRingDistributedDilatedAttention": "attention.modules",
    "CostlyError": "sketching.costs",
    "DilatedLanguageModel": "attention.language_model",
    "DilatedTransformerBlock": "attention.modules",
    "DistributedImprovedMultiheadDilatedAttention": "attention.modules",
    "DistributedMultiheadDilatedAttention": "attention.modules",
    "DistributedSketchedModel": "sketching.mlp",
    "GivenSketch": "sketching.frozen_sketches",
    "KernelError": "errors",
    "LayerReport": "sketching.factorize",
    "MultiheadDilatedAttention": "attention.modules",
    "PRESETS": "attention.language_model",
    "RingDistributedDilatedAttention": "attention.modules",
    "SIGN_ALGORITHM": "sketching.random_signs",
    "SKColwiseParallel": "sketching.tensor_parallel",
    "SKConv2d": "sketching.conv",
    "SKLinear": "sketching.linear",
    "SKRowwiseParallel": "sketching.tensor_parallel",
    "SignSketch": "sketching.frozen_sketches",
    "Sketch": "sketching.frozen_sketches",
    "SketchReport": "sketching.convert_model",
    "SketchedMLP": "sketching.mlp",
    "TensorParallelSKLinear": "sketching.tensor_parallel",
    "Traffic": "attention.ring_exchange",
    "attention_with_lse": "attention.dense",
    "block_density": "attention.patterns",
    "block_pattern": "attention.patterns",
    "block_sparse_attention": "attention.block_sparse",
    "block_sparse_dilated_attention": "attention.sparse_dilated",
    "break_even_rank": "sketching.costs",
    "check_sketch_sync": "sketching.sketch_sync",
    "chosen_blocks": "attention.block_kernels",
    "count_traffic": "attention.ring_exchange",
    "create_distributed_model": "attention.language_model",
    "dilated_attention": "attention.dilated",
    "factorize_conv": "sketching.factorize",
    "factorize_linear": "sketching.factorize",
    "fused_linear": "sketching.fused",
    "fused_linear_available": "sketching.fused",
    "input_covariance": "sketching.calibration",
    "merge_attention": "attention.dense",
    "ring_attention": "attention.ring",
    "sketch_checksums": "sketching.sketch_sync",
    "sketch_model": "sketching.convert_model",
    "sketch_signs": "sketching.random_signs",
    "synchronize_sketches": "sketching.sketch_sync",
    "ulysses_attention": "attention.ulysses",
    "use_blocks": "attention.block_kernels",
    "use_fused_linear": "sketching.fused",
    "zigzag_gather": "attention.ring",
    "zigzag_positions": "attention.ring",
    "zigzag_slice": "attention.ring",
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
