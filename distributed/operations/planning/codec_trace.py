"""Record what a codec allocates to exchange gradients, by the code that does so in training.

The exchange runs on a wire that sends nothing, with fake tensors; a codec whose shapes depend on values, such
as that of the largest elements, with random ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from distributed.communication.codecs.base import Codec
from distributed.communication.coded_sum import CodedSum
from distributed.communication.wire import Reply
from distributed.config.compression import CompressionSection
from distributed.errors import UserError
from distributed.interfaces.codec import DENSE
from distributed.operations.planning.memory_trace import MemoryTrace, RawTimeline
from distributed.planner.estimates.model_facts import (
    BucketFacts,
    Cut,
    Event,
    ExchangeFacts,
    FactsSource,
    Kind,
    ModelFacts,
    ParameterFacts,
)
from distributed.planner.estimates.replicated_layout import filled_buckets
from distributed.registry.catalog import get_catalog, load_target

__all__ = ["ExchangeOptions", "with_exchanges"]

_DTYPES = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16}
_STEPS = 2
"""Residuals, and what a codec keeps, exist after the first exchange."""
_MOST_VALUES = 1 << 27
"""Elements of a bucket at most that are recorded with values."""


@dataclass(frozen=True)
class ExchangeOptions:
    """What decides how a run exchanges gradients by a codec.

    Attributes:
        section: options of the codec; its name is that of a `Cut`.
        revocable: whether a step may be skipped after its exchange (``on_nan: skip``).
        in_backward: whether buckets may be sent before backward has ended.
    """

    section: CompressionSection = field(default_factory=CompressionSection)
    revocable: bool = False
    in_backward: bool = True


def with_exchanges(source: FactsSource, options: ExchangeOptions) -> FactsSource:
    """`source`, with what the codec of a cut allocates."""

    @cache
    def facts(cut: Cut) -> ModelFacts:
        if cut.codec == DENSE:
            return source(cut)
        found = source(cut._replace(codec=DENSE, copies=1))
        return replace(found, cut=cut, exchange=_exchange(found, cut, options))

    return facts


def _exchange(facts: ModelFacts, cut: Cut, options: ExchangeOptions) -> ExchangeFacts:
    members = filled_buckets(facts.parameters, facts.bucket_bytes)
    spec = get_catalog().codecs[cut.codec]
    codec = load_target(spec.target)(options.section, spec.feeds_back(options.section))
    recorded = cache(partial(_bucket, codec, cut, options.revocable))
    buckets = [recorded(_shapes([facts.parameters[number] for number in bucket])) for bucket in members]
    early = options.in_backward and not facts.counts_targets
    return ExchangeFacts(tuple(map(tuple, members)), tuple(buckets), early)


def _shapes(parameters: Sequence[ParameterFacts]) -> tuple[tuple[tuple[int, ...], int], ...]:
    return tuple((parameter.shape, parameter.itemsize) for parameter in parameters)


class _SilentWire:
    """A `distributed.communication.wire.Wire` that sends nothing, and holds what a real one holds until its
    reply is dropped."""

    rank = 0

    def __init__(self, size: int, trace: MemoryTrace) -> None:
        self.size, self._trace = size, trace

    def sum(self, values: Tensor) -> Reply:
        self._trace.mark(Kind.COLLECTIVE, values.nbytes)
        return Reply(lambda: values)

    def gather(self, payload: Tensor) -> Reply:
        return _held(payload, payload.new_empty(self.size, len(payload)).zero_())

    def scatter(self, parts: Tensor) -> Reply:
        return _held(parts, torch.empty_like(parts).zero_())


def _held(sent: Tensor, found: Tensor) -> Reply:
    return Reply(lambda: (found, sent)[0])


def _bucket(codec: Codec, cut: Cut, revocable: bool, shapes: tuple[tuple[tuple[int, ...], int], ...]) -> Any:
    """What the exchange of gradients of these shapes and bytes of an element allocates."""
    record = partial(_record, codec, cut, revocable, shapes)
    try:
        return record(FakeTensorMode())
    except Exception:  # noqa: BLE001 - whatever a codec does with values, it fails without them
        elements = sum(torch.Size(shape).numel() for shape, _ in shapes)
        if elements > _MOST_VALUES:
            raise UserError(
                "the memory of a codec that depends on the values of gradients is not predicted for so many"
                " in a bucket",
                field="compression.codec",
                got=f"{cut.codec} with {elements} elements",
                allowed=f"buckets of at most {_MOST_VALUES} elements",
                remedy="Choose int8, fp8 or powersgd, or measure a run",
            ) from None
    return record(nullcontext())


@torch.no_grad()
def _record(
    codec: Codec,
    cut: Cut,
    revocable: bool,
    shapes: tuple[tuple[tuple[int, ...], int], ...],
    tensors: AbstractContextManager[Any],
) -> BucketFacts:
    draw = torch.Generator().manual_seed(0)
    with tensors as mode:
        trace = MemoryTrace([], [])
        gradients = {
            str(number): torch.empty(shape, dtype=_DTYPES[itemsize])
            for number, (shape, itemsize) in enumerate(shapes)
        }
        trace.ignore(gradients.values())
        wire = _SilentWire(cut.copies, trace)
        summed = CodedSum(codec, wire, 0, revocable, gradients)
        bounds: list[int] = []
        with trace:
            for _ in range(_STEPS):
                if mode is None:
                    for gradient in gradients.values():
                        gradient.normal_(generator=draw)
                bounds = [trace.num_events]
                pending = summed.begin(gradients)
                bounds.append(trace.num_events)
                pending.finish()
                bounds.append(trace.num_events)
                del pending
                bounds.append(trace.num_events)
                summed.settle(skipped=False)  # after the update of the parameters
        return _as_facts(trace.take(), bounds)


def _as_facts(line: RawTimeline, bounds: Sequence[int]) -> BucketFacts:
    """The events of the last step, in which tensors that it has found are the first."""
    events = line.events[: bounds[-1]]
    found: dict[int, None] = {}
    for kind, number in events[: bounds[0]]:
        if kind == Kind.ALLOCATE:
            found[number] = None
        elif kind == Kind.FREE:
            found.pop(number, None)
    place = {number: at for at, number in enumerate(found)}
    for kind, number in events[bounds[0] :]:
        if kind == Kind.ALLOCATE:
            place[number] = len(place)
    parts = [
        tuple(
            Event(kind, number if kind == Kind.COLLECTIVE else place[number])
            for kind, number in events[start:end]
        )
        for start, end in pairwise(bounds)
    ]
    sizes = tuple(line.sizes[number] for number in place)
    return BucketFacts(sizes, len(found), *parts)
