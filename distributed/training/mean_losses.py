"""MeanLosses: over how many elements a loss of torch was averaged.

A loss that is the mean of a micro-batch has to be weighed by what it is the mean of (C2): tokens that are
not masked, elements of a selection, samples. A function that returns one number does not say which. Losses
of `torch.nn.functional` that are called in it are recorded, and a returned number that is one of them has
its count. One that was multiplied has none: the factor may be a count as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from distributed.errors import UserError

__all__ = ["Mean", "MeanLosses", "class_weight", "is_watching", "leave_uncompiled", "mixes_samples"]

Count = Tensor | int


@dataclass(frozen=True)
class Mean:
    """A loss that torch computed as a mean.

    Attributes:
        value: the loss, 0-dimensional.
        count: what was summed, divided by what the sum was divided by.
        pairs: whether it is a mean over pairs of samples, because shapes of other dimensions were broadcast.
        kind: name of torch's function.
        elements: of the target, masked ones included.
        called: by its name in `torch.nn.functional` at the time of the call.
        version: of `value` then; a later one means that the value was changed in place.
    """

    value: Tensor
    count: Count
    kind: str
    elements: int
    called: bool
    version: int
    pairs: bool = False

    def is_value_of(self, loss: Tensor) -> bool:
        """Whether `loss` is this mean, in whatever dtype and shape."""
        value = self.value
        if value._version != self.version:
            return False
        # Wrappers of modules return a detached alias through an autograd function of their own.
        shared = value.data_ptr() == loss.data_ptr() != 0 and value.dtype == loss.dtype
        return value is loss or shared or any(value.grad_fn is node for node in _same(loss.grad_fn))


class MeanLosses:
    """Records the losses that functions under `recording` compute.

    Functions in `torch.nn.functional` are replaced meanwhile, which costs nothing per operation. One that
    was imported by its own name is only seen by a mode that all operations of torch pass: it is entered for
    the first micro-batch, and for the others if it was needed there.

    Attributes:
        found: the losses of the last micro-batch, the latest first.
        is_first: no micro-batch has been recorded yet.
    """

    def __init__(self) -> None:
        self.found: list[Mean] = []
        self.is_first = True
        self._num_pairs = 0
        self._watch = True

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Forget what was recorded, and record the losses that this thread computes in the block."""
        self.found = []
        token = _RECORDER.set(self)
        try:
            with _replaced(), _Watch() if self._watch else nullcontext():
                yield
        finally:
            _RECORDER.reset(token)
            self.is_first = False

    @property
    def watches(self) -> bool:
        """Whether `recording` enters the mode that all operations pass."""
        return self._watch

    def of(self, loss: Tensor) -> Mean | None:
        """The recorded mean that `loss` is, in whatever dtype and shape, or None."""
        mean = next((m for m in self.found if m.is_value_of(loss)), None)
        self._watch = self._watch and mean is not None and not mean.called
        return mean

    def forget(self) -> None:
        """Drop what was recorded. Backward in two halves does not free its graph, which would be live until
        the next micro-batch."""
        self.found = []

    def note_pairs(self, arguments: dict[str, Any]) -> None:
        """Note whether a cross-entropy compares the samples of the micro-batch with each other."""
        self._num_pairs = self._num_pairs or _num_pairs(arguments)

    def take_pairs(self) -> int:
        """Samples that a loss of the first micro-batch compared with each other, 0 without; once."""
        found, self._num_pairs = self._num_pairs, 0
        return found

    def counts_other_than(self, num_samples: int) -> int | None:
        """Targets of a recorded loss over classes that are not one of each sample, or None."""
        for mean in self.found:
            if mean.kind in _CLASSES:
                counted = int(mean.count) if _is_readable(mean.count) else mean.elements
                if counted != num_samples:
                    return counted
        return None


def _is_readable(count: Any) -> bool:
    """Whether a number can be read without waiting for a device."""
    if not isinstance(count, Tensor):
        return True
    return count.device.type == "cpu" and not isinstance(count, FakeTensor)


def is_watching() -> bool:
    """Whether all operations pass a mode that records losses, because they may be called by any name."""
    recorder = _RECORDER.get()
    return recorder is not None and recorder.watches


def mixes_samples(output: Any, target: Any) -> bool:
    """Whether an elementwise loss would compare samples with other samples, as ``(N, 1)`` with ``(N,)``."""
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return False
    dims = sorted((output.dim(), target.dim()))
    return 0 < dims[0] < dims[1]


def class_weight(weight: Tensor, target: Tensor, kept: Tensor) -> Tensor:
    """Sum of the class weights of the targets that are `kept`; others may be no class at all."""
    return (weight.to(target.device)[torch.where(kept, target, 0)] * kept).sum()


_RECORDER: ContextVar[MeanLosses | None] = ContextVar("recorder", default=None)
_WATCHED: ContextVar[bool] = ContextVar("watched", default=False)


def _classes(a: dict[str, Any]) -> Count:
    """Of a cross-entropy or negative log-likelihood."""
    target: Tensor = a["target"]
    weight: Tensor | None = a["weight"]
    if target.is_floating_point():
        return target.numel() // target.shape[1 if target.dim() > 1 else 0]
    kept = target != a["ignore_index"]
    return kept.sum() if weight is None else class_weight(weight, target, kept)


