"""Channels between the workers of asynchronous SGD and the parameter server.

A worker sends three kinds of requests: `READ` for parameters, `UPDATE` with an update, and `END` as the
last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from queue import SimpleQueue
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["END", "READ", "UPDATE", "Channel", "GroupServerEnd", "GroupWorkerEnd", "Packed", "QueueChannel"]

READ, UPDATE, END = 0, 1, 2

_ALIGNMENT = 16
_REQUEST_TAG, _DATA_TAG = 1, 2
_UNLIMITED = timedelta(days=365)
"""For what the server waits: a worker may compute for any time. If it hangs, the next collective fails."""


class Packed:
    """Tensors of any dtypes in one contiguous buffer on the host, which one message transfers.

    Args:
        shapes: shape and dtype by name.

    Attributes:
        buffer: uint8.
        tensors: views of it, by name.
    """

    def __init__(self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, (shape, dtype) in shapes.items():
            places[name] = end, end + shape.numel() * dtype.itemsize
            end = -(-places[name][1] // _ALIGNMENT) * _ALIGNMENT
        self.buffer = torch.zeros(end, dtype=torch.uint8)
        self.tensors: dict[str, Tensor] = {
            name: self.buffer[slice(*places[name])].view(dtype).view(shape)
            for name, (shape, dtype) in shapes.items()
        }


class Channel(Protocol):
    """One end of the connection between a worker and the server.

    Attributes:
        values: buffer for parameters, which the server sends.
        deltas: buffer for an update, which the worker sends.
    """

    values: Packed
    deltas: Packed


class QueueChannel(Channel):
    """Both ends, for a worker in the server's process: the buffers are shared.

    Raises:
        Exception: from `read`: what `fail` was called with.
    """

    def __init__(self, values: Packed, deltas: Packed) -> None:
        self.values, self.deltas = values, deltas
        self._requests: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._replies: SimpleQueue[BaseException | None] = SimpleQueue()

    def read(self, step: int) -> None:
        """Worker: wait for the parameters."""
        self._requests.put((READ, step))
        error = self._replies.get()
        if error is not None:
            raise error

    def update(self, step: int) -> None:
        """Worker: send `deltas`, which stay as they are until the next `read` has returned."""
        self._requests.put((UPDATE, step))

    def end(self) -> None:
        """Worker: send nothing more."""
        self._requests.put((END, 0))

    def receive(self) -> tuple[int, int]:
        """Server: wait for a request, and return its kind and the worker's step."""
        return self._requests.get()

    def reply(self) -> None:
        """Server: send `values`."""
        self._replies.put(None)

    def fail(self, error: BaseException) -> None:
        """Server: let the worker's `read` raise `error`."""
        self._replies.put(error)


class GroupWorkerEnd(Channel):
    """A worker's end of a connection by messages of gloo.

    Args:
        timeout: limit of the wait for parameters.
    """

    def __init__(self, values: Packed, deltas: Packed, timeout: timedelta) -> None:
        self.values, self.deltas, self._timeout = values, deltas, timeout

    def read(self, step: int) -> None:
        self._request(READ, step)
        _receive(self.values.buffer, 0, _DATA_TAG, self._timeout)

    def update(self, step: int) -> None:
        self._request(UPDATE, step)
        dist.send(self.deltas.buffer, 0, tag=_DATA_TAG)

    def end(self) -> None:
        self._request(END, 0)

    def _request(self, kind: int, step: int) -> None:
        dist.send(torch.tensor([kind, step]), 0, tag=_REQUEST_TAG)


class GroupServerEnd(Channel):
    """The server's end of a connection by messages of gloo.

    Args:
        worker: the rank at the other end.
    """

    def __init__(self, values: Packed, deltas: Packed, worker: int) -> None:
        self.values, self.deltas, self._worker = values, deltas, worker

    def receive(self) -> tuple[int, int]:
        request = torch.empty(2, dtype=torch.int64)
        _receive(request, self._worker, _REQUEST_TAG, _UNLIMITED)
        kind, step = request.tolist()
        if kind == UPDATE:
            _receive(self.deltas.buffer, self._worker, _DATA_TAG, _UNLIMITED)
        return kind, step

    def reply(self) -> None:
        dist.send(self.values.buffer, self._worker, tag=_DATA_TAG)

    def fail(self, error: BaseException) -> None:
        """The worker fails where the connection ends with this process."""


def _receive(tensor: Tensor, source: int, tag: int, timeout: timedelta) -> None:
    work = dist.irecv(tensor, source, tag=tag)
    assert work is not None
    work.wait(timeout)
