"""Host memory into which a save copies the state, reused by later saves.

Fresh memory costs several times what copying costs: the system clears every page at its first touch. A thread
therefore allocates the buffers of the first save while training goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any


class HostBuffers:
    """Buffers that are lent to one export at a time, in the order in which it copies.

    A training state is copied in the same order and sizes every time; a buffer that does not fit
    is reallocated. The buffers hold as much memory as one export, from `reserve` on or from the first export.
    """

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._used, self._queued = 0, False
        self._planned: list[Any] | None = None
        self._reserving: threading.Thread | None = None

    def reserve(self, export: Callable[[], object]) -> None:
        """Allocate in a thread the memory into which `export` would copy, without copying.

        Args:
            export: calls `to_host` as the exports that follow will; what it returns is dropped.
        """
        self._planned = []
        token = _ACTIVE.set(self)
        try:
            export()
        except Exception:  # noqa: BLE001 - raised again by the save, which reports it
            self._planned = []
        finally:
            _ACTIVE.reset(token)
            planned, self._planned = self._planned, None
        kinds = [(tensor.numel(), tensor.dtype, tensor.is_cuda) for tensor in planned]
        self._reserving = threading.Thread(target=self._allocate, args=(kinds,), daemon=True)
        self._reserving.start()

    def _allocate(self, kinds: list[tuple[int, Any, bool]]) -> None:
        # Out of memory here is out of memory at the save, where it is reported.
        with suppress(RuntimeError):
            for numel, dtype, pinned in kinds:
                buffer = _empty(numel, dtype, pinned)
                self._kept.append(buffer if pinned else buffer.zero_())

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let `to_host` use the buffers in this thread. What the last export left in them is lost."""
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
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
        if self._planned is not None:
            self._planned.append(tensor)
            return tensor
        buffer = self._kept[self._used] if self._used < len(self._kept) else None
        if buffer is None or buffer.dtype != tensor.dtype or buffer.numel() != tensor.numel():
            buffer = _empty(tensor.numel(), tensor.dtype, tensor.is_cuda)
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


def _empty(numel: int, dtype: Any, pinned: bool) -> Any:
    import torch

    return torch.empty(numel, dtype=dtype, pin_memory=pinned)


_ACTIVE: ContextVar[HostBuffers | None] = ContextVar("host_buffers", default=None)


def to_host(tensor: Any) -> Any:
    """A copy of a 1-dimensional tensor in host memory; in lent buffers where there are some."""
    active = _ACTIVE.get()
    return tensor.to("cpu", copy=True) if active is None else active.copy(tensor)
