"""Asynchronous tensor parallelism: torch.compile overlaps the collectives of cut layers with their products.

It applies to plans with ``_sequence``, whose layers gather slices before a matrix product and scatter them
after one. torch offers it on CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["overlapped_collectives"]


@contextmanager
def overlapped_collectives(group: Any) -> Iterator[None]:
    """Let code compiled in the block overlap collectives over `group` with matrix products. Collective.

    Args:
        group: process group over GPUs that can read each other's memory.
    """
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(group.group_name)
    with inductor.patch(_micro_pipeline_tp=True):
        yield
