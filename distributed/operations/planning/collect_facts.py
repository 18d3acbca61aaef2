"""Collect `ModelFacts` from a model and a sample batch, under fake tensors: nothing is computed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils._pytree import tree_leaves, tree_map

from distributed.checkpoint.torch_state import canonical_name
from distributed.errors import UserError
from distributed.operations.planning.memory_trace import MemoryTrace, RawTimeline
from distributed.operations.planning.optimizer_facts import optimizer_facts, optimizer_work
from distributed.operations.planning.work_trace import RawOperation, WorkTrace, merge
from distributed.planner.estimates.model_facts import (
    BlockFacts,
    Kind,
    ModelFacts,
    ParameterFacts,
    Size,
    Timeline,
)
from distributed.planner.estimates.work_facts import BlockWork, WorkFacts
from distributed.training.activation_checkpointing import recompute
from distributed.training.blocks import find_blocks
from distributed.training.objective import Objective

__all__ = ["collect_facts"]

_SAMPLES = (11, 23)
"""Sizes of micro-batch at which timelines are recorded; sizes of tensors for others lie on a line. Primes,
which are rarely a number of classes: square scores are checked for in-batch losses, by their values."""
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FAKE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


def collect_facts(
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    training_step: Callable[..., Any] | None = None,
    precision: str = "fp32",
    optimizer: str = "adamw",
    momentum: float = 0.0,
    block_classes: Sequence[str] = (),
    device: str = "cpu",
) -> ModelFacts:
    """Facts about training `model`.

    Args:
        model: on any device, the meta device included. It is not changed.
        batch: one micro-batch as the data loader yields it, of any number of samples; only shapes and dtypes
            are read. The first dimension of each tensor is that of samples.
        loss_fn: as the `Trainer` takes it.
        training_step: as the `Trainer` takes it.
        precision: ``fp32``, ``bf16`` or ``fp16``: autocast as in training.
        optimizer: name of the optimizer that the configuration builds.
        momentum: of SGD.
        block_classes: class names of the blocks, as the configuration has them.
        device: of the rank.

    Raises:
        UserError: the model's control flow depends on values, which fake tensors do not have; or what it
            allocates does not grow in proportion to the samples.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        copied = _fake_copy(model, mode, device)
        objective = Objective(loss_fn, training_step, device=device)
        recorder = _Recorder(copied, find_blocks(copied, block_classes), objective, batch, precision, device)
        plain = recorder.pair()
        again = _recomputed(recorder)
    parameters = recorder.parameter_facts()
    return ModelFacts(
        name=type(model).__name__,
        parameters=parameters,
        blocks=recorder.block_facts(plain[0], parameters),
        buffers=tuple(b.numel() * b.element_size() for b in copied.buffers()),
        first=plain[0],
        later=plain[1],
        first_recomputed=again[0] if again else None,
        later_recomputed=again[1] if again else None,
        optimizer=optimizer_facts(optimizer, momentum=momentum, foreach=device != "cpu"),
        precision=precision,
        optimizer_name=optimizer,
        work=WorkFacts(
            recorder.work(), optimizer_work(optimizer, momentum=momentum, foreach=device != "cpu")
        ),
    )


