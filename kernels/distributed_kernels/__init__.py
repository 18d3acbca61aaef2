"""Attention and sketched-layer kernels; they import torch alone."""

from __future__ import annotations

from distributed_kernels.block_sparse import block_sparse_attention
from distributed_kernels.blocks import chosen_blocks, use_blocks
from distributed_kernels.comm import Traffic, count_traffic
from distributed_kernels.dense import attention_with_lse, merge_attention
from distributed_kernels.dilated import dilated_attention
from distributed_kernels.errors import KernelError
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
from distributed_kernels.sparse_dilated import block_sparse_dilated_attention
from distributed_kernels.ulysses import ulysses_attention

__all__ = [
    "KernelError",
    # Attention
    "BlockSparseRingDistributedDilatedAttention",
    "DilatedTransformerBlock",
    "DistributedImprovedMultiheadDilatedAttention",
    "DistributedMultiheadDilatedAttention",
    "MultiheadDilatedAttention",
    "RingDistributedDilatedAttention",
    "Traffic",
    "attention_with_lse",
    "block_density",
    "block_pattern",
    "block_sparse_attention",
    "block_sparse_dilated_attention",
    "chosen_blocks",
    "count_traffic",
    "dilated_attention",
    "merge_attention",
    "ring_attention",
    "ulysses_attention",
    "use_blocks",
    "zigzag_gather",
    "zigzag_positions",
    "zigzag_slice",
]
