"""Base of the conformance tests of a codec: ranks that are threads, and a record of what they exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from distributed.checkpoint.rank_local import Replica
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
from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.codec import CodecSpec, Shape
from distributed.interfaces.state import Chunk, StateReader
from distributed.registry.catalog import get_catalog
from distributed.testing.thread_wire import ThreadWire
from distributed.training.compression import Compression, Held

__all__ = ["SHAPES", "ChunkReader", "CodecRank", "CodecSuite", "Oracle"]

Oracle = Callable[[Sequence[Tensor], str, int], tuple[Tensor, Sequence[Tensor]]]
"""``(values of each rank, name of the parameter, step) -> (total, contribution of each rank)``."""

SHAPES: Mapping[str, Shape] = MappingProxyType(
    {"w": (24, 40), "v": (24, 40), "b": (7,), "conv": (8, 5, 3, 3), "scalar": (), "long": (1030,)}
)
"""Gradients of matrices, vectors and a single element, of sizes that few blocks divide; two of one shape."""

_KINDS: Mapping[type, str] = {Sum: "sum", Gather: "gather", Scatter: "scatter", Share: "scatter"}


class CodecSuite:
    """Base of the tests.

    Attributes:
        codec: the name it is registered under.
        options: fields of the section ``compression`` besides `codec`, such as ``{"ratio": 0.1}``.
        sizes: numbers of ranks to try, each at least 2.
        shapes: of the gradients, by name of the parameter.
        bound: for a codec that rounds each element and leaves none out: largest error of an element of the
            total, divided by the sum over the ranks of the largest magnitudes in their gradients. None for
            other codecs.
        seed: of the run.
        compression: class of the rank's side; replaced in tests of the kit itself.
    """

    codec: str = ""
    options: Mapping[str, Any] = MappingProxyType({})
    sizes: tuple[int, ...] = (2, 3, 4)
    shapes: Mapping[str, Shape] = SHAPES
    bound: float | None = None
    seed: int = 7
    compression: type[Compression] = Compression

    def oracle(self) -> Oracle | None:
        """What the codec computes, in one process: override it to have every total compared with it, within
        1e-9 in float64. A new function for each run, which may keep a state. Error feedback is added to the
        values before it is called."""
        return None

    @property
    def spec(self) -> CodecSpec:
        """What is registered of the codec.

        Raises:
            UserError: no plugin registers that name.
        """
        found = get_catalog().codecs
        if self.codec not in found:
            raise UserError(
                "no codec is registered under this name",
                field="CodecConformance.codec",
                got=self.codec,
                allowed=", ".join(found),
                remedy="Set the class attribute to the name that register_codecs returns",
            )
        return found[self.codec]

    def config(self, feeds_back: bool | None = True, revocable: bool = False) -> DistributedConfig:
        """The configuration of a run with the codec.

        Args:
            feeds_back: field `error_feedback`.
            revocable: steps may be skipped after the exchange (``on_nan=skip``).
        """
        section = {"codec": self.codec, **self.options, "error_feedback": feeds_back}
        on_nan = "skip" if revocable else "stop"
        return DistributedConfig(compression=section, seed=self.seed, on_nan=on_nan)

    def rank(self, wire: ThreadWire, feeds_back: bool | None = True, revocable: bool = False) -> CodecRank:
        """A rank that has exchanged nothing yet."""
        config = self.config(feeds_back, revocable)
        return CodecRank(self.compression(self.spec, config), wire, self.shapes)

    def gradients(self, rank: int, step: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """The gradients of a rank in a step: normally distributed, without a large common part."""
        draw = torch.Generator().manual_seed(1000 * step + rank)
        return {
            name: torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
            for name, shape in self.shapes.items()
        }

    def train(self, rank: CodecRank, steps: Iterable[int]) -> list[dict[str, Tensor]]:
        """The totals of `steps`, in all of which the rank has gradients of its own."""
        return [rank.step(self.gradients(rank.wire.rank, step)) for step in steps]

    def train_parts(self, rank: CodecRank, steps: Iterable[int]) -> list[dict[str, Tensor]]:
        """The same, where even steps leave out the first third of the parameters (find_unused_parameters)."""
        found = []
        for step in steps:
            own = self.gradients(rank.wire.rank, step)
            left_out = list(own)[: len(own) // 3] if step % 2 == 0 else []
            found.append(rank.step({name: own[name] for name in own if name not in left_out}))
        return found


class CodecRank:
    """One rank of a run with a codec.

    Attributes:
        wire: between the ranks.
        results: what the codec returned last for each parameter, copied.
        requests: by name of the parameter, (kind of collective, bytes that the rank sends) of each request.
        widest: bytes of the widest row of a `Scatter`.
    """

    def __init__(self, compression: Compression, wire: ThreadWire, shapes: Mapping[str, Shape]) -> None:
        self.wire, self._compression = wire, compression
        compression.codec = self._recorder = _Recorder(compression.codec)
        self._summed = compression.over(wire, list(shapes))
        self.results, self.requests = self._recorder.results, self._recorder.requests
        replica = Replica(wire.rank, wire.size)
        self._held = {
            n: Held(torch.empty(shape, dtype=torch.float64), replica) for n, shape in shapes.items()
        }

    @property
    def widest(self) -> int:
        """Bytes of the widest row that was shared out so far."""
        return self._recorder.widest

    @property
    def residuals(self) -> Mapping[str, Tensor]:
        """What this rank has still to send, by name of the parameter."""
        return self._summed.residuals

    @property
    def states(self) -> Mapping[str, Mapping[str, Tensor]]:
        """What the codec keeps between steps, by name of the parameter."""
        return self._summed.states

    def step(
        self, gradients: dict[str, Tensor], buckets: int | None = 1, skipped: bool = False
    ) -> dict[str, Tensor]:
        """Add up `gradients`, which then hold the totals, and return them.

        Args:
            buckets: number of exchanges that are begun before the first is finished; None for one for each
                parameter.
            skipped: the optimizer has not stepped with the totals.
        """
        names = list(gradients)
        length = -(-len(names) // (buckets or len(names)))
        parts = [names[start : start + length] for start in range(0, len(names), length)]
        pending = [self._summed.begin({name: gradients[name] for name in part}) for part in parts]
        for one in pending:
            one.finish()
        self._compression.settle(skipped)
        return gradients

    def save(self) -> list[Chunk]:
        """This rank's part of a checkpoint."""
        return list(self._compression.export(self._held, self.wire.rank == 0))

    def resume(self, chunks: list[Chunk]) -> None:
        """Load the parts of all ranks that saved."""
        self._compression.restore(ChunkReader(chunks), self._held)


