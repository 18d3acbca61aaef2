"""Kernels of attention, sketched layers and experts; they import torch alone.

Tensor-parallel layers are loaded when first used: they import `torch.distributed.tensor`, which is slow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from distributed_kernels.attention.pair_patterns import PairPattern, documents, sliding_window
from distributed_kernels.attention.pattern_attention import pattern_attention
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
from distributed_kernels.experts.layers import Experts, MoELayer, TopKRouter
from distributed_kernels.sketching.calibration import input_covariance
from distributed_kernels.sketching.conv import SKConv2d
from distributed_kernels.sketching.convert_model import SketchReport, sketch_model
from distributed_kernels.sketching.costs import CostlyError, LayerReport, break_even_rank
from distributed_kernels.sketching.factorize import factorize_conv, factorize_linear
from distributed_kernels.sketching.frozen_sketches import GivenSketch, SignSketch, Sketch
from distributed_kernels.sketching.fused import fused_linear, fused_linear_available, use_fused_linear
from distributed_kernels.sketching.linear import SKLinear
from distributed_kernels.sketching.mlp import DistributedSketchedModel, SketchedMLP
from distributed_kernels.sketching.pipeline_model import PipelineParallelSketchedModel
from distributed_kernels.sketching.random_signs import SIGN_ALGORITHM, sketch_signs
from distributed_kernels.sketching.sketch_sync import (
    check_sketch_sync,
    sketch_checksums,
    synchronize_sketches,
)

if TYPE_CHECKING:
    from distributed_kernels.sketching.tensor_parallel import (
        SKColwiseParallel,
        SKRowwiseParallel,
        TensorParallelSKLinear,
    )

__all__ = [
    "BlockSparseRingDistributedDilatedAttention",
    "CostlyError",
    "DilatedLanguageModel",
    "DilatedTransformerBlock",
    "DistributedImprovedMultiheadDilatedAttention",
    "DistributedMultiheadDilatedAttention",
    "DistributedSketchedModel",
    "Experts",
    "GivenSketch",
    "KernelError",
    "LayerReport",
    "MoELayer",
    "MultiheadDilatedAttention",
    "PRESETS",
    "PairPattern",
    "PipelineParallelSketchedModel",
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
    "TopKRouter",
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
    "documents",
    "factorize_conv",
    "factorize_linear",
    "fused_linear",
    "fused_linear_available",
    "input_covariance",
    "merge_attention",
    "pattern_attention",
    "ring_attention",
    "sketch_checksums",
    "sketch_model",
    "sketch_signs",
    "sliding_window",
    "synchronize_sketches",
    "ulysses_attention",
    "use_blocks",
    "use_fused_linear",
    "zigzag_gather",
    "zigzag_positions",
    "zigzag_slice",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'distributed_kernels' has no attribute {name!r}")
    return getattr(import_module("distributed_kernels.sketching.tensor_parallel"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
