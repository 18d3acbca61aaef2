"""Horovod's collectives with a wait that does not occupy a core.

Horovod's own wait (`hvd.synchronize`) polls without a pause: a rank that waits for a slower one occupies a
whole core, which the slower one lacks if the host has no other.
"""

from __future__ import annotations

import time
from typing import Any

import cloudpickle
import horovod.torch as hvd
import torch
from torch import Tensor

_LONGEST_PAUSE = 1e-3
"""Seconds between two polls at most; Horovod's background thread acts once in a millisecond."""


def wait(handle: int) -> Tensor:
    """Wait for a collective and return its result.

    Raises:
        HorovodInternalError: it failed.
    """
    pause = 0.0
    while not hvd.poll(handle):
        time.sleep(pause)
        pause = min(1.5 * pause + 1e-5, _LONGEST_PAUSE)
    result: Tensor = hvd.synchronize(handle)
    return result


def sum_in_place(tensor: Tensor, name: str) -> Tensor:
    """Replace `tensor` by its sum over all ranks, and return it."""
    return wait(hvd.allreduce_async_(tensor, op=hvd.Sum, name=name))


def barrier() -> None:
    """Wait until every rank has called it."""
    sum_in_place(torch.zeros(1), "barrier")


def broadcast_object(value: Any, root: int, name: str) -> Any:
    """The `value` of rank `root`."""
    data = _pickled(value) if hvd.rank() == root else torch.empty(0, dtype=torch.uint8)
    size = wait(hvd.broadcast_async_(torch.tensor([len(data)]), root, name=f"{name}.size"))
    if hvd.rank() != root:
        data = data.new_empty(int(size))
    return cloudpickle.loads(_bytes(wait(hvd.broadcast_async_(data, root, name=name))))


def gather_objects(value: Any, name: str) -> list[Any]:
    """Every rank's `value`, in rank order."""
    data = _pickled(value)
    sizes = wait(hvd.allgather_async(torch.tensor([len(data)]), name=f"{name}.size"))
    gathered = wait(hvd.allgather_async(data, name=name))
    return [cloudpickle.loads(_bytes(part)) for part in gathered.split(sizes.tolist())]


def _pickled(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(value)), dtype=torch.uint8)


def _bytes(data: Tensor) -> bytes:
    return data.numpy().tobytes()
