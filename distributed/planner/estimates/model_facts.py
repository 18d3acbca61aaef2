"""ModelFacts: what predictions need to know of a model, as plain data.

`distributed.operations.planning.collect_facts` records them from a model object under fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from distributed.interfaces.codec import DENSE
from distributed.planner.estimates.size import Size
from distributed.planner.estimates.work_facts import NOT_COUNTED, WorkFacts

__all__ = [
    "BUCKET",
    "BlockFacts",
    "BucketFacts",
    "Collective",
    "Cut",
    "Event",
    "ExchangeFacts",
    "FactsSource",
    "Kind",
    "ModelFacts",
    "OptimizerFacts",
    "ParameterFacts",
    "Size",
    "Timeline",
    "WHOLE",
]


_NOTHING = Size(0), Size(0)
BUCKET = 25 * 2**20
"""Bytes of a bucket of gradients: the default of `bucket_cap_mb`."""


class Cut(NamedTuple):
    """What decides which part of a model, and which slice of a sample, one rank has.

    Attributes:
        tensor: ranks that cut its layers between them.
        context: ranks that hold slices of each sequence.
        expert: ranks that hold different experts.
        pipeline: ranks that hold different stages.
        schedule: order of forward and backward; decides how many stages a rank has.
        stage: index of the stage that computes. Parameters are those of all stages of its rank.
        codec: how gradients are sent; decides nothing of the model, but what is allocated for them.
        copies: ranks that exchange gradients by a codec; 1 without one.
    """

    tensor: int = 1
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    stage: int = 0
    codec: str = DENSE
    copies: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks that divide the model."""
        return self.tensor * self.context * self.expert * self.pipeline


WHOLE = Cut()
"""An uncut model."""


class Kind(IntEnum):
    """What an event of a timeline is. Its index is that of a tensor, a parameter, a block or a collective."""

    ALLOCATE = 0
    """A tensor gets its memory."""
    FREE = 1
    """A tensor gives it back."""
    GRADIENT = 2
    """The gradient of a parameter for this micro-batch is complete."""
    ENTER_FORWARD = 3
    LEAVE_FORWARD = 4
    ENTER_BACKWARD = 5
    LEAVE_BACKWARD = 6
    """The gradients of a block's inputs are complete."""
    BACKWARD = 7
    """Backward of the micro-batch begins."""
    COLLECTIVE = 8
    """Ranks that share the model exchange a tensor."""
    WEIGHTS = 9
    """The gradients of weights begin, where backward has two halves."""


class Event(NamedTuple):
    """One entry of a timeline.

    Attributes:
        kind: what happened.
        number: index of the tensor (`Timeline.sizes`), of the parameter, of the block or of the collective
            (`Timeline.collectives`).
    """

    kind: Kind
    number: int


class Collective(NamedTuple):
    """A collective between ranks that share the model.

    Attributes:
        operation: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast`` or
            ``send``.
        axis: of the mesh, along which the ranks lie.
        size: bytes of the whole tensor: what an all-gather returns, what others take.
    """

    operation: str
    axis: str
    size: Size


@dataclass(frozen=True)
class Timeline:
    """What one micro-batch, or one update of a parameter, allocates and frees, in order.

    Attributes:
        sizes: of each tensor.
        events: in order of time.
        gradients: index of a parameter -> index of the tensor that becomes its gradient.
        inputs: bytes of the batch, and of this rank's slices of it where they are copies.
        collectives: between ranks that share the model.
        sent: indices of the tensors that a stage of a pipeline sends: its output, and the gradient of its
            input; None for what it does not send.
    """

    sizes: tuple[Size, ...]
    events: tuple[Event, ...]
    gradients: dict[int, int] = field(default_factory=dict)
    inputs: tuple[Size, ...] = ()
    collectives: tuple[Collective, ...] = ()
    sent: tuple[int | None, int | None] = (None, None)