class ChunkReader(StateReader):
    """A checkpoint in memory: the chunks of all ranks."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self._chunks = chunks

    def tensors(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """``(key, name) -> shape`` of all tensors."""
        return {(chunk.key, chunk.name): chunk.shape for chunk in self._chunks}

    def read(self, key: str, name: str, start: int = 0, length: int | None = None) -> Tensor:
        """A copy of elements of a flattened tensor."""
        parts = [chunk for chunk in self._chunks if (chunk.key, chunk.name) == (key, name)]
        flat = torch.cat([chunk.data for chunk in sorted(parts, key=lambda chunk: chunk.start)])
        shape = self.tensors()[key, name]
        if len(flat) != prod(shape):
            raise ValueError(f"{key} of {name}: the ranks saved {len(flat)} elements of {prod(shape)}")
        return flat[start : None if length is None else start + length].clone()


class _Recorder(Codec):
    """Passes on what another codec requests, and records it."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec.options, codec.feeds_back)
        self._codec, self.widest = codec, 0
        self.results: dict[str, Result] = {}
        self.requests: dict[str, list[tuple[str, float]]] = {}

    def rounds(self, values: Tensor, message: Message) -> Rounds:
        given = values.clone()
        rounds, reply = self._codec.rounds(values, message), None
        while True:
            try:
                request = rounds.send(reply)
            except StopIteration as end:
                self._check_unchanged(values, given)
                self.results[message.name] = Result(*(tensor.clone() for tensor in end.value))
                result: Result = end.value
                return result
            self._record(request, message)
            reply = yield request

    def _record(self, request: Request, message: Message) -> None:
        """What a rank sends of its payload to all others; see `Traffic`."""
        nbytes, others = request[0].nbytes, message.size - 1
        each = {Sum: 2 / message.size, Scatter: 1 / message.size}.get(type(request), 1)
        found = self.requests.setdefault(message.name, [])
        found.append((_KINDS[type(request)], others * each * nbytes))
        if isinstance(request, Scatter):
            self.widest = max(self.widest, request.rows.shape[1])

    def _check_unchanged(self, values: Tensor, given: Tensor) -> None:
        same = torch.equal(values.nan_to_num(), given.nan_to_num())
        assert same, "the codec has changed the values in place, from which the residual is computed"
