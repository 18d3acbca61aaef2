"""Record when the tensors of a computation come and go, as a `Timeline`.

Every operation passes a `TorchDispatchMode`. A storage that was not seen before is an allocation; it is free
when torch drops it, which a weak reference reports. Under `FakeTensorMode` this needs no memory and no time
of the device. `torch.distributed._tools.MemTracker` counts in the same way; it keeps sums, and not the order
that other splits need.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distributed.checkpoint.dtensor import local_part
from distributed.operations.planning.collective_trace import collective_of
from distributed.planner.estimates.model_facts import Event, Kind

__all__ = ["MemoryTrace", "RawTimeline"]


class RawTimeline:
    """What was recorded at one size of micro-batch.

    Attributes:
        sizes: bytes of each tensor.
        events: in order of time.
        gradients: index of a parameter -> index of the tensor that is its gradient.
        calls: index of a block -> number of its calls in forward.
        collectives: (operation, name of the process group, bytes), in order.
        sent: indices of the tensors that a stage sends, forward and backward.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.events: list[Event] = []
        self.gradients: dict[int, int] = {}
        self.calls: dict[int, int] = {}
        self.collectives: list[tuple[str, str, int]] = []
        self.sent: tuple[int | None, int | None] = (None, None)


class MemoryTrace(TorchDispatchMode):
    """Records while it is entered.

    Args:
        blocks: in the order of their indices; each is above all that follow it and lie in it.
        parameters: in the order of their indices. Of a DTensor, this rank's part counts.
    """

    def __init__(self, blocks: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._line = RawTimeline()
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._left: set[int] = set()
        self._marked: set[Event] = set()
        self._handles: list[Any] = []
        self._backward = False
        self._parameters = list(parameters)
        self._ignored: dict[int, Any] = {}
        self.ignore(self._parameters)
        for index, block in enumerate(blocks):
            self._watch_block(index, block)
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._gradient_hook(index))
                self._handles.append(hook)

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def take(self) -> RawTimeline:
        """What was recorded since the last call. Tensors that are still live are forgotten."""
        line, self._line = self._line, RawTimeline()
        for reference, _ in self._live.values():
            storage = reference()
            if storage is not None:
                self._ignored[id(storage)] = storage
        self._live.clear()
        self._left.clear()
        self._marked.clear()
        self._backward = False
        return line

    @property
    def num_events(self) -> int:
        """Number of events since the last call of `take`."""
        return len(self._line.events)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave out storages that exist already."""
        for tensor in tensors:
            storage = local_part(tensor).untyped_storage()
            self._ignored[id(storage)] = storage

    def number_of(self, tensor: Tensor | None) -> int | None:
        """Index of the tensor in the timeline; None if its memory was there before."""
        found = None if tensor is None else self._live.get(id(local_part(tensor).untyped_storage()))
        return None if found is None else found[1]

    def mark(self, kind: Kind, index: int = 0) -> None:
        """Add an event."""
        self._backward = self._backward or kind == Kind.BACKWARD
        self._line.events.append(Event(kind, index))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls operations on the parts, which come here again
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        found = collective_of(func, args, result)
        if found is not None:
            self._line.events.append(Event(Kind.COLLECTIVE, len(self._line.collectives)))
            self._line.collectives.append(found)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._live or key in self._ignored:
            return
        line, index = self._line, len(self._line.sizes)
        line.sizes.append(storage.nbytes())
        line.events.append(Event(Kind.ALLOCATE, index))

        def freed(_: Any) -> None:
            self._live.pop(key, None)
            if self._line is line:
                line.events.append(Event(Kind.FREE, index))

        self._live[key] = (weakref.ref(storage, freed), index)

    def _watch_block(self, index: int, block: nn.Module) -> None:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._backward:
                self._line.calls[index] = self._line.calls.get(index, 0) + 1
            if self._backward or index in self._left:
                return
            self.mark(Kind.ENTER_FORWARD, index)
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None and index:
                    tensor.register_hook(self._mark_once(Kind.LEAVE_BACKWARD, index))

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._backward or index in self._left:
                return
            self._left.add(index)
            self.mark(Kind.LEAVE_FORWARD, index)
            for tensor in _tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._mark_once(Kind.ENTER_BACKWARD, index))

        self._handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(block.register_forward_hook(leave, with_kwargs=True))

    def _mark_once(self, kind: Kind, index: int) -> Callable[[Tensor], None]:
        event = Event(kind, index)

        def hook(_: Tensor) -> None:
            if event in self._marked:
                return
            self._marked.add(event)
            events, at = self._line.events, len(self._line.events)
            # The input of a block is the output of the one before it, which has put its hook there first.
            while kind == Kind.LEAVE_BACKWARD and at and events[at - 1].kind == Kind.ENTER_BACKWARD:
                at -= 1
            events.insert(at, event)

        return hook

    def _gradient_hook(self, index: int) -> Callable[[Tensor], None]:
        return lambda parameter: self._note_gradient(index, parameter)

    def note_gradients(self, parameters: Iterable[Tensor]) -> None:
        """The gradients of `parameters` are complete, without hooks of theirs."""
        place: dict[Tensor, int] = {parameter: index for index, parameter in enumerate(self._parameters)}
        for parameter in parameters:
            self._note_gradient(place[parameter], parameter)

    def _note_gradient(self, index: int, parameter: Tensor) -> None:
        line = self._line
        found = self.number_of(parameter.grad)
        if found is not None:
            line.gradients[index] = found
        line.events.append(Event(Kind.GRADIENT, index))


def _tensors(value: Any) -> list[Tensor]:
    """Tensors in what a module returned, also in mappings and objects such as those of transformers."""
    if hasattr(value, "to_tuple"):
        value = value.to_tuple()
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
