"""CodedSum: adds gradients up over the ranks by a codec, and keeps what was not sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distributed.communication.codecs.base import (
    Codec,
    Gather,
    Message,
    Request,
    Result,
    Rounds,
    Scatter,
    Share,
    Sum,
)
from distributed.communication.wire import Reply, Wire

__all__ = ["CodedSum", "PendingSum"]


@dataclass
class _Flow:
    """The exchange of one gradient that is under way."""

    gradient: Tensor
    values: Tensor
    message: Message
    rounds: Rounds
    request: Request | None = None
    result: Result | None = None
    num_rows: int = 0

    def advance(self, reply: Tensor | None) -> None:
        """Run the codec up to its next request, or to its end."""
        try:
            self.request = self.rounds.send(reply)
        except StopIteration as end:
            self.request, self.result = None, end.value


class CodedSum:
    """Adds up tensors over the ranks of a wire.

    The residual of a tensor is what this rank has still to send of it: what the codec has not sent of the
    gradient and of the residual of the step before.

    Args:
        codec: what is sent.
        wire: between whom.
        seed: of the run, for codecs that draw numbers.
        revocable: a step may be skipped after its gradients were added up, which `settle` then undoes.
        names: of the parameters, in any order.

    Attributes:
        residuals: by name of the parameter; empty if the codec keeps none.
        states: tensors that the codec keeps, equal on all ranks, by name of the parameter.
        step: number of steps in which something was exchanged.
    """

    def __init__(self, codec: Codec, wire: Wire, seed: int, revocable: bool, names: Collection[str]) -> None:
        self.names = frozenset(names)
        self._codec, self._wire, self._seed, self._revocable = codec, wire, seed, revocable
        self.residuals: dict[str, Tensor] = {}
        self.states: dict[str, dict[str, Tensor]] = {}
        self.step = 0
        # Not in the order of use: a resumed run begins elsewhere, and has to share out rows in the same way.
        self._first_rows = {name: index for index, name in enumerate(sorted(names))}
        self._open = False
        self._next: list[tuple[str, Tensor | None, dict[str, Tensor]]] = []

    @torch.no_grad()
    def begin(self, gradients: Mapping[str, Tensor]) -> PendingSum:
        """Start to add up `gradients`, by name, in the same order on all ranks. Collective."""
        flows = [self._flow(name, gradient) for name, gradient in gradients.items() if gradient.numel()]
        return PendingSum(self, self._wire, flows)

    def load(
        self, residuals: Mapping[str, Tensor], states: Mapping[str, dict[str, Tensor]], step: int
    ) -> None:
        """Continue from what an earlier exchange has kept; parameters of other groups are left out."""
        self.residuals = {name: tensor for name, tensor in residuals.items() if name in self.names}
        self.states = {name: tensors for name, tensors in states.items() if name in self.names}
        self.step = step

    def add(self, values: Tensor) -> Tensor:
        """Add up a small tensor as it is, which may be overwritten. Collective."""
        return self._wire.sum(values)()

    def settle(self, skipped: bool) -> None:
        """End a step. What was not sent is kept for the next one; of a `skipped` step the gradients are
        dropped, and what was not sent before it is kept."""
        if not self._open:
            return
        self._open = False
        self.step += 1
        revoked, self._next = self._next, []
        if not skipped:
            for name, residual, state in revoked:
                self._keep(name, residual, state)

    def take(self, flow: _Flow) -> None:
        """Put the sum in the place of a gradient, and keep what was not sent."""
        assert flow.result is not None
        total, contribution = flow.result
        flow.gradient.copy_(total)
        residual = flow.values.sub_(contribution) if self._codec.feeds_back else None
        kept = flow.message.name, residual, flow.message.state
        self._open = True
        if self._revocable:
            self._next.append(kept)
        else:
            self._keep(*kept)

    def _keep(self, name: str, residual: Tensor | None, state: dict[str, Tensor]) -> None:
        if residual is not None:
            self.residuals[name] = residual
        if state:
            self.states[name] = state

    def first_row(self, name: str) -> int:
        """Which rank adds up the first row of a parameter: this number modulo the number of ranks."""
        return self._first_rows[name]

    def _flow(self, name: str, gradient: Tensor) -> _Flow:
        wide = gradient.dtype if gradient.dtype.itemsize > 2 else torch.float32
        before = self.residuals.get(name)
        if before is not None:
            values = torch.add(gradient, before, out=None if self._revocable else before)
        else:
            values = gradient.to(wide, copy=self._codec.feeds_back)
        state = dict(self.states.get(name, {}))
        message = Message(name, self.step, self._seed, self._wire.rank, self._wire.size, state=state)
        flow = _Flow(gradient, values, message, self._codec.rounds(values, message))
        flow.advance(None)
        return flow


class PendingSum:
    """Gradients that are being added up; the first requests of their codecs are on their way.

    The requests of all of them are answered together, by one collective for each kind.

    Attributes:
        is_completed: None: what has arrived has to be decoded, and may have to be answered.
    """

    is_completed: Callable[[], bool] | None = None

    def __init__(self, owner: CodedSum, wire: Wire, flows: list[_Flow]) -> None:
        self._owner, self._wire, self._flows = owner, wire, flows
        self._sent = list(self._send())

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, run the other rounds, and leave the sums in the gradients. Collective."""
        while self._sent:
            for batch, reply in self._sent:
                for flow, part in zip(batch.flows, batch.replies(reply()), strict=True):
                    flow.advance(part)
            self._sent = list(self._send())
        for flow in self._flows:
            self._owner.take(flow)

    def _send(self) -> Iterator[tuple[_Batch, Reply]]:
        """Start a collective for each kind of open requests, in the same order on all ranks."""
        groups: dict[Any, list[_Flow]] = {}
        for flow in self._flows:
            request = flow.request
            if isinstance(request, Scatter):
                flow.num_rows = len(request.rows)
                flow.message.first_row = self._owner.first_row(flow.message.name)
            if request is not None:
                groups.setdefault((type(request), request[0].dtype), []).append(flow)
        for (kind, _), flows in groups.items():
            batch = _BATCHES[kind](flows, self._wire)
            yield batch, batch.start()


