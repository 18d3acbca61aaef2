"""Attention and sketched-layer kernels; they import torch alone."""

from __future__ import annotations

from distributed_kernels.block_sparse import block_sparse_attention
from distributed_kernels.blocks import chosen_blocks, use_blocks
from distributed_kernels.comm import Traffic, count_traffic
from distributed_kernels.dense import attention_with_lse, merge_attention
from distributed_kernels.dilated import dilated_attention
from distributed_kernels.errors import KernelError
from distributed_kernels.patterns import block_density, block_pattern

__all__ = [
    "KernelError",
    # Attention
    "Traffic",
    "attention_with_lse",
    "block_density",
    "block_pattern",
    "block_sparse_attention",
    "chosen_blocks",
    "count_traffic",
    "dilated_attention",
    "merge_attention",
    "use_blocks",
]
