"""DeviceMemory: how a device and its libraries turn tensors into memory."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CUDA", "EXACT", "GPU", "HOST", "MAPPED_CPU", "DeviceMemory"]


@dataclass(frozen=True)
class DeviceMemory:
    """Allocator and communication library of a device.

    Attributes:
        granule: sizes are rounded up to multiples of it, in bytes.
        overhead: bytes that the allocator adds before rounding.
        smallest: tensors with fewer bytes are not counted.
        copies_in_collectives: whether an all-gather receives into memory of its own, and a reduce-scatter
            adds in a copy of its input, as under gloo.
        segment: most bytes of each of the two pieces that an all-reduce has in memory of its own, as under
            gloo; 0 for none.
        framework_bytes: what libraries take whatever the model, in bytes.
        workspace_bytes: what matrix products keep in the memory of the allocator once they have run.
        reserved: what the allocator reserves beyond what is live, as a share of it.
        spread: relative half-width of the interval around a prediction from facts of a model.
        spread_bytes: what is added to it on both sides, for staging memory of collectives whose order is not
            known.
    """

    granule: int = 1
    overhead: int = 0
    smallest: int = 0
    copies_in_collectives: bool = False
    framework_bytes: int = 0
    workspace_bytes: int = 0
    segment: int = 0
    reserved: float = 0.0
    spread: float = 0.01
    spread_bytes: int = 0

    def taken(self, nbytes: int) -> int:
        """Bytes of the device for a tensor of `nbytes`."""
        if nbytes < max(1, self.smallest):
            return 0
        return -(-(nbytes + self.overhead) // self.granule) * self.granule

    def scratch_of_sum(self, nbytes: int, ranks: int) -> int:
        """Bytes that an all-reduce of `nbytes` over `ranks` allocates besides. Source: gloo/allreduce.cc,
        ``ring``."""
        if not self.segment or ranks < 2 or not nbytes:
            return 0
        segments = max(-(-nbytes // self.segment), 2 * ranks)
        segments = -(-segments // ranks) * ranks
        return 2 * -(-nbytes // segments)


EXACT = DeviceMemory()
"""Bytes of tensors as they are, without copies in collectives."""

HOST = DeviceMemory(copies_in_collectives=True, segment=2**20, spread_bytes=2**20)
"""Tensors of CPU ranks as they are, with the copies that gloo makes. Measured runs were off by up to 0.7 MiB
more than by 1 %."""

_WORKSPACES = 2 * 32 * 2**20
"""The workspace of cuBLAS for the thread of forward and for that of backward, on GPUs of compute capability 9
(aten/src/ATen/cuda/CublasHandlePool.cpp, ``parseChosenWorkspaceSize``). Older ones have a quarter of it, and
predictions for them are 48 MiB too high."""

CUDA = DeviceMemory(granule=512, workspace_bytes=_WORKSPACES, spread=0.05)
"""Blocks of torch's caching allocator (c10/cuda/CUDACachingAllocator.cpp, ``kMinBlockSize``). What it
reserves in segments beyond them depends on the order of all earlier sizes, and is not included."""

GPU = DeviceMemory(granule=512, framework_bytes=10**9, workspace_bytes=_WORKSPACES, reserved=0.2, spread=0.1)
"""`CUDA`, with a context and communicators, and with segments that are reserved: runs of torchtitan log 1.18
and 1.22 times the live bytes as the largest reservation (Llama 3 8B on 128 and 8 H100). Live
bytes of 25 runs on an H200 were off by at most 3.4 % (docs/predicted-memory.md)."""

MAPPED_CPU = DeviceMemory(
    granule=4096, overhead=112, smallest=16384, copies_in_collectives=True, segment=2**20
)
"""gloo, and glibc with a mapping for each tensor of 16 KiB or more: torch's alignment to 64 bytes and glibc's
record of 48 bytes, in whole pages (malloc/malloc.c of glibc, ``_int_memalign`` and ``sysmalloc_mmap``;
ProcessGroupGloo.cpp of torch 2.13, ``allgather_into_tensor_coalesced`` and
``reduce_scatter_tensor_coalesced``)."""
