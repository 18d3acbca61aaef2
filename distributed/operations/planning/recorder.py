"""Record the micro-batches of a fake model at two sizes, as timelines and facts about its blocks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
from torch.utils._pytree import tree_leaves, tree_map

from distributed.checkpoint.dtensor import local_part
from distributed.checkpoint.torch_state import canonical_name
from distributed.errors import UserError
from distributed.operations.planning.cut_model import RankPart
from distributed.operations.planning.memory_trace import MemoryTrace, RawTimeline
from distributed.operations.planning.work_trace import RawOperation, WorkTrace, merge
from distributed.planner.estimates.model_facts import (
    BlockFacts,
    Collective,
    Kind,
    ParameterFacts,
    Size,
    Timeline,
)
from distributed.planner.estimates.work_facts import BlockWork
from distributed.training.blocks import find_blocks
from distributed.training.objective import Objective

__all__ = ["Recorder", "explained", "resized_batch"]

_SAMPLES = (11, 23)
"""Sizes of micro-batch at which timelines are recorded; sizes of tensors for others lie on a line. Primes,
which are rarely a number of classes: square scores are checked for in-batch losses, by their values."""
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FAKE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


class Recorder:
    """Runs the micro-batches of a fake model at two sizes.

    Args:
        model: of fake tensors.
        block_classes: class names of its blocks.
        objective: its loss.
        batch: what the data loader yields.
        precision: of autocast.
        device: of the fake tensors.
        part: what the rank has of the model, which is cut already.

    Attributes:
        model: the model.
        blocks: the model, then its blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        block_classes: Sequence[str],
        objective: Objective,
        batch: Any,
        precision: str,
        device: str,
        part: RankPart,
    ) -> None:
        held = [block for block in find_blocks(model, block_classes) if _is_held(block)]
        self.model, self.blocks, self._part = model, [model, *held], part
        self._objective, self._batch, self._device = objective, batch, device
        self._dtype = _AUTOCAST.get(precision)
        self._calls: dict[int, int] = {}
        self._work: list[list[RawOperation]] = []
        self._in_halves = False

    def pair(self, in_halves: bool = False) -> tuple[Timeline, Timeline]:
        """The first and a later micro-batch of an optimizer step.

        Args:
            in_halves: compute the gradients of activations first, and those of weights apart.
        """
        self._in_halves = in_halves
        small, large = (self._record(number) for number in _SAMPLES)
        inputs = tuple(_line(a, b) for a, b in zip(*map(self._input_sizes, _SAMPLES), strict=True))
        self._calls = self._calls or small[0].calls
        first, later = (self._merge(a, b, inputs) for a, b in zip(small, large, strict=True))
        return first, later

    def _merge(self, small: RawTimeline, large: RawTimeline, inputs: tuple[Size, ...]) -> Timeline:
        if small.events != large.events:
            raise UserError(
                "what the model allocates for one micro-batch depends on the number of samples in it",
                field="batch_size",
                got=" and ".join(map(str, _SAMPLES)),
                allowed="the same operations for any number of samples",
                remedy="Plan from the numbers of the model instead: `plan --parameters`, or `--layers` and"
                " `--hidden`, and a mapping of them for `distributed.plan`",
            )
        sizes = tuple(_line(a, b) for a, b in zip(small.sizes, large.sizes, strict=True))
        collectives = tuple(
            Collective(operation, self._part.axes.get(group, ""), _line(nbytes, other[2]))
            for (operation, group, nbytes), other in zip(small.collectives, large.collectives, strict=True)
        )
        return Timeline(sizes, tuple(small.events), dict(small.gradients), inputs, collectives, small.sent)

    def _input_sizes(self, num_samples: int) -> list[int]:
        """Bytes of the batch, and of this rank's slices where these are copies."""
        batch = resized_batch(self._batch, num_samples, self._device)
        tensors = [t for t in tree_leaves((batch, self._part.slice_of(batch))) if isinstance(t, Tensor)]
        return [
            storage.nbytes() for storage in {id(s): s for s in map(Tensor.untyped_storage, tensors)}.values()
        ]

    def received(self) -> tuple[Size, Size]:
        """What a stage of a pipeline receives for a micro-batch, in forward and in backward."""
        small, large = (self._part.boundary(number) for number in _SAMPLES)
        found = [
            Size(0) if a is None or b is None else _line(a.nbytes, b.nbytes)
            for a, b in zip(small, large, strict=True)
        ]
        return found[0], found[1]

    def _record(self, num_samples: int) -> tuple[RawTimeline, RawTimeline]:
        whole = resized_batch(self._batch, num_samples, self._device)
        batch = self._part.slice_of(whole)
        trace, work = MemoryTrace(self.blocks, self._held()), WorkTrace(self.blocks)
        boundary = self._part.boundary(num_samples)
        held = [t for t in (*self.model.buffers(), *boundary) if t is not None and not t.is_meta]
        trace.ignore([*held, *(t for t in tree_leaves((whole, batch)) if isinstance(t, Tensor))])
        try:
            work.active = False
            with explained(), _one_sequence_in_each_row(self._batch), trace, work:
                # Some work is done once only, such as checks of the loss, or for each operation on DTensors.
                for _ in range(2 if self._part.axes else 1):
                    self._micro_batch(trace, batch, num_samples, boundary)
                for parameter in self.model.parameters():
                    parameter.grad = None
                work.active = len(self._work) < len(_SAMPLES)
                first = self._micro_batch(trace, batch, num_samples, boundary)
                self._work.append(work.take())
                work.active = False
                later = self._micro_batch(trace, batch, num_samples, boundary)
        finally:
            trace.remove()
            work.remove()
            for parameter in self.model.parameters():
                parameter.grad = None
        return first, later

    def _micro_batch(
        self,
        trace: MemoryTrace,
        batch: Any,
        num_samples: int,
        boundary: tuple[Tensor | None, Tensor | None],
    ) -> RawTimeline:
        self._objective.begin_window()
        received, gradient = boundary
        if received is not None:
            received.grad = None
        with self._part.running():
            with self._autocast():
                output = self._part.run(received, num_samples, lambda: self._loss(batch, num_samples))
            forward = trace.number_of(output) if gradient is not None else None
            trace.mark(Kind.BACKWARD)
            if self._in_halves:
                self._backward_in_halves(trace, output, gradient, received)
            else:
                output.backward(gradient)
            del output
        backward = trace.number_of(received.grad) if received is not None else None
        line = trace.take()
        line.sent = forward, backward
        return line

    def _backward_in_halves(
        self, trace: MemoryTrace, output: Tensor, gradient: Tensor | None, received: Tensor | None
    ) -> None:
        """As a stage of torch 2.13 does (stage.py, ``backward_one_chunk`` and ``backward_weight_one_chunk``).
        The first stage, whose input has no gradient, computes all in the second half."""
        # Imports torch.export, which takes a second.
        from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

        if received is None:
            trace.mark(Kind.WEIGHTS)
            output.backward(gradient)
            return
        trained, gradients = self._part.trained(self.model), None if gradient is None else [gradient]
        _, groups = stage_backward_input([output], gradients, [received], iter(trained))
        _in_order(groups, trained)
        trace.mark(Kind.WEIGHTS)
        stage_backward_weight(iter(trained), groups)
        trace.note_gradients(trained)  # no hook has seen them

    def _held(self) -> list[nn.Parameter]:
        """The parameters that this rank holds."""
        return [p for p in self.model.parameters() if not p.is_meta]

    def _loss(self, batch: Any, num_samples: int) -> Tensor:
        if not self._objective.counted or not self._objective.weighs_means(batch):
            return self._objective.mean(self.model, batch, num_samples)
        total, _ = self._objective(self.model, batch, num_samples)
        return total * (1.0 / num_samples)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.split(":")[0], dtype=self._dtype, enabled=self._dtype is not None)

    # -- facts ------------------------------------------------------------------------

    def work(self) -> tuple[BlockWork, ...]:
        """Operations of the first micro-batch of a step without activation checkpointing."""
        small, large = self._work[:2]
        return merge(small, large, len(self.blocks), _SAMPLES)

    def parameter_facts(self) -> tuple[ParameterFacts, ...]:
        """All parameters with their innermost block."""
        owner: dict[nn.Parameter, int] = {}
        for index, block in enumerate(self.blocks):
            owner |= dict.fromkeys(block.parameters(), index)
        return tuple(
            ParameterFacts(
                canonical_name(name),
                tuple(local_part(p).shape),
                p.element_size(),
                p.requires_grad,
                owner[p],
                is_expert="expert"
                in (getattr(getattr(p, "device_mesh", None), "mesh_dim_names", None) or ()),
            )
            for name, p in self.model.named_parameters()
            if not p.is_meta
        )

    def block_facts(self) -> tuple[BlockFacts, ...]:
        """The model outside of its blocks, then each block."""
        names = {module: name for name, module in self.model.named_modules()}
        return tuple(BlockFacts(names[b], self._calls.get(i, 0)) for i, b in enumerate(self.blocks))