def _fake_copy(model: nn.Module, mode: FakeTensorMode, device: str) -> nn.Module:
    """A copy whose parameters and buffers are fake tensors on `device`; no data is copied."""

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)

    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(fake(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = fake(buffer)
    return copy.deepcopy(model, memo).train(model.training)


def _recomputed(recorder: _Recorder) -> tuple[Timeline, Timeline] | None:
    """The same with activation checkpointing; None where a model cannot be trained so."""
    try:
        lever = recompute(recorder.model, recorder.blocks[1:], "full")
    except UserError:
        return None
    try:
        return recorder.pair()
    finally:
        lever.undo()


class _Recorder:
    """Runs the micro-batches of a fake model at two sizes.

    Args:
        model: of fake tensors.
        blocks: its blocks.
        objective: its loss.
        batch: what the data loader yields.
        precision: of autocast.
        device: of the fake tensors.

    Attributes:
        model: the model.
        blocks: the model, then its blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: list[nn.Module],
        objective: Objective,
        batch: Any,
        precision: str,
        device: str,
    ) -> None:
        self.model, self.blocks = model, [model, *blocks]
        self._objective, self._batch, self._device = objective, batch, device
        self._dtype = _AUTOCAST.get(precision)
        self._flops: dict[int, Size] = {}
        self._outputs: dict[int, Size] = {}
        self._calls: dict[int, int] = {}
        self._work: list[list[RawOperation]] = []

    def pair(self) -> tuple[Timeline, Timeline]:
        """The first and a later micro-batch of an optimizer step."""
        small, large = (self._record(number) for number in _SAMPLES)
        batch = [t for t in tree_leaves(self._batch) if isinstance(t, Tensor)]
        rows = _rows(self._batch)
        inputs = tuple(Size(0, t.numel() // rows * t.element_size()) for t in batch)
        self._calls = self._calls or small[0].calls
        if not self._flops:
            for name, target in (("flops", self._flops), ("outputs", self._outputs)):
                a, b = getattr(small[0], name), getattr(large[0], name)
                target.update({block: _line(a[block], b[block]) for block in a})
        first, later = (self._merge(a, b, inputs) for a, b in zip(small, large, strict=True))
        return first, later

    def _merge(self, small: RawTimeline, large: RawTimeline, inputs: tuple[Size, ...]) -> Timeline:
        if small.events != large.events:
            raise UserError(
                "what the model allocates for one micro-batch depends on the number of samples in it",
                field="batch_size",
                got=" and ".join(map(str, _SAMPLES)),
                allowed="the same operations for any number of samples",
                remedy="Give the numbers of the model to `facts_from_numbers` instead of the object",
            )
        sizes = tuple(_line(a, b) for a, b in zip(small.sizes, large.sizes, strict=True))
        return Timeline(sizes, tuple(small.events), dict(small.gradients), inputs)

    def _record(self, num_samples: int) -> tuple[RawTimeline, RawTimeline]:
        batch = _resized(self._batch, num_samples, self._device)
        trace = MemoryTrace(self.blocks, self.model.parameters())
        work = WorkTrace(self.blocks)
        trace.ignore([*self.model.buffers(), *(t for t in tree_leaves(batch) if isinstance(t, Tensor))])
        try:
            with _explained(), trace, work:
                # Some work is done once only, such as checks of the loss.
                self._micro_batch(trace, batch, num_samples)
                for parameter in self.model.parameters():
                    parameter.grad = None
                work.take()
                first = self._micro_batch(trace, batch, num_samples)
                self._work.append(work.take())
                later = self._micro_batch(trace, batch, num_samples)
        finally:
            trace.remove()
            work.remove()
            for parameter in self.model.parameters():
                parameter.grad = None
        return first, later

    def _micro_batch(self, trace: MemoryTrace, batch: Any, num_samples: int) -> RawTimeline:
        self._objective.begin_window()
        with self._autocast():
            loss = self._loss(batch, num_samples)
        trace.mark(Kind.BACKWARD)
        loss.backward()
        del loss
        return trace.take()

    def _loss(self, batch: Any, num_samples: int) -> Tensor:
        if not self._objective.counted:
            return self._objective.mean(self.model, batch, num_samples)
        total, _ = self._objective(self.model, batch, num_samples)
        return total * (1.0 / num_samples)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.split(":")[0], dtype=self._dtype, enabled=self._dtype is not None)

    def work(self) -> tuple[BlockWork, ...]:
        """Operations of the first micro-batch of a step without activation checkpointing."""
        small, large = self._work[:2]
        return merge(small, large, len(self.blocks), _SAMPLES)

    # -- facts ------------------------------------------------------------------------

    def parameter_facts(self) -> tuple[ParameterFacts, ...]:
        """All parameters with their innermost block."""
        owner: dict[nn.Parameter, int] = {}
        for index, block in enumerate(self.blocks):
            owner |= dict.fromkeys(block.parameters(), index)
        return tuple(
            ParameterFacts(canonical_name(name), tuple(p.shape), p.element_size(), p.requires_grad, owner[p])
            for name, p in self.model.named_parameters()
        )

    def block_facts(self, first: Timeline, parameters: tuple[ParameterFacts, ...]) -> tuple[BlockFacts, ...]:
        """The model outside of its blocks, then each block."""
        names = {module: name for name, module in self.model.named_modules()}
        forward = _forward_sizes(first)
        inner = {b for block in self.blocks[1:] for b in block.buffers()}
        facts = []
        for index, block in enumerate(self.blocks):
            own = [p for p in parameters if p.block == index]
            buffers = [b for b in block.buffers() if index or b not in inner]
            saved, workspace = forward.get(index, (Size(0), Size(0)))
            facts.append(
                BlockFacts(
                    name=names[block],
                    trained_elements=sum(p.numel for p in own if p.trained),
                    frozen_elements=sum(p.numel for p in own if not p.trained),
                    buffer_bytes=sum(b.numel() * b.element_size() for b in buffers),
                    forward_flops=self._flops.get(index, Size(0)),
                    saved=saved,
                    output=self._outputs.get(index, Size(0)),
                    workspace=workspace,
                    calls=self._calls.get(index, 0),
                )
            )
        return tuple(facts)


def _forward_sizes(timeline: Timeline) -> dict[int, tuple[Size, Size]]:
    """Block -> what its forward leaves, and what it has at most beyond that at once."""
    found: dict[int, tuple[Size, Size]] = {}
    inside, owner = [0], dict[int, int]()
    now: dict[int, tuple[float, float]] = {}
    most: dict[int, tuple[float, float]] = {}
    for kind, index in timeline.events:
        if kind == Kind.BACKWARD:
            break
        if kind == Kind.ENTER_FORWARD and index:
            inside.append(index)
        elif kind == Kind.LEAVE_FORWARD and index and inside[-1] == index:
            inside.pop()
        elif kind in (Kind.ALLOCATE, Kind.FREE):
            block = owner.setdefault(index, inside[-1])
            sign, size = (1 if kind == Kind.ALLOCATE else -1), timeline.sizes[index]
            fixed, each = now.get(block, (0.0, 0.0))
            now[block] = (fixed + sign * size.fixed, each + sign * size.per_sample)
            most[block] = max(most.get(block, (0.0, 0.0)), now[block], key=lambda pair: pair[0] + pair[1])
    for block, (fixed, each) in now.items():
        top = most[block]
        found[block] = Size(fixed, each), Size(top[0] - fixed, top[1] - each)
    return found


def _line(small: int, large: int) -> Size:
    """The line through sizes at both numbers of samples."""
    each = (large - small) / (_SAMPLES[1] - _SAMPLES[0])
    return Size(small - each * _SAMPLES[0], each)


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


def _resized(batch: Any, num_samples: int, device: str) -> Any:
    """`batch` with another number of samples, as fake tensors."""
    rows = _rows(batch)

    def resized(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = list(value.shape)
        if shape and shape[0] == rows:
            shape[0] = num_samples
        return torch.empty(shape, dtype=value.dtype, device=device)

    return tree_map(resized, batch)


@contextmanager
def _explained() -> Iterator[None]:
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
            remedy="Give the numbers of the model to `facts_from_numbers` instead of the object",
        ) from error