@dataclass(frozen=True)
class ParameterFacts:
    """A parameter, or this rank's part of it.

    Attributes:
        name: canonical name.
        shape: its dimensions on this rank.
        itemsize: bytes of an element.
        trained: whether it has a gradient.
        block: index of its innermost block; 0, the model itself, outside of blocks.
        is_expert: whether the ranks of the expert axis divide it.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trained: bool
    block: int
    is_expert: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.itemsize

    def shard_bytes(self, ranks: int) -> int:
        """Bytes of the largest shard if the rows are divided among `ranks`, padded as torch's FSDP2 does."""
        if not self.shape or not self.numel:
            return self.nbytes
        rows = -(-self.shape[0] // ranks)
        return rows * (self.nbytes // self.shape[0])


@dataclass(frozen=True)
class BlockFacts:
    """A block of a model, such as one layer of a transformer. The first is the rest of the model.

    Attributes:
        name: canonical name; empty for the model itself.
        calls: in one forward pass of the model.
    """

    name: str
    calls: int = 1


@dataclass(frozen=True)
class OptimizerFacts:
    """What an elementwise optimizer needs for a parameter, in bytes for each byte of it.

    Attributes:
        state: kept between steps.
        workspace: most temporary memory while it updates the parameter.
        per_parameter: bytes of state for each parameter whatever its size.
        at_once: whether all parameters are updated together (``foreach``), so that their workspaces add up.
        carried: temporary memory of the parameter before that is live meanwhile: a loop over parameters drops
            the last result of one when it has that of the next.
    """

    state: float
    workspace: float
    per_parameter: int = 4
    at_once: bool = False
    carried: float = 0.0


@dataclass(frozen=True)
class BucketFacts:
    """The exchange of the gradients of one bucket, in a step after the first ones.

    Attributes:
        sizes: bytes of each tensor of the exchange.
        kept: number of tensors, the first of `sizes`, that exist between two steps: residuals, and what the
            codec keeps.
        begun: events until the first payloads are sent. The number of a collective is that of its bytes.
        finished: events until the sums are there.
        dropped: events when the exchanges of all buckets have ended.
    """

    sizes: tuple[int, ...]
    kept: int
    begun: tuple[Event, ...]
    finished: tuple[Event, ...]
    dropped: tuple[Event, ...]


@dataclass(frozen=True)
class ExchangeFacts:
    """The exchange of all gradients of a rank.

    Attributes:
        members: indices of the parameters of each bucket, in the order in which the buckets are sent.
        buckets: what the exchange of each bucket allocates.
        early: whether a bucket is sent from backward, as soon as its gradients are complete.
    """

    members: tuple[tuple[int, ...], ...]
    buckets: tuple[BucketFacts, ...]
    early: bool


@dataclass(frozen=True)
class ModelFacts:
    """A model, or what one rank has of it, its loss and its optimizer.

    Attributes:
        name: class of the model.
        parameters: all that the rank holds, each once.
        blocks: the model itself, then its blocks in order of their first forward.
        buffers: bytes of each buffer.
        first: what the first micro-batch of a step does, in which gradients are new.
        later: what each later one does, which adds to them.
        first_recomputed: `first` with activation checkpointing of the blocks; None if it was not recorded.
        later_recomputed: `later` with it.
        first_halves: `first` with backward in two halves: of activations, then of weights; None for schedules
            that do not divide it.
        later_halves: `later` with it.
        optimizer: what the optimizer needs.
        precision: at which the facts were recorded.
        optimizer_name: the optimizer of `optimizer`.
        cut: which part of the model this is.
        received: what a stage receives for a micro-batch: its input, and the gradient of its output; 0 for
            what it does not receive.
        cannot_recompute: why `first_recomputed` is None.
        counts_targets: whether the divisor of the mean loss is known after forward only.
        bucket_bytes: size of a bucket of gradients.
        exchange: what the codec of `cut` allocates; None without one.
        work: operations of a micro-batch and of the optimizer; without blocks where they were not counted.
    """

    name: str
    parameters: tuple[ParameterFacts, ...]
    blocks: tuple[BlockFacts, ...]
    buffers: tuple[int, ...]
    first: Timeline
    later: Timeline
    first_recomputed: Timeline | None
    later_recomputed: Timeline | None
    optimizer: OptimizerFacts
    precision: str = "fp32"
    optimizer_name: str = "adamw"
    cut: Cut = WHOLE
    received: tuple[Size, Size] = _NOTHING
    cannot_recompute: str = ""
    counts_targets: bool = True
    bucket_bytes: float = BUCKET
    exchange: ExchangeFacts | None = None
    work: WorkFacts = NOT_COUNTED
    first_halves: Timeline | None = None
    later_halves: Timeline | None = None

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)


FactsSource = Callable[[Cut], ModelFacts]
"""Facts of one rank of a cut; raises a UserError where a backend refuses it."""
