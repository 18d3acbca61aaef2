"""Layout: what a rank keeps, and when it allocates and frees it; here, a whole model on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from distributed.planner.estimates.device_memory import DeviceMemory
from distributed.planner.estimates.ledger import Ledger
from distributed.planner.estimates.model_facts import Event, Kind, ModelFacts, ParameterFacts, Timeline
from distributed.planner.estimates.split import Split

__all__ = ["COPIED", "Layout", "MicroBatch"]


COPIED = ("all_gather", "reduce_scatter")
"""Collectives for which a library may copy the whole tensor (`DeviceMemory.copies_in_collectives`)."""


class MicroBatch:
    """A micro-batch between its forward and the end of its step.

    Args:
        timeline: its events.
        held: tensors that are live longer than the timeline shows.

    Attributes:
        forward: its events until backward begins.
        backward: the others, or those of the gradients of activations.
        weights: those of the gradients of weights, where backward has two halves.
        parts: index of each live tensor -> part of the memory.
    """

    def __init__(self, timeline: Timeline, held: Iterable[int] = ()) -> None:
        self.timeline, self.held = timeline, frozenset(held)
        begins = next(
            (at for at, event in enumerate(timeline.events) if event.kind == Kind.BACKWARD),
            len(timeline.events),
        )
        splits = next(
            (at for at, event in enumerate(timeline.events) if event.kind == Kind.WEIGHTS),
            len(timeline.events),
        )
        self.forward, self.backward = timeline.events[:begins], timeline.events[begins:splits]
        self.weights = timeline.events[splits + 1 :]
        self.parts: dict[int, str] = {}


class Layout:
    """A whole model on every rank, as plain PyTorch has it. Subclasses change what they divide.

    Args:
        facts: of the model.
        split: how it is divided.
        ledger: where allocations go.
        device: of the rank.

    Attributes:
        axes: axes of the mesh along which its memory is predicted.
        schedules: orders of a pipeline with which it is.
        zero_stages: values of `Split.zero_stage` that it knows.
        gathers_once: whether a block is expected to be called once in a forward pass.
        can_offload: whether the optimizer's state may be in host memory.
        has_codecs: whether gradients may be sent by a codec.
        adds_gradients: whether a later micro-batch of a step adds to gradients that are there; otherwise they
            are new in each.
    """

    axes: ClassVar[tuple[str, ...]] = ()
    schedules: ClassVar[tuple[str, ...]] = ()
    zero_stages: ClassVar[tuple[int, ...]] = (0,)
    gathers_once: ClassVar[bool] = False
    can_offload: ClassVar[bool] = True
    has_codecs: ClassVar[bool] = False
    adds_gradients = True

    def __init__(self, facts: ModelFacts, split: Split, ledger: Ledger, device: DeviceMemory) -> None:
        self.facts, self.split, self.ledger, self.device = facts, split, ledger, device
        self.trained = [index for index, p in enumerate(facts.parameters) if p.trained]
        self.is_last = True
        self._parts: dict[int, str] = {}
        self._held: frozenset[int] = frozenset()
        self._timeline = facts.first
        self._handlers = {
            Kind.ALLOCATE: self.allocate,
            Kind.FREE: self.free,
            Kind.GRADIENT: self.gradient,
            Kind.ENTER_FORWARD: self.enter_forward,
            Kind.LEAVE_FORWARD: self.leave_forward,
            Kind.ENTER_BACKWARD: self.enter_backward,
            Kind.LEAVE_BACKWARD: self.leave_backward,
            Kind.BACKWARD: self.backward,
            Kind.COLLECTIVE: self.exchange,
        }

    @classmethod
    def of(cls, split: Split) -> type[Layout]:
        """The layout for a split: this one, unless a backend works differently for some."""
        return cls

    # -- sizes ------------------------------------------------------------------------

    def held(self, parameter: ParameterFacts) -> int:
        """Bytes of a parameter that the rank keeps between steps."""
        return parameter.nbytes

    def updated(self, parameter: ParameterFacts) -> int:
        """Bytes of a parameter whose optimizer state the rank has."""
        return self.held(parameter)

    # -- a step -----------------------------------------------------------------------

    def place(self) -> None:
        """What is there before a step, the optimizer's state included: it exists from the first step on."""
        for parameter in self.facts.parameters:
            self.ledger.take("parameters", self.held(parameter))
        for nbytes in self.facts.buffers:
            self.ledger.take("buffers", nbytes)
        for number in () if self.split.offload else self.trained:
            for nbytes in self.state(self.updated(self.facts.parameters[number])):
                self.ledger.take("optimizer", nbytes)

    def play(self, timeline: Timeline, *, is_last: bool) -> None:
        """One micro-batch.

        Args:
            timeline: its events.
            is_last: whether it is the last one of its optimizer step, in which gradients are reduced.
        """
        micro_batch = MicroBatch(timeline)
        self.play_forward(micro_batch)
        self.play_backward(micro_batch, is_last=is_last)

    def play_forward(self, micro_batch: MicroBatch) -> None:
        """Forward of a micro-batch."""
        self._enter(micro_batch)
        self.begin()
        self._play(micro_batch.forward)

    def play_backward(self, micro_batch: MicroBatch, *, is_last: bool) -> None:
        """Backward of a micro-batch, after which gradients alone are left of it, and what it holds for
        longer."""
        self._enter(micro_batch)
        self.is_last = is_last
        self._play(micro_batch.backward)
        self._end()

    def play_inputs(self, micro_batch: MicroBatch) -> None:
        """Gradients of the activations of a micro-batch, without those of weights."""
        self._enter(micro_batch)
        self._play(micro_batch.backward)

    def play_weights(self, micro_batch: MicroBatch, *, is_last: bool) -> None:
        """Gradients of weights, after which little is left of a micro-batch, as of `play_backward`."""
        self._enter(micro_batch)
        self.is_last = is_last
        self._play(micro_batch.weights)
        self._end()

    def _end(self) -> None:
        self.finish()
        self.drop(tensor for tensor in list(self._parts) if tensor not in self._held)

    def let_go(self, micro_batch: MicroBatch, tensors: Iterable[int]) -> None:
        """Free tensors that a micro-batch has held after its end."""
        self._enter(micro_batch)
        self.drop(tensors)

    def drop(self, tensors: Iterable[int]) -> None:
        """Free those of `tensors` that are live and no gradients."""
        for tensor in tensors:
            if self._parts.get(tensor) == "activations":
                self.release(tensor)

    def _enter(self, micro_batch: MicroBatch) -> None:
        self._timeline, self._parts = micro_batch.timeline, micro_batch.parts
        self._held = micro_batch.held

    def _play(self, events: Sequence[Event]) -> None:
        for kind, index in events:
            self._handlers[kind](index)

    def end_window(self) -> None:
        """All micro-batches of a step have been computed."""

    def step(self) -> None:
        """The optimizer's update, when all gradients are there."""
        if self.split.offload:
            return
        self.update([self.updated(self.facts.parameters[number]) for number in self.trained])

    def update(self, tensors: list[int]) -> None:
        """The temporary memory of the optimizer.

        Args:
            tensors: bytes of each tensor that it updates, in order.
        """
        for nbytes in (pieces := self.workspace(tensors)):
            self.ledger.take("optimizer", nbytes)
        for nbytes in pieces:
            self.ledger.give("optimizer", nbytes)

    def workspace(self, tensors: list[int]) -> list[int]:
        """Bytes of each tensor of the temporary memory that an update of `tensors` has at most."""
        facts = self.facts.optimizer
        before = [0, *tensors[:-1]]
        if not facts.at_once and tensors:
            pairs = zip(tensors, before, strict=True)
            most = max(pairs, key=lambda pair: facts.workspace * pair[0] + facts.carried * pair[1])
            tensors, before = [most[0]], [most[1]]
        whole = int(facts.workspace)
        shares = [1.0] * whole + ([facts.workspace - whole] if facts.workspace > whole else [])
        pieces = [int(nbytes * share) for nbytes in tensors for share in shares]
        return [*pieces, *(int(nbytes * facts.carried) for nbytes in before if facts.carried)]

    def state(self, nbytes: int) -> list[int]:
        """Bytes of each tensor of the optimizer's state for a tensor of `nbytes`."""
        facts = self.facts.optimizer
        whole = int(facts.state)
        return [*([nbytes] * whole), int(nbytes * (facts.state - whole)), facts.per_parameter]

    def collective(self, nbytes: int) -> None:
        """The copy that the communication library makes of the whole tensor of an all-gather or
        reduce-scatter."""
        if self.device.copies_in_collectives:
            self.ledger.take("framework", nbytes)
            self.ledger.give("framework", nbytes)

    def sum_over(self, nbytes: int, *axes: str) -> None:
        """The memory that an all-reduce over the ranks of `axes` takes for itself."""
        scratch = self.device.scratch_of_sum(nbytes, self.split.dims.size(*axes))
        self.ledger.take("framework", scratch)
        self.ledger.give("framework", scratch)

    # -- events -----------------------------------------------------------------------

    def allocate(self, tensor: int) -> None:
        """A tensor of the timeline gets its memory."""
        self._parts[tensor] = "activations"
        self.ledger.take("activations", self.size(tensor))

    def free(self, tensor: int) -> None:
        """A tensor of the timeline is dropped."""
        if tensor in self._parts and tensor not in self._held:
            self.release(tensor)

    def release(self, tensor: int) -> None:
        """Give back the memory of a live tensor."""
        self.ledger.give(self._parts.pop(tensor), self.size(tensor))

    def gradient(self, parameter: int) -> None:
        """The gradient of a parameter is complete."""
        tensor = self._timeline.gradients.get(parameter)
        if tensor is not None and self._parts.get(tensor) == "activations":
            self.ledger.move("activations", "gradients", self.size(tensor))
            self._parts[tensor] = "gradients"

    def exchange(self, collective: int) -> None:
        """Ranks that share the model exchange a tensor."""
        operation, axis, size = self._timeline.collectives[collective]
        nbytes = size.at(self.split.micro_batch)
        if operation in COPIED:
            self.collective(nbytes)
        elif operation == "all_reduce" and axis:
            self.sum_over(nbytes, axis)

    def begin(self) -> None:
        """Forward of a micro-batch begins."""

    def enter_forward(self, block: int) -> None:
        """A block begins its forward."""

    def leave_forward(self, block: int) -> None:
        """A block has returned."""

    def backward(self, _: int) -> None:
        """Backward of the micro-batch begins."""

    def enter_backward(self, block: int) -> None:
        """The gradient of a block's output is there."""

    def leave_backward(self, block: int) -> None:
        """The gradients of a block's inputs are there."""

    def finish(self) -> None:
        """Backward has ended."""

    def size(self, tensor: int) -> int:
        """Bytes of a tensor of the timeline."""
        return self._timeline.sizes[tensor].at(self.split.micro_batch)