def _in_order(groups: list[dict[str, Any]], parameters: Sequence[nn.Parameter]) -> None:
    """Sort what torch keeps in sets between the halves of backward, whose order differs from run to run."""
    # A view creates the node that adds up the gradient of a parameter.
    nodes: list[Any] = [p.view_as(p).grad_fn for p in parameters]
    place = {node.next_functions[0][0]: at for at, node in enumerate(nodes)}
    for group in groups:
        group["params"] = sorted(group["params"], key=lambda node: place[node])
        pairs = zip(group["intermediates"], group["grads"], strict=True)
        ordered = sorted(pairs, key=lambda pair: pair[0]._sequence_nr())
        group["intermediates"], group["grads"] = map(list, zip(*ordered, strict=True))
    groups.sort(key=lambda group: place[group["params"][0]])


def _is_held(block: nn.Module) -> bool:
    """Whether this rank holds what a block has."""
    parameters = list(block.parameters())
    return not parameters or any(not p.is_meta for p in parameters)


def _line(small: int, large: int) -> Size:
    return Size.through(small, large, _SAMPLES)


def _rows(batch: Any) -> int:
    tensors = [t for t in tree_leaves(batch) if isinstance(t, Tensor)]
    if not tensors or not tensors[0].dim() or not len(tensors[0]):
        raise UserError(
            "the sample batch has no tensor whose first dimension is that of samples",
            field="batch",
            got=type(batch).__name__,
            allowed="what the data loader yields",
            remedy="Pass one batch of the data loader",
        )
    return len(tensors[0])


