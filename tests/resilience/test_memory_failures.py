"""Lack of memory is read from an error's type and message, and not from paths or source lines."""

from __future__ import annotations

import errno

import numpy as np
import pytest
import torch

from distributed.errors import UserError, WorkerError
from distributed.resilience.failure_reports import FailureReport
from distributed.resilience.memory_failures import is_out_of_memory, lacks_memory

_HUGE = 1 << 58
_LOADER = """Caught RuntimeError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "worker.py", line 5, in fetch
    data = fetcher.fetch(index)
RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you \
tried to allocate 134217728 bytes. Error code 12 (Cannot allocate memory)"""
_NCCL = """NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 2 'out of memory'"""

REPORTS = [
    ("RuntimeError", "CUDA driver error: out of memory"),
    ("RuntimeError", "Triton Error [CUDA]: out of memory"),
    ("InductorError", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
    ("RuntimeError", "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling hipblasCreate(handle)"),
    ("RuntimeError", "cuFFT error: CUFFT_ALLOC_FAILED"),
    ("MemoryError", ""),
    (
        "OutOfMemoryError",
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB",
    ),
    ("_ArrayMemoryError", "Unable to allocate 8.00 EiB for an array with shape (1,) and data type float64"),
    ("RuntimeError", "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    ("AcceleratorError", "CUDA error: out of memory"),
    ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ("RuntimeError", "HIP out of memory. Tried to allocate 2.00 GiB"),
    ("RuntimeError", "std::bad_alloc"),
    ("RuntimeError", "unable to mmap 1024 bytes from file </torch_1_2_3>: Cannot allocate memory (12)"),
    ("OSError", "[Errno 12] Cannot allocate memory"),
    ("DistBackendError", _NCCL),
    ("RuntimeError", _LOADER),
]
OTHERS = [
    (
        "FileNotFoundError",
        "[Errno 2] No such file or directory: '/data/cannot allocate memory/out of memory.txt'",
    ),
    ("KeyError", "'out of memory'"),
    ("ValueError", "MemoryError is no loss"),
    (
        "RuntimeError",
        "Caught KeyError\n  File 'out.py', line 3\n    raise x  # CUDA error: out of memory\nKeyError: 1",
    ),
    (
        "Hang",
        "did not reach the collective for 9 s. As a consequence, rank 1 raised RuntimeError: std::bad_alloc",
    ),
]


@pytest.mark.parametrize(("exc_type", "text"), REPORTS)
def test_each_allocator_is_recognised(exc_type: str, text: str) -> None:
    assert is_out_of_memory(exc_type, text)
    assert lacks_memory(worker_error(exc_type, text))


@pytest.mark.parametrize(("exc_type", "text"), OTHERS)
def test_other_errors_are_not_taken_for_it(exc_type: str, text: str) -> None:
    assert not is_out_of_memory(exc_type, text)
    assert not lacks_memory(worker_error(exc_type, text))


def worker_error(exc_type: str, text: str) -> WorkerError:
    """As a launcher makes it of a rank's report."""
    summary = f"rank 1 (host, pid 7) raised {exc_type}: {text}. Rank 1 was in forward of step 1."
    trace = f'File "/home/x/out of memory/MemoryError.py", line 1\n    fit()  # bad_alloc\n{exc_type}'
    return WorkerError(summary, rank=1, host="host", exc_type=exc_type, worker_traceback=trace)


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: bytearray(_HUGE),
        lambda: np.empty(_HUGE, dtype=np.int8),
        lambda: torch.empty(_HUGE, dtype=torch.int8),
    ],
    ids=["python", "numpy", "torch"],
)
def test_what_is_raised_here_is_recognised(allocate: object) -> None:
    with pytest.raises((MemoryError, RuntimeError)) as raised:
        allocate()  # type: ignore[operator]
    assert lacks_memory(raised.value)
    assert is_out_of_memory(type(raised.value).__name__, str(raised.value))


def test_system_calls_are_told_apart_by_their_number() -> None:
    assert lacks_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not lacks_memory(
        FileNotFoundError(errno.ENOENT, "No such file", "out of memory: Cannot allocate memory")
    )
    assert not lacks_memory(UserError("CUDA out of memory"))


class PoolExhausted(torch.OutOfMemoryError):
    """As an allocator of a third party raises."""


class NoRoom(MemoryError):
    pass


class KernelFailed(RuntimeError):
    pass


class BadPath(FileNotFoundError):
    pass


class NoSuchFormat(NotImplementedError):
    pass


CUDA_TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB"
CLASSES = [
    (PoolExhausted("the pool has no block left"), True),
    (NoRoom("the table is full"), True),
    (KernelFailed(CUDA_TEXT), True),  # its class says nothing of the reason
    (KernelFailed("out of memory of ideas"), False),
    (BadPath(errno.ENOENT, "/data: Cannot allocate memory"), False),
    (NoSuchFormat(CUDA_TEXT), False),
    (KeyError(CUDA_TEXT), False),
]


@pytest.mark.parametrize(("error", "lacks"), CLASSES, ids=[type(error).__name__ for error, _ in CLASSES])
def test_classes_decide_before_the_text(error: Exception, lacks: bool) -> None:
    """Here, and after the report of a rank has travelled twice."""
    assert lacks_memory(error) == lacks
    report = FailureReport.from_json(FailureReport.from_error(error, 1).to_json())
    travelled = report.to_error()
    assert lacks_memory(travelled) == lacks
    again = FailureReport.from_json(FailureReport.from_error(travelled, 0).to_json()).to_error()
    assert lacks_memory(again) == lacks


def test_a_report_without_classes_is_judged_by_its_name() -> None:
    """As one that a launcher writes for a rank that left none."""
    assert is_out_of_memory("OutOfMemoryError", "")
    assert not is_out_of_memory("PoolExhausted", "the pool has no block left")
