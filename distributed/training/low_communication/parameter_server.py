"""ParameterServer: the parameters of asynchronous SGD, and the threads that apply updates to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from queue import SimpleQueue
from threading import Condition, Thread
from typing import NamedTuple, Protocol

from torch import Tensor

from distributed.training.low_communication.channels import READ, UPDATE, Channel
from distributed.training.low_communication.staleness import StalenessBound

__all__ = ["Arrival", "ParameterServer", "ServerEnd"]


class ServerEnd(Channel, Protocol):
    """The server's side of a `Channel`."""

    def receive(self) -> tuple[int, int]:
        """Wait for a request, and return its kind and the worker's step."""

    def reply(self) -> None:
        """Send `values`."""

    def fail(self, error: BaseException) -> None:
        """Let the worker, if it can be reached, raise `error`."""


class Arrival(NamedTuple):
    """An update that was applied.

    Attributes:
        update: number of updates applied before, since the server was started.
        worker: the rank that sent it.
        step: optimizer step of that rank.
        staleness: number of updates applied after that rank had read the parameters.
    """

    update: int
    worker: int
    step: int
    staleness: int


class ParameterServer:
    """Sends parameters to workers, and subtracts their updates in the order of arrival, each from the
    parameters as they are at that time. A thread per worker serves its requests in turn.

    Args:
        parameters: by name, on the host; changed in place.
        workers: the server's ends of the connections, by rank.
        limit: the largest staleness; a worker waits rather than exceed it.
        arrived: called with each update, one at a time.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        workers: Mapping[int, ServerEnd],
        limit: int,
        arrived: Callable[[Arrival], None],
    ) -> None:
        self._parameters, self._workers, self._arrived = parameters, workers, arrived
        self.bound = StalenessBound(limit)
        self._changed = Condition()
        self._ended: SimpleQueue[int] = SimpleQueue()
        self._error: BaseException | None = None
        self._threads = [
            Thread(target=self._serve, args=(rank,), name=f"parameter-server-{rank}", daemon=True)
            for rank in workers
        ]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Wait until all workers have ended and their updates are applied.

        Raises:
            Exception: that of a worker's connection.
        """
        for _ in self._threads:
            self._ended.get()
            if self._error is not None:
                raise self._error

    def _serve(self, rank: int) -> None:
        """Serve one worker until it ends."""
        channel = self._workers[rank]
        try:
            while True:
                kind, step = channel.receive()
                if kind == READ:
                    self._give(rank)
                elif kind == UPDATE:
                    self._apply(rank, step)
                else:
                    return
        except BaseException as error:  # noqa: BLE001 - raised by `finish`, and by the local worker
            self._fail(error)
        finally:
            self._ended.put(rank)

    def _give(self, rank: int) -> None:
        channel = self._workers[rank]
        with self._changed:
            self._await(self.bound.may_read)
            self.bound.read(rank)
            for name, value in channel.values.tensors.items():
                value.copy_(self._parameters[name])
        channel.reply()

    def _apply(self, rank: int, step: int) -> None:
        with self._changed:
            self._await(lambda: self.bound.may_apply(rank))
            for name, delta in self._workers[rank].deltas.tensors.items():
                parameter = self._parameters[name]
                parameter.copy_(parameter.to(delta.dtype) - delta)
            update = self.bound.version
            self._arrived(Arrival(update, rank, step, self.bound.apply(rank)))
            self._changed.notify_all()

    def _await(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._error is not None or condition())
        if self._error is not None:
            raise self._error

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            first = self._error is None
            self._error = self._error or error
            self._changed.notify_all()
        if first:
            for channel in self._workers.values():
                channel.fail(error)