class _Batch(ABC):
    """Requests of one kind that one collective answers."""

    def __init__(self, flows: list[_Flow], wire: Wire) -> None:
        self.flows, self._wire = flows, wire
        self._payloads: list[Tensor] = [flow.request[0] for flow in flows if flow.request is not None]

    @abstractmethod
    def start(self) -> Reply:
        """Send the payloads."""

    @abstractmethod
    def replies(self, received: Tensor) -> Iterable[Tensor]:
        """The reply to each request, out of what has arrived for all."""

    def _padded(self, parts: Sequence[Tensor], length: int) -> Tensor:
        joined = torch.cat([part.reshape(-1) for part in parts])
        return nn.functional.pad(joined, (0, length - len(joined)))


class _SumBatch(_Batch):
    def start(self) -> Reply:
        return self._wire.sum(torch.cat([payload.reshape(-1) for payload in self._payloads]))

    def replies(self, received: Tensor) -> Iterable[Tensor]:
        parts = received.split([payload.numel() for payload in self._payloads])
        return [part.view(payload.shape) for part, payload in zip(parts, self._payloads, strict=True)]


class _GatherBatch(_Batch):
    def start(self) -> Reply:
        return self._wire.gather(torch.cat(self._payloads))

    def replies(self, received: Tensor) -> Iterable[Tensor]:
        parts: Iterable[Tensor] = received.split([len(payload) for payload in self._payloads], 1)
        return parts


class _RowBatch(_Batch):
    """The rows that each rank adds up. All send as many bytes as the rank with most rows."""

    def _numbers(self, rank: int) -> list[int]:
        """Number of rows of each request that `rank` adds up."""
        size = self._wire.size
        found = []
        for flow in self.flows:
            first = flow.message.rows_of(rank).start
            found.append(max(0, -(-(flow.num_rows - first) // size)))
        return found

    def _nbytes(self) -> list[list[int]]:
        """Rank -> bytes of the rows of each request."""
        widths = [payload.shape[1] for payload in self._payloads]
        ranks = range(self._wire.size)
        return [[n * w for n, w in zip(self._numbers(r), widths, strict=True)] for r in ranks]

    def _length(self) -> int:
        return max(map(sum, self._nbytes()))


class _ScatterBatch(_RowBatch):
    def start(self) -> Reply:
        length, parts = self._length(), []
        for rank in range(self._wire.size):
            rows = [p[f.message.rows_of(rank)] for f, p in zip(self.flows, self._payloads, strict=True)]
            parts.append(self._padded(rows, length))
        return self._wire.scatter(torch.stack(parts))

    def replies(self, received: Tensor) -> Iterable[Tensor]:
        own = self._nbytes()[self._wire.rank]
        parts = received[:, : sum(own)].split(own, 1)
        numbers = self._numbers(self._wire.rank)
        return [
            part.reshape(len(received), number, payload.shape[1])
            for part, number, payload in zip(parts, numbers, self._payloads, strict=True)
        ]


class _ShareBatch(_RowBatch):
    def start(self) -> Reply:
        return self._wire.gather(self._padded(self._payloads, self._length()))

    def replies(self, received: Tensor) -> Iterable[Tensor]:
        found = [p.new_empty(f.num_rows, p.shape[1]) for f, p in zip(self.flows, self._payloads, strict=True)]
        for rank, nbytes in enumerate(self._nbytes()):
            parts = received[rank, : sum(nbytes)].split(nbytes)
            for flow, whole, part in zip(self.flows, found, parts, strict=True):
                rows = whole[flow.message.rows_of(rank)]
                rows.copy_(part.view(rows.shape))
        return found


_BATCHES: Mapping[type, type[_Batch]] = {
    Sum: _SumBatch,
    Gather: _GatherBatch,
    Scatter: _ScatterBatch,
    Share: _ShareBatch,
}
