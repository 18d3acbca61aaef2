"""Recognise a failure by lack of memory, from what is known of it after the process has ended."""

from __future__ import annotations

import builtins
import errno
import re
from collections.abc import Collection

from distributed.errors import UserError, WorkerError

__all__ = ["bases_of", "is_killed", "is_out_of_memory", "lacks_memory"]

_TYPES = {"MemoryError", "_ArrayMemoryError", "OutOfMemoryError", "OutOfMemory"}
"""Classes of Python, NumPy and torch that report nothing else."""
_CARRIERS = {
    *("RuntimeError", "AcceleratorError", "DistBackendError", "OSError"),
    *("InductorError", "BackendCompilerFailed"),
}
"""Classes that report it by their message: of allocators, streams, NCCL, system calls and the compiler."""
_OTHERS = {
    *("NotImplementedError", "RecursionError"),
    *(
        name
        for name, kind in vars(builtins).items()
        if isinstance(kind, type) and issubclass(kind, OSError) and kind is not OSError
    ),
}
"""Classes of Python below these that report something else, such as FileNotFoundError, whatever they say."""
_MESSAGES = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory"  # c10/core/impl/alloc_cpu.cpp
    r"|\b(CUDA|HIP|XPU|MPS)( backend| driver)? (error: )?out of memory"
    r"|\bTriton Error \[\w+\]: out of memory|\bOutOfMemoryError: "
    r"|\b(Cuda|HIP|hip) failure (\d+ )?'?out of memory"  # NCCL, RCCL
    r"|\b(cuda|hip)ErrorOutOfMemory|\b(CU|HIP|ROC)\w*_ALLOC_FAILED|\bstd::bad_alloc"
    r"|\bUnable to allocate [\d.]+ \w+ for an array"  # NumPy
    r"|\[Errno 12\]|: Cannot allocate memory( \(12\))?(\.|$)",
    re.MULTILINE,
)


def is_out_of_memory(exc_type: str, text: str, bases: Collection[str] = ()) -> bool:
    """Whether an error reports that memory could not be allocated. Its classes decide; its text only where
    they say nothing of the reason, as a RuntimeError.

    Args:
        exc_type: name of its class.
        text: its message. Lines of a traceback in it are not read: a path or a comment may have any words.
        bases: names of the classes above, as far as they are known.
    """
    names = {exc_type, *bases}
    if names & _TYPES:
        return True
    says_nothing = bool(names & _CARRIERS) and not names & _OTHERS
    return says_nothing and _MESSAGES.search(_own_lines(text)) is not None


def bases_of(error: BaseException) -> list[str]:
    """Names of the classes above that of `error`, nearest first, without those that all errors have."""
    return [
        kind.__name__ for kind in type(error).__mro__[1:] if kind not in (Exception, BaseException, object)
    ]


def _own_lines(text: str) -> str:
    """`text` without the indented lines, which are those of files in a traceback."""
    return "\n".join(line.rstrip() for line in text.splitlines() if line and not line[0].isspace())


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
        return is_killed(error.exc_type) or is_out_of_memory(error.exc_type, error.summary, error.exc_bases)
    if isinstance(error, UserError):
        return False
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return is_out_of_memory(type(error).__name__, str(error), bases_of(error))
