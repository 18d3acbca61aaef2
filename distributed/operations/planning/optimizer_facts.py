"""Measure what a named optimizer keeps and needs, on one small parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distributed.operations.planning.memory_trace import MemoryTrace
from distributed.operations.planning.work_trace import WorkTrace, merge
from distributed.planner.estimates.model_facts import Kind, OptimizerFacts
from distributed.planner.estimates.work_facts import OptimizerWork

__all__ = ["OPTIMIZERS", "optimizer_facts", "optimizer_work", "settings_of"]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}
"""Name in the configuration -> class."""

_ROWS = 256
_SMALL = 8
"""A tensor of state with less than a part of so many of the parameter does not grow with it, such as the
step."""


def optimizer_facts(name: str, *, foreach: bool = False, **settings: Any) -> OptimizerFacts:
    """State and temporary memory per byte of a parameter.

    Args:
        name: of the optimizer, as the configuration has it.
        foreach: whether parameters are updated together, as torch does by default on GPUs.
        settings: arguments of torch's class of this name, such as ``momentum``.
    """
    build = partial(_build, name, foreach=foreach, settings=settings)
    most, state, whole = _measured(build, 1)
    at_once = foreach and not settings.get("fused")
    return OptimizerFacts(
        state=sum(nbytes for nbytes in state if nbytes >= whole // _SMALL) / whole,
        workspace=round(most / whole, 2),
        per_parameter=sum(nbytes for nbytes in state if nbytes < whole // _SMALL),
        at_once=at_once,
        carried=0.0 if at_once else round((_measured(build, 2)[0] - most) / whole, 2),
    )


def _measured(build: Callable[[nn.Module], torch.optim.Optimizer], number: int) -> tuple[int, list[int], int]:
    """Most temporary memory of a step that updates `number` equal parameters, sizes of the state, and bytes
    of a parameter."""
    model = nn.Sequential(*(nn.Linear(_ROWS, _ROWS, bias=False) for _ in range(number)))
    optimizer, parameters = build(model), list(model.parameters())
    trace = MemoryTrace([model], parameters)
    for _ in range(2):  # state exists after the first step
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        trace.take()
        trace.ignore([*(p.grad for p in parameters if p.grad is not None), *_state(optimizer)])
        with trace:
            optimizer.step()
    line = trace.take()
    trace.remove()
    now = most = 0
    for kind, index in line.events:
        now += line.sizes[index] * (1 if kind == Kind.ALLOCATE else -1)
        most = max(most, now)
    return most, [t.nbytes for t in _state(optimizer)], parameters[0].nbytes


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Arguments of the class of `optimizer`. Of a setting that its groups have with several values, the
    largest, which needs most memory."""
    found = dict(optimizer.defaults)
    for name in found:
        values = [
            group[name] for group in optimizer.param_groups if isinstance(group.get(name), bool | float | int)
        ]
        if values:
            found[name] = max(values)
    return found


def _build(name: str, model: nn.Module, foreach: bool, settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    # torch refuses a fused optimizer that also has foreach.
    return OPTIMIZERS[name](
        model.parameters(), lr=1e-3, foreach=foreach and not settings.get("fused"), **settings
    )


def optimizer_work(name: str, *, foreach: bool = False, **settings: Any) -> OptimizerWork:
    """Operations of the update of one parameter, as lines in its elements.

    Args:
        name, foreach, settings: as of `optimizer_facts`.
    """
    sides = (_ROWS, 2 * _ROWS)
    counted = []
    for side in sides:
        model = nn.Linear(side, 1, bias=False)
        optimizer = _build(name, model, foreach, settings)
        trace = WorkTrace()
        for _ in range(2):  # state exists after the first step
            model.weight.grad = torch.zeros_like(model.weight)
            trace.take()
            with trace:
                optimizer.step()
        counted.append(trace.take())
    (block,) = merge(counted[0], counted[1], 1, sides)
    return OptimizerWork(block.forward, foreach and not settings.get("fused"))


def _state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor)]
