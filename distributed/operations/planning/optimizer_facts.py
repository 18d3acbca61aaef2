"""Measure what a named optimizer keeps and needs, on one small parameter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from distributed.config import DistributedConfig
from distributed.operations.planning.memory_trace import MemoryTrace
from distributed.operations.planning.work_trace import WorkTrace, merge
from distributed.planner.estimates.model_facts import Kind, OptimizerFacts
from distributed.planner.estimates.work_facts import OptimizerWork
from distributed.training.optimizers import build_optimizer

__all__ = ["optimizer_facts", "optimizer_work"]

_ROWS = 256
_SMALL = 8
"""A tensor of state with less than a part of so many of the parameter does not grow with it, such as the
step."""


def optimizer_facts(
    name: str, *, momentum: float = 0.0, weight_decay: float = 0.0, foreach: bool = False
) -> OptimizerFacts:
    """State and temporary memory per byte of a parameter.

    Args:
        name: of the optimizer, as the configuration has it.
        momentum: of SGD.
        weight_decay: of the optimizer. SGD and Adam add it to a copy of the gradient.
        foreach: whether parameters are updated together, as torch does by default on GPUs.
    """
    model = nn.Linear(_ROWS, _ROWS, bias=False)
    config = DistributedConfig(optimizer=name, momentum=momentum, weight_decay=weight_decay)
    optimizer = build_optimizer(None, model, config, 1e-3)
    for group in optimizer.param_groups:
        if "foreach" in group:
            group["foreach"] = foreach
    (parameter,) = model.parameters()
    trace = MemoryTrace([model], [parameter])
    for _ in range(2):  # state exists after the first step
        parameter.grad = torch.zeros_like(parameter)
        trace.take()
        trace.ignore([parameter.grad, *_state(optimizer)])
        with trace:
            optimizer.step()
    line = trace.take()
    trace.remove()
    now = most = 0
    for kind, index in line.events:
        now += line.sizes[index] * (1 if kind == Kind.ALLOCATE else -1)
        most = max(most, now)
    whole = parameter.numel() * parameter.element_size()
    state = [t.numel() * t.element_size() for t in _state(optimizer)]
    return OptimizerFacts(
        state=sum(nbytes for nbytes in state if nbytes >= whole // _SMALL) / whole,
        workspace=round(most / whole, 2),
        per_parameter=sum(nbytes for nbytes in state if nbytes < whole // _SMALL),
        at_once=foreach,
    )


def optimizer_work(
    name: str, *, momentum: float = 0.0, weight_decay: float = 0.0, foreach: bool = False
) -> OptimizerWork:
    """Operations of the update of one parameter, as lines in its elements.

    Args:
        name: of the optimizer, as the configuration has it.
        momentum: of SGD.
        weight_decay: of the optimizer. SGD and Adam add it to a copy of the gradient.
        foreach: whether parameters are updated together, as torch does by default on GPUs.
    """
    config = DistributedConfig(optimizer=name, momentum=momentum, weight_decay=weight_decay)
    sides = (_ROWS, 2 * _ROWS)
    counted = []
    for side in sides:
        model = nn.Linear(side, 1, bias=False)
        optimizer = build_optimizer(None, model, config, 1e-3)
        for group in optimizer.param_groups:
            if "foreach" in group:
                group["foreach"] = foreach
        trace = WorkTrace()
        for _ in range(2):  # state exists after the first step
            model.weight.grad = torch.zeros_like(model.weight)
            trace.take()
            with trace:
                optimizer.step()
        counted.append(trace.take())
    (block,) = merge(counted[0], counted[1], 1, sides)
    return OptimizerWork(block.forward, foreach)


def _state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor)]
