"""Facts of small models whose memory is added up by hand, and splits for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distributed.interfaces.parallel_dims import ParallelDims
from distributed.planner.estimates.device_memory import DeviceMemory
from distributed.planner.estimates.model_facts import (
    BlockFacts,
    BucketFacts,
    Cut,
    Event,
    ExchangeFacts,
    FactsSource,
    Kind,
    ModelFacts,
    OptimizerFacts,
    ParameterFacts,
    Size,
    Timeline,
)
from distributed.planner.estimates.split import Split

__all__ = [
    "ADAM",
    "CARRYING",
    "GLOO",
    "LARGE",
    "PLAIN",
    "SAVING",
    "SEGMENTS",
    "SHARED",
    "SLICED",
    "TWO",
    "TWO_ADAM",
    "chain",
    "coded",
    "in_halves",
    "looped",
    "meshed",
    "piped",
    "split",
    "stages",
]

GLOO = DeviceMemory(copies_in_collectives=True)
SEGMENTS = DeviceMemory(segment=1000)
PLAIN = OptimizerFacts(state=0.0, workspace=0.0, per_parameter=0)
ADAM = OptimizerFacts(state=2.0, workspace=2.0, per_parameter=0)
CARRYING = replace(ADAM, carried=1.0)


def chain(
    rows: list[int], saved: list[int], optimizer: OptimizerFacts = PLAIN, workspace: int = 0
) -> ModelFacts:
    """Blocks in a row, each with one weight of so many rows of 4 bytes, whose forward saves so many bytes of
    each sample, and whose backward makes the gradient of the weight and then drops what was saved."""
    sizes, first, later = [], [], []
    gradients = {}
    for block, nbytes in enumerate(saved, 1):
        sizes.append(Size(0, nbytes))
        first.append(Event(Kind.ENTER_FORWARD, block))
        first.append(Event(Kind.ALLOCATE, len(sizes) - 1))
        sizes.append(Size(workspace))
        first += [Event(Kind.ALLOCATE, len(sizes) - 1), Event(Kind.FREE, len(sizes) - 1)]
        first.append(Event(Kind.LEAVE_FORWARD, block))
    first.append(Event(Kind.BACKWARD, 0))
    later = list(first)
    for block in range(len(rows), 0, -1):
        sizes.append(Size(4 * rows[block - 1]))
        new, old = len(sizes) - 1, 2 * (block - 1)
        gradients[block - 1] = new
        begin = [Event(Kind.ENTER_BACKWARD, block), Event(Kind.ALLOCATE, new)]
        end = [Event(Kind.GRADIENT, block - 1), Event(Kind.FREE, old), Event(Kind.LEAVE_BACKWARD, block)]
        first += [*begin, *end]
        later += [*begin, Event(Kind.FREE, new), *end]
    parameters = tuple(ParameterFacts(f"w{i}", (n, 1), 4, True, i + 1) for i, n in enumerate(rows))
    blocks = BlockFacts(""), *(BlockFacts(f"block{i}") for i in range(len(rows)))
    lines = Timeline(tuple(sizes), tuple(first), gradients), Timeline(tuple(sizes), tuple(later))
    return ModelFacts("Chain", parameters, blocks, (), *lines, None, None, optimizer)


def split(backend: str, ranks: int = 1, **given: Any) -> Split:
    axis = "shard" if backend == "fsdp" else "data"
    return Split(ParallelDims(**{axis: ranks}), backend, micro_batch=3, **given)


TWO = chain([100, 100], [10, 10])
TWO_ADAM = chain([100, 100], [10, 10], ADAM)

SHARED = replace(TWO, cut=Cut(tensor=2))
SLICED = replace(TWO, cut=Cut(context=2))
# Two weights of more elements than ZeRO 3 keeps gathered.
LARGE, SAVING = (chain([100_001] * 2, [saved] * 2) for saved in (10, 10**6))


def stages(sends_output: bool = False, sends_gradient: bool = False) -> FactsSource:
    """Two stages of one block: 3 samples are 15 bytes between them. The output is what the block saves; the
    gradient of the input is a tensor of 21 bytes."""

    def facts(cut: Cut) -> ModelFacts:
        one = chain([100], [10])
        sent = (0 if sends_output and not cut.stage else None, None)
        lines = [replace(line, sent=sent) for line in (one.first, one.later)]
        if sends_gradient and cut.stage:
            lines = [_with_gradient(line) for line in lines]
        received = (Size(0, 5 * cut.stage), Size(0, 5 * (1 - cut.stage)))
        return replace(one, first=lines[0], later=lines[1], cut=cut, received=received)

    return facts


def coded(sent: int, result: int, early: bool = False) -> FactsSource:
    """A codec that keeps 100 bytes of each weight, sends its gradient in a tensor of `sent` bytes, and makes
    one of `result` bytes of what arrives."""

    def facts(cut: Cut) -> ModelFacts:
        begun = (Event(Kind.ALLOCATE, 1), Event(Kind.COLLECTIVE, 1000))
        finished = Event(Kind.FREE, 1), Event(Kind.ALLOCATE, 2)
        bucket = BucketFacts((100, sent, result), 1, begun, finished, (Event(Kind.FREE, 2),))
        return replace(TWO, cut=cut, exchange=ExchangeFacts(((1,), (0,)), (bucket, bucket), early))

    return facts


def looped(sends_output: bool = False) -> FactsSource:
    """Four stages of one block on two ranks: each rank has the weights of two, and computes one at a time."""

    def facts(cut: Cut) -> ModelFacts:
        one, own = chain([100], [10]), cut.stage // 2
        sent = (0 if sends_output and cut.stage < 3 else None, None)
        lines = [_of_parameter(replace(line, sent=sent), own) for line in (one.first, one.later)]
        received = (Size(0, 5 * (cut.stage > 0)), Size(0, 5 * (cut.stage < 3)))
        return replace(TWO, first=lines[0], later=lines[1], cut=cut, received=received)

    return facts


def _of_parameter(line: Timeline, number: int) -> Timeline:
    tensors = (Kind.ALLOCATE, Kind.FREE, Kind.BACKWARD)
    events = [
        Event(k, n if k in tensors else number if k == Kind.GRADIENT else number + 1) for k, n in line.events
    ]
    return replace(line, events=tuple(events), gradients=dict.fromkeys([number], *line.gradients.values()))


def _with_gradient(line: Timeline) -> Timeline:
    number = len(line.sizes)
    events = (*line.events[:-1], Event(Kind.ALLOCATE, number), line.events[-1])
    return replace(line, sizes=(*line.sizes, Size(0, 7)), events=events, sent=(None, number))


def in_halves(schedule: str, sends: bool = False) -> FactsSource:
    """Four stages of one block on two ranks. The gradient of the input, 21 bytes, comes first; it leaves 12
    bytes of each sample until the gradient of the weight is computed, after which what the block saved is
    free."""
    folded = schedule == "zbv"

    def facts(cut: Cut) -> ModelFacts:
        one, own = chain([100], [10]), int(cut.stage >= 2)
        forward = one.first.events[: one.first.events.index((Kind.BACKWARD, 0)) + 1]
        new, input_gradient, kept = 2, 3, 4
        inputs = [Event(Kind.ALLOCATE, input_gradient), Event(Kind.ALLOCATE, kept)] if cut.stage else []
        weights = [Event(Kind.WEIGHTS, 0), Event(Kind.ALLOCATE, new)]
        end = [Event(Kind.FREE, 0), *([Event(Kind.FREE, kept)] if cut.stage else [])]
        sizes = (*one.first.sizes[:2], Size(400), Size(0, 7), Size(0, 12))
        sent = (0 if sends and cut.stage < 3 else None, input_gradient if cut.stage else None)
        events = (*forward, *inputs, *weights, Event(Kind.GRADIENT, own))
        first = Timeline(sizes, (*events, *end), {own: new}, sent=sent)
        later = Timeline(sizes, (*events, Event(Kind.FREE, new), *end), sent=sent)
        received = (Size(0, 5 * (cut.stage > 0)), Size(0, 5 * (cut.stage < 3)))
        halves = {"first_halves": first, "later_halves": later}
        return replace(TWO, first=first, later=later, cut=cut, received=received, **halves)

    assert folded or schedule == "interleaved-zero-bubble"
    return facts


def piped(schedule: str, number: int = 4) -> Split:
    dims = ParallelDims(pipeline=2)
    return Split(dims, "pytorch-ddp", micro_batch=3, num_micro_batches=number, schedule=schedule)


def meshed(backend: str, **axes: int) -> Split:
    return Split(ParallelDims(**axes), backend, micro_batch=3)
