"""Measure the peak of live tensor bytes of a rank on CPU, exactly, from glibc's own counters.

Every allocation of `THRESHOLD` bytes or more is made a mapping of its own, so that glibc counts exactly what
is live: ``mallinfo2().hblkhd`` now, "max mmap bytes" of ``malloc_stats()`` at most since the process began.
No part of torch takes part in the measurement. It makes allocations slower for the rest of the process, and
is for ranks of a trial. Source: malloc_stats(3), mallinfo(3) and mallopt(3) of glibc 2.33 and later.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from distributed.interfaces.callback import Callback, Context

__all__ = ["MeasurePeak", "can_measure", "count_mappings", "live_bytes", "max_bytes", "peak_of"]

THRESHOLD = 16384
"""Bytes from which an allocation is a mapping of its own."""
_PROBED = 64 << 20
"""Bytes whose allocation shows in the counters of glibc. None of them is written."""
_M_MMAP_THRESHOLD = -3  # of malloc.h
_M_MMAP_MAX = -4
_counting = False
"""Whether `count_mappings` has been called in this process."""


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Mallinfo2
    return library


def can_measure() -> bool:
    """Whether the C library of this process is a glibc that counts what is allocated: an allocator that was
    loaded before it, such as jemalloc, leaves its counters at zero.

    In this process glibc may take the block from its heap, where an earlier run left enough free.
    """
    try:
        max_bytes()  # another allocator may have replaced the function
        before = _allocated_bytes()
        block = _allocate(_PROBED)
    except (AttributeError, OSError, TypeError):
        return False
    try:
        # Half of it: other threads may free memory meanwhile.
        return bool(block) and _allocated_bytes() >= before + _PROBED // 2
    finally:
        _libc().free(block)


def _allocated_bytes() -> int:
    """Bytes that are allocated, in the heap or as mappings."""
    counted = _libc().mallinfo2()
    return int(counted.uordblks + counted.hblkhd)


def _allocate(nbytes: int) -> ctypes.c_void_p:
    allocate = _libc().malloc
    allocate.argtypes, allocate.restype = [ctypes.c_size_t], ctypes.c_void_p
    return ctypes.c_void_p(allocate(nbytes))


def count_mappings() -> None:
    """Let glibc count allocations of this process from `THRESHOLD` bytes on, for good."""
    global _counting
    if not (_libc().mallopt(_M_MMAP_THRESHOLD, THRESHOLD) and _libc().mallopt(_M_MMAP_MAX, 1 << 24)):
        raise OSError("glibc refused the threshold of mappings")
    _counting = True


def live_bytes() -> int:
    """Bytes of the mappings that are live."""
    return int(_libc().mallinfo2().hblkhd)


def max_bytes() -> int:
    """Most bytes that were ever live at once in this process."""
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        try:
            os.dup2(file.fileno(), 2)
            _libc().malloc_stats()
        finally:
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        found = re.search(rb"max mmap bytes\s*=\s*(\d+)", file.read())
    if not found:
        raise OSError("malloc_stats() of this C library has another form")
    return int(found[1])


def mapped(nbytes: int) -> int:
    """Bytes of the mapping of a tensor: pages for it, the alignment to 64 bytes and glibc's own record."""
    return 0 if nbytes < THRESHOLD else -(-(nbytes + 64 + 32 + 16) // 4096) * 4096


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the mappings of the storages of `tensors`, each storage once."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if not t.is_meta]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return sum(map(mapped, sizes.values()))


class MeasurePeak(Callback):
    """Write the peak of live tensor bytes of each rank, as a number, to ``folder/rank-N``; no file where more
    was live before the first step.

    What is live at the end of the run beside its known tensors (the model, the optimizer's state, the
    buckets of DDP, what a codec keeps) is the process's own: objects of Python, and buffers that libraries
    keep from the first step on. It is taken off the peak. How large these buffers are depends on the
    processor, so that they do not count either where the peak is compared with that before the first step.
    Parameters that are mapped from a file are no allocation, at the peak or at the end; they are in what is
    written, because they are known.

    Attributes:
        is_counted: whether `count_mappings` had been called in the process that trained; nothing is written
            otherwise. None in other processes.
    """

    all_ranks = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_counted: bool | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In a rank: before the backend places the model."""
        vars(self).update(state)
        count_mappings()

    def on_run_start(self, context: Context) -> None:
        _settle_collectives()
        self.before, self.is_counted = max_bytes(), _counting
        self.own = live_bytes() - _known(context)

    def on_run_end(self, context: Context, status: str) -> None:
        peak, end = max_bytes(), live_bytes()
        if not self.is_counted:
            return
        known = _known(context)
        kept_by_libraries = max(0, end - known - self.own)
        if peak - kept_by_libraries <= self.before:
            return  # more was live before the first step than in training, and hides its peak
        (self.folder / f"rank-{context.world.rank}").write_text(str(peak - end + known), encoding="utf-8")


def peak_of(folder: Path, ranks: int) -> int | None:
    """The most that a rank wrote to `folder`, in bytes; None if one of `ranks` did not."""
    written = [int(file.read_text(encoding="utf-8")) for file in folder.glob("rank-*")]
    return max(written) if len(written) == ranks else None


def _settle_collectives() -> None:
    """Let collectives of FSDP2 and of the tensor axis return when gloo has dropped their tensors. A thread of
    gloo wakes the caller first, and drops them when the scheduler lets it continue: by then the caller may
    have allocated the next ones."""
    for place, name in (
        ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "foreach_all_gather"),
        ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "foreach_reduce"),
        ("distributed.parallel.collectives", "_done"),
    ):
        module = sys.modules.get(place)
        function = getattr(module, name, None)
        if function is not None and not hasattr(function, "settles"):
            setattr(module, name, _settled(function))


def _settled(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        while any(_is_running(task) for task in _gloo_threads()):
            os.sched_yield()
        return result

    call.settles = True  # type: ignore[attr-defined]
    return call


def _gloo_threads() -> list[Path]:
    tasks = Path("/proc/self/task").iterdir()
    return [task for task in tasks if (task / "comm").read_text().startswith("pt_gloo")]


def _is_running(task: Path) -> bool:
    """Whether a thread does something else than to wait for work."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0] != "S"


def _known(context: Context) -> int:
    """Bytes of the mappings of the tensors that the run keeps between steps."""
    states = context.optimizer.state  # its keys are copies of shards under ZeRO
    kept = [t for state in states.values() for t in state.values() if isinstance(t, torch.Tensor)]
    kept.extend(states)
    found = tensor_bytes([*context.model.parameters(), *context.model.buffers(), *kept])
    found += sum(map(mapped, _buckets(context)))
    return found + tensor_bytes([*_received(context), *_zero3_buffers(context), *_unsent(context)])


def _received(context: Context) -> list[torch.Tensor]:
    """What the stages of a pipeline receive into, which lasts as long as the run, and gradients of it, which
    are live until the next step."""
    pipeline = getattr(context.backend, "pipeline", None)
    schedule = getattr(pipeline, "_schedule", None)
    infos = [
        info
        for stage in (schedule._stages if schedule is not None else ())
        for table in (stage.args_recv_info, stage.grad_recv_info)
        for chunk in table.values()
        for info in chunk
    ]
    received = [info.buffer for info in infos if isinstance(info.buffer, torch.Tensor)]
    gradients = [buffer.grad for buffer in received if buffer.is_leaf]
    return [*received, *(gradient for gradient in gradients if gradient is not None)]


def _zero3_buffers(context: Context) -> list[torch.Tensor]:
    """What ZeRO stage 3 keeps: the shares of the parameters and of their gradients, and its bucket."""
    zero: Any = getattr(getattr(context.backend, "engine", None), "optimizer", None)
    if not hasattr(zero, "lp_param_buffer"):
        return []
    buckets = [bucket.buffer for bucket in zero.ipg_buckets.values() if bucket.buffer is not None]
    return [zero.lp_param_buffer, zero.grad_partitions_flat_buffer, *buckets]


def _unsent(context: Context) -> list[torch.Tensor]:
    """What a codec keeps between steps: residuals of gradients, and tensors of its own."""
    compression = getattr(context.backend, "compression", None)
    return [] if compression is None else compression.kept()


def _buckets(context: Context) -> list[int]:
    """Bytes of the buckets of DDP, as it logs them."""
    model = getattr(context.backend, "model", None)
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return []
    logged = model._get_ddp_logging_data()
    sizes = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
    return [int(size) for size in sizes.split(",")]
