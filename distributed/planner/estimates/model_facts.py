"""ModelFacts: what predictions need to know of a model, as plain data.

`distributed.operations.planning.collect_facts` records them from a model object under fake tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from distributed.planner.estimates.size import Size
from distributed.planner.estimates.work_facts import WorkFacts

__all__ = [
    "BlockFacts",
    "Event",
    "Kind",
    "ModelFacts",
    "OptimizerFacts",
    "ParameterFacts",
    "Size",
    "Timeline",
]


class Kind(IntEnum):
    """What an event of a timeline is. Its index is that of a tensor, a parameter or a block."""

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


class Event(NamedTuple):
    """One entry of a timeline.

    Attributes:
        kind: what happened.
        number: index of the tensor (`Timeline.sizes`), of the parameter or of the block.
    """

    kind: Kind
    number: int


@dataclass(frozen=True)
class Timeline:
    """What one micro-batch, or one update of a parameter, allocates and frees, in order.

    Attributes:
        sizes: of each tensor.
        events: in order of time.
        gradients: index of a parameter -> index of the tensor that becomes its gradient.
        inputs: bytes of the batch.
    """

    sizes: tuple[Size, ...]
    events: tuple[Event, ...]
    gradients: dict[int, int] = field(default_factory=dict)
    inputs: tuple[Size, ...] = ()


@dataclass(frozen=True)
class ParameterFacts:
    """A parameter.

    Attributes:
        name: canonical name.
        shape: its dimensions.
        itemsize: bytes of an element.
        trained: whether it has a gradient.
        block: index of its innermost block; 0, the model itself, outside of blocks.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trained: bool
    block: int

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
        trained_elements: elements of its parameters that have a gradient.
        frozen_elements: elements of the others.
        buffer_bytes: bytes of its buffers.
        forward_flops: floating-point operations of one forward pass, per sample.
        saved: bytes that its forward leaves for backward, its output included.
        output: bytes of what it returns.
        workspace: most bytes that its forward has at once beyond what it leaves.
        calls: in one forward pass of the model.
    """

    name: str
    trained_elements: int
    frozen_elements: int
    buffer_bytes: int
    forward_flops: Size
    saved: Size
    output: Size
    workspace: Size
    calls: int = 1


@dataclass(frozen=True)
class OptimizerFacts:
    """What an elementwise optimizer needs for a parameter, in bytes for each byte of it.

    Attributes:
        state: kept between steps.
        workspace: most temporary memory while it updates the parameter.
        per_parameter: bytes of state for each parameter whatever its size.
        at_once: whether all parameters are updated together (``foreach``), so that their workspaces add up.
    """

    state: float
    workspace: float
    per_parameter: int = 4
    at_once: bool = False


@dataclass(frozen=True)
class ModelFacts:
    """A model, its loss and its optimizer.

    Attributes:
        name: class of the model.
        parameters: all of them, each once.
        blocks: the model itself, then its blocks in order of their first forward.
        buffers: bytes of each buffer.
        first: what the first micro-batch of a step does, in which gradients are new.
        later: what each later one does, which adds to them.
        first_recomputed: `first` with activation checkpointing of the blocks; None if it was not recorded.
        later_recomputed: `later` with it.
        optimizer: what the optimizer needs.
        precision: at which the facts were recorded.
        optimizer_name: the optimizer of `optimizer`.
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
    work: WorkFacts = WorkFacts()

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)
