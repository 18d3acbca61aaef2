"""Host memory into which a save copies the state, reused by later saves.

Fresh memory costs several times what copying costs: the system clears every page at its first touch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


class HostBuffers:
    """Buffers that are lent to one export at a time, in the order in which it copies.

    A training state is copied in the same order and sizes every time; a buffer that does not fit
    is reallocated. The buffers hold as much memory as one export, from the first to the last.
    """

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._used, self._queued = 0, False

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let `to_host` use the buffers in this thread. What the last export left in them is lost."""
        self._used = 0
        token = _ACTIVE.set(self)
        try:
            yield
            self._wait()
        finally:
            _ACTIVE.reset(token)
            del self._kept[self._used :]

    def copy(self, tensor: Any) -> Any:
        """A copy of a 1-dimensional tensor in the next buffer."""
        buffer = self._kept[self._used] if self._used < len(self._kept) else None
        if buffer is None or buffer.dtype != tensor.dtype or buffer.numel() != tensor.numel():
            import torch

            buffer = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._kept[self._used : self._used + 1] = [buffer]
        self._used += 1
        self._queued = self._queued or tensor.is_cuda
        # From a GPU into pinned memory the copies are queued, and waited for together.
        return buffer.copy_(tensor, non_blocking=tensor.is_cuda)

    def _wait(self) -> None:
        if self._queued:
            import torch

            self._queued = False

            torch.cuda.synchronize()


_ACTIVE: ContextVar[HostBuffers | None] = ContextVar("host_buffers", default=None)


def to_host(tensor: Any) -> Any:
    """A copy of a 1-dimensional tensor in host memory; in lent buffers where there are some."""
    active = _ACTIVE.get()
    return tensor.to("cpu", copy=True) if active is None else active.copy(tensor)
