"""The order in which a forward pass calls the modules of a model, and the chain of blocks in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

__all__ = [
    "ATTENTION",
    "attention_flops",
    "Call",
    "Key",
    "calls_replaced",
    "chains",
    "first_tensor",
    "main_tensor",
    "takes",
    "trace",
]

Key = int | str
"""Position or name of an argument."""


def attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    """Floating-point operations of attention. torch before 2.12 counts none whose keys have fewer heads."""
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


ATTENTION = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention"): attention_flops
    for kernel in ("flash", "efficient", "cudnn")
}
"""Operation of GPUs -> its formula, as `FlopCounterMode` takes it."""


@dataclass(eq=False)
class Call:
    """One call of a module.

    Attributes:
        module: what was called.
        parent: the call inside which it was, None for the model's own.
        start: number of calls that began before it.
        end: number of calls that had begun when it returned.
        arguments: the tensors among its arguments.
        output: what it returned.
        cost: floating-point operations.
    """

    module: nn.Module
    parent: Call | None
    start: int
    arguments: dict[Key, Tensor]
    end: int = 0
    output: Any = None
    cost: float = 0.0

    @property
    def ancestors(self) -> list[Call]:
        """The calls around it, innermost first."""
        return [] if self.parent is None else [self.parent, *self.parent.ancestors]


@dataclass
class _Recorder:
    flops: FlopCounterMode
    calls: list[Call] = field(default_factory=list)
    stack: list[Call] = field(default_factory=list)

    def __call__(self, module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        named: list[tuple[Key, Any]] = [*enumerate(args), *kwargs.items()]
        tensors: dict[Key, Tensor] = {k: v for k, v in named if isinstance(v, Tensor)}
        made = Call(module, self.stack[-1] if self.stack else None, len(self.calls), tensors)
        self.calls.append(made)
        self.stack.append(made)
        before = self.flops.get_total_flops()
        try:
            made.output = call(*args, **kwargs)
        finally:
            self.stack.pop()
        made.end, made.cost = len(self.calls), float(self.flops.get_total_flops() - before)
        return made.output


@contextmanager
def calls_replaced(
    modules: Mapping[nn.Module, Callable[..., Any]],
) -> Iterator[None]:
    """Within the block, a call of a module of `modules` calls its function instead, hooks included, with what
    the call would have been as the first argument."""
    replaced = [(module, vars(module).get("_compiled_call_impl")) for module in modules]
    for module, before in replaced:
        # torch calls this attribute, which `nn.Module.compile` sets, in place of hooks and forward.
        module._compiled_call_impl = partial(modules[module], before or module._call_impl)
    try:
        yield
    finally:
        for module, before in replaced:
            vars(module).pop("_compiled_call_impl", None)
            if before is not None:
                module._compiled_call_impl = before


def trace(model: nn.Module, forward: Callable[[], Any]) -> list[Call]:
    """The calls of modules of `model` in one forward pass, in order.

    Args:
        forward: calls the model.
    """
    flops = FlopCounterMode(display=False, custom_mapping=ATTENTION)
    recorder = _Recorder(flops)
    with calls_replaced({module: partial(recorder, module) for module in model.modules()}), flops:
        forward()
    return recorder.calls


def main_tensor(output: Any) -> Tensor | None:
    """The tensor of a block's output that the next block takes; None if it has several, or none."""
    if isinstance(output, Tensor):
        return output
    if type(output) in (tuple, list) and output and isinstance(output[0], Tensor):
        return output[0] if not any(isinstance(other, Tensor) for other in output[1:]) else None
    return None


def chains(calls: list[Call]) -> list[list[Call]]:
    """Runs of calls inside one call, each of which takes what the one before has returned, and whose modules
    are called once."""
    times: dict[nn.Module, int] = {}
    siblings: dict[Call | None, list[Call]] = {}
    for call in calls:
        times[call.module] = times.get(call.module, 0) + 1
        siblings.setdefault(call.parent, []).append(call)
    found: list[list[Call]] = []
    for together in siblings.values():
        run: list[Call] = []
        for call in together:
            alone = times[call.module] == 1 and main_tensor(call.output) is not None
            if run and not (alone and takes(call, run[-1]) is not None):
                found.append(run)
                run = []
            if alone:
                run.append(call)
        found.append(run)
    return [run for run in found if run]


def takes(call: Call, before: Call) -> Key | None:
    """The argument of `call` that is what `before` has returned."""
    given = main_tensor(before.output)
    return next((key for key, tensor in call.arguments.items() if tensor is given), None)


def first_tensor(call: Call) -> Key | None:
    """The first argument of `call` that is a floating-point tensor."""
    found = (key for key, tensor in call.arguments.items() if torch.is_floating_point(tensor))
    return next(found, next(iter(call.arguments), None))