def resized_batch(batch: Any, num_samples: int, device: str) -> Any:
    """`batch` with another number of samples, as fake tensors."""
    rows = _rows(batch)

    def sized(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = list(value.shape)
        if shape and shape[0] == rows:
            shape[0] = num_samples
        return torch.empty(shape, dtype=value.dtype, device=device)

    return tree_map(sized, batch)


@contextmanager
def _one_sequence_in_each_row(batch: Any) -> Iterator[None]:
    """Let models of transformers find, as with values, that positions which they count themselves are those
    of one sequence in each row. They make a mask for several where they cannot read the positions
    (``masking_utils.find_packed_sequence_indices``)."""
    module: Any = sys.modules.get("transformers.masking_utils")
    find = getattr(module, "find_packed_sequence_indices", None)
    if find is None or (isinstance(batch, Mapping) and "position_ids" in batch):
        yield
        return
    module.find_packed_sequence_indices = _no_packed_sequences
    try:
        yield
    finally:
        module.find_packed_sequence_indices = find


def _no_packed_sequences(position_ids: Tensor) -> None:
    return None


@contextmanager
def explained() -> Iterator[None]:
    """Raise errors of fake tensors as errors of the model."""
    try:
        with warnings.catch_warnings():
            # The checks of a loss compare addresses, which fake tensors do not have.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    except _FAKE_ERRORS as error:
        raise UserError(
            "the control flow of the model, or the shape of a tensor in it, depends on values, which fake"
            " tensors do not have",
            field="model",
            got=str(error).splitlines()[0][:120] or type(error).__name__,
            allowed="operations whose shapes follow from the shapes of the batch",
            remedy="Plan from the numbers of the model instead: `plan --parameters`, or `--layers` and"
            " `--hidden`, and a mapping of them for `distributed.plan`",
        ) from error
