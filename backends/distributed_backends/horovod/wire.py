"""HorovodWire: the collectives of gradient codecs, by Horovod."""

from __future__ import annotations

from itertools import count
from typing import Any

import horovod.torch as hvd
from torch import Tensor

from distributed.communication.wire import Reply
from distributed_backends.horovod.collectives import wait


class HorovodWire:
    """A `distributed.communication.wire.Wire` between all ranks of Horovod.

    The ranks start the same collectives in the same order, so that a number names them.
    """

    def __init__(self) -> None:
        self.rank, self.size = hvd.rank(), hvd.size()
        self._numbers = count()

    def sum(self, values: Tensor) -> Reply:
        return _reply(hvd.allreduce_async_(values, op=hvd.Sum, name=self._name()), values)

    def gather(self, payload: Tensor) -> Reply:
        handle = hvd.allgather_async(payload, name=self._name())
        return Reply(lambda: wait(handle).view(self.size, -1))

    def scatter(self, parts: Tensor) -> Reply:
        handle: Any = hvd.alltoall_async(parts.view(-1), name=self._name())

        def received() -> Tensor:
            found: Any = wait(handle)
            flat: Tensor = found[0] if isinstance(found, tuple) else found
            return flat.view(self.size, -1)

        return Reply(received)

    def _name(self) -> str:
        return f"codec.{next(self._numbers)}"


def _reply(handle: int, result: Tensor) -> Reply:
    def received() -> Tensor:
        wait(handle)
        return result

    return Reply(received)