def _elements(a: dict[str, Any], weight: bool = False) -> Count | None:
    """Of an elementwise loss. One with a `weight` that is divided by has no such count."""
    if weight and a.get("weight") is not None:
        return None
    found: int = torch.broadcast_shapes(a["input"].shape, a["target"].shape).numel()
    return found


def _divergence(a: dict[str, Any]) -> Count | None:
    samples: int = a["input"].shape[0]
    return samples if a["reduction"] == "batchmean" else _elements(a)


def _num_pairs(a: dict[str, Any]) -> int:
    """Rows of a square matrix whose targets are its diagonal, as for in-batch negatives; 0 for others."""
    scores, target = a["input"], a["target"]
    rows = len(scores)
    square = scores.dim() == 2 and scores.shape[1] == rows and target.shape == (rows,)
    if isinstance(target, FakeTensor):
        return rows if square else 0  # it has no values
    return rows if square and torch.equal(target, torch.arange(rows).to(target)) else 0


_CLASSES = ("cross_entropy", "nll_loss")
_LOSSES: dict[str, Callable[[dict[str, Any]], Count | None]] = {
    **dict.fromkeys(_CLASSES, _classes),
    "kl_div": _divergence,
    "binary_cross_entropy": _elements,
    "binary_cross_entropy_with_logits": _elements,
    **dict.fromkeys(("mse_loss", "l1_loss", "huber_loss"), partial(_elements, weight=True)),
    **dict.fromkeys(("smooth_l1_loss", "soft_margin_loss", "poisson_nll_loss"), _elements),
}
_TORCH = {getattr(F, name): name for name in _LOSSES}
_SIGNATURES = {name: signature(function) for function, name in _TORCH.items()}


def _record(name: str, value: Any, args: Any, kwargs: Any, called: bool) -> None:
    recorder = _RECORDER.get()
    if recorder is None or not isinstance(value, Tensor) or value.dim():
        return
    bound = _SIGNATURES[name].bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if recorder.is_first and name == "cross_entropy":
        recorder.note_pairs(given)
    legacy = given.get("size_average") is not None or given.get("reduce") is not None
    count = None if legacy or given["reduction"] not in ("mean", "batchmean") else _LOSSES[name](given)
    if count is not None:
        target = given["target"]
        elements = target.numel() if isinstance(target, Tensor) else 0
        pairs = name not in _CLASSES and mixes_samples(given["input"], target)
        recorder.found.insert(0, Mean(value, count, name, elements, called, value._version, pairs))


def _recorded(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(function)
    def loss(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        if not _WATCHED.get():
            _record(name, value, args, kwargs, called=True)
        return value

    return loss


_REPLACED = {name: _recorded(function, name) for function, name in _TORCH.items()}
_LOCK = threading.Lock()


def leave_uncompiled() -> None:
    """Let the functions that record losses do so in a compiled model as well: its graph breaks there."""
    for name, function in _REPLACED.items():
        if not getattr(function, "_torchdynamo_disable", False):
            disabled = torch.compiler.disable(function)
            disabled.__wrapped__ = function.__wrapped__  # type: ignore[attr-defined]
            _REPLACED[name] = disabled


_users = 0


@contextmanager
def _replaced() -> Iterator[None]:
    """Let the functions of `torch.nn.functional` record; threads may do so at the same time."""
    global _users
    with _LOCK:
        _users += 1
        for name, function in _REPLACED.items():
            setattr(F, name, function)
    try:
        yield
    finally:
        with _LOCK:
            _users -= 1
            for function, name in _TORCH.items() if not _users else ():
                setattr(F, name, function)


class _Watch(TorchFunctionMode):
    """Records losses by whatever name they are called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            _refuse_backward()
        name = _TORCH.get(getattr(func, "__wrapped__", func)) if hasattr(func, "__name__") else None
        if name is None:
            return func(*args, **kwargs)
        token = _WATCHED.set(True)
        try:
            value = func(*args, **kwargs)
        finally:
            _WATCHED.reset(token)
        _record(name, value, args, kwargs, called=False)
        return value


def _refuse_backward() -> NoReturn:
    raise UserError(
        "the function calls backward() itself, and the trainer does so for the loss that it returns:"
        " gradients would be added twice, and those of accumulation and of other ranks would be missing",
        field="training_step",
        got="backward()",
        allowed="a function that returns the loss",
        remedy="Remove backward(), optimizer.step() and zero_grad() from it; torch.autograd.grad is allowed",
    )


_SAME_VALUE = {
    f"{name}Backward0" for name in ("Alias", "Clone", "Mean", "Squeeze", "Sum", "ToCopy", "Unsqueeze", "View")
}
_DEPTH = 6


def _same(node: Any) -> Iterator[Any]:
    """`node` of autograd and those below it, as long as each returns the number that it gets."""
    for _ in range(_DEPTH):
        if node is None:
            return
        yield node
        if node.name() not in _SAME_VALUE:
            return
        node = node.next_functions[0][0]
