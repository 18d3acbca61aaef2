"""Recognise a failure by lack of memory, from what is known of it after the process has ended."""

from __future__ import annotations

from distributed.errors import UserError, WorkerError

__all__ = ["is_killed", "is_out_of_memory", "lacks_memory"]

_WORDS = (
    *("memoryerror", "outofmemory", "out of memory", "bad_alloc", "alloc_failed"),
    *("can't allocate memory", "cannot allocate memory", "unable to allocate"),
)
"""Words in the errors of Python, torch (CPUAllocator, CUDACachingAllocator), C++, cuBLAS, NumPy and mmap."""


def is_out_of_memory(exc_type: str, text: str) -> bool:
    """Whether an error reports that memory could not be allocated.

    Args:
        exc_type: name of its class.
        text: its message.
    """
    words = f"{exc_type} {text}".lower()
    return any(word in words for word in _WORDS)


def is_killed(exc_type: str) -> bool:
    """Whether a process was ended by SIGKILL, as the kernel ends one for lack of memory; a scheduler and a
    user may, too.

    Args:
        exc_type: name of the signal that ended it, or of an exception's class.
    """
    return exc_type == "SIGKILL"


def lacks_memory(error: BaseException) -> bool:
    """Whether a run failed by lack of memory, or was ended as the kernel does for lack of it."""
    if isinstance(error, WorkerError):
        return is_killed(error.exc_type) or is_out_of_memory(error.exc_type, str(error))
    return not isinstance(error, UserError) and is_out_of_memory(type(error).__name__, str(error))
