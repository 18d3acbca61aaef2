"""Layout: what a rank keeps, and when it allocates and frees it; here, a whole model on every rank."""

from __future__ import annotations

from typing import ClassVar

from distributed.planner.estimates.device_memory import DeviceMemory
from distributed.planner.estimates.ledger import Ledger
from distributed.planner.estimates.model_facts import Kind, ModelFacts, ParameterFacts, Timeline
from distributed.planner.estimates.split import Split

__all__ = ["Buckets", "Layout"]


class Layout:
    """A whole model on every rank, as plain PyTorch has it. Subclasses change what they divide.

    Args:
        facts: of the model.
        split: how it is divided.
        ledger: where allocations go.
        device: of the rank.

    Attributes:
        axes: axes of the mesh along which the backend may have several ranks.
        zero_stages: values of `Split.zero_stage` that it knows.
        gathers_once: whether a block is expected to be called once in a forward pass.
        adds_gradients: whether a later micro-batch of a step adds to gradients that are there; otherwise they
            are new in each.
    """

    axes: ClassVar[tuple[str, ...]] = ()
    zero_stages: ClassVar[tuple[int, ...]] = (0,)
    gathers_once: ClassVar[bool] = False
    adds_gradients = True

    def __init__(self, facts: ModelFacts, split: Split, ledger: Ledger, device: DeviceMemory) -> None:
        self.facts, self.split, self.ledger, self.device = facts, split, ledger, device
        self.trained = [index for index, p in enumerate(facts.parameters) if p.trained]
        self.is_last = True
        self._parts: dict[int, str] = {}
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
        }

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
        for number in self.trained:
            for nbytes in self.state(self.updated(self.facts.parameters[number])):
                self.ledger.take("optimizer", nbytes)

    def play(self, timeline: Timeline, *, is_last: bool) -> None:
        """One micro-batch.

        Args:
            timeline: its events.
            is_last: whether it is the last one of its optimizer step, in which gradients are reduced.
        """
        self._timeline, self.is_last = timeline, is_last
        self._parts = {}
        for kind, index in timeline.events:
            self._handlers[kind](index)
        self.finish()
        for tensor, part in list(self._parts.items()):
            if part == "activations":  # what the micro-batch leaves is gone before the next one
                self.release(tensor)

    def step(self) -> None:
        """The optimizer's update, when all gradients are there."""
        self.update([self.updated(self.facts.parameters[number]) for number in self.trained])

    def update(self, tensors: list[int]) -> None:
        """The temporary memory of the optimizer.

        Args:
            tensors: bytes of each tensor that it updates.
        """
        facts = self.facts.optimizer
        together = tensors if facts.at_once else [max(tensors, default=0)]
        whole = int(facts.workspace)
        shares = [1.0] * whole + ([facts.workspace - whole] if facts.workspace > whole else [])
        pieces = [int(nbytes * share) for nbytes in together for share in shares]
        for nbytes in pieces:
            self.ledger.take("optimizer", nbytes)
        for nbytes in pieces:
            self.ledger.give("optimizer", nbytes)

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

    # -- events -----------------------------------------------------------------------

    def allocate(self, tensor: int) -> None:
        """A tensor of the timeline gets its memory."""
        self._parts[tensor] = "activations"
        self.ledger.take("activations", self.size(tensor))

    def free(self, tensor: int) -> None:
        """A tensor of the timeline is dropped."""
        if tensor in self._parts:
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


class Buckets(Layout):
    """DistributedDataParallel with gradients as views of its buckets: a gradient is copied into its bucket as
    soon as it is complete. Micro-batches before the last one leave gradients of their own, because DDP's
    ``no_sync`` does not touch buckets. Source: torch/csrc/distributed/c10d/reducer.cpp,
    ``mark_variable_ready_dense``."""

    axes = ("data",)

    def __init__(self, facts: ModelFacts, split: Split, ledger: Ledger, device: DeviceMemory) -> None:
        super().__init__(facts, split, ledger, device)
        self.reduces = split.dims.world_size > 1
        self._own: dict[int, int] = {}

    def place(self) -> None:
        super().place()
        if self.reduces:
            self.ledger.take("gradients", sum(self.facts.parameters[n].nbytes for n in self.trained))

    def gradient(self, parameter: int) -> None:
        tensor = self._timeline.gradients.get(parameter)
        super().gradient(parameter)
        if not self.reduces:
            return
        if not self.is_last:
            if tensor is not None:
                self._own[parameter] = self.size(tensor)
        elif tensor is not None and tensor in self._parts:
            self.release(tensor)
        elif parameter in self._own:
            self.ledger.give("gradients", self._own.pop(parameter))
