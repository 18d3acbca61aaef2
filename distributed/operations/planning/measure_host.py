"""Measure what steps of a model take beyond their operations: Python, modules and the graph of autograd."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from distributed.operations.planning.measure_operations import Clock, Curves, size_of
from distributed.operations.planning.work_trace import RawOperation, WorkTrace
from distributed.planner.estimates.measured_node import seconds_of
from distributed.planner.estimates.work_facts import CAUSAL

__all__ = ["HostTimes", "measure_host", "network"]

_STEPS = 24
_UPDATE_BYTES = 76.0
"""Bytes that the operations of AdamW move for each element of a parameter in float32."""


class HostTimes(NamedTuple):
    """What `measure_host` found.

    Attributes:
        forward_seconds: for each operation of forward, beyond its curve.
        backward_seconds: for each operation of backward.
        update_seconds: for the update of each parameter.
    """

    forward_seconds: float
    backward_seconds: float
    update_seconds: float


def measure_host(clock: Clock, curves: Curves) -> HostTimes:
    """Train a network with small tensors, and divide what its steps take beyond the curves among operations.

    Forward, backward and update follow each other, as in training: each of them alone in a loop would find
    its code and its tensors in the caches.
    """
    torch.manual_seed(0)
    model = network(16, 64).to(clock.device)
    values = torch.randn(1, 16, 64, device=clock.device)
    trace = WorkTrace()
    with trace:
        model(values).sum().backward()
    operations = [o for o in trace.take() if o.kind != "view"]
    forward, backward, update = _steps(clock, model, values)
    parameters = list(model.parameters())
    known = sum(seconds_of(curves["update"], _UPDATE_BYTES * p.numel()) for p in parameters)
    return HostTimes(
        _beyond(forward, [o for o in operations if not o.backward], curves),
        _beyond(backward, [o for o in operations if o.backward], curves),
        max(0.0, update - known) / len(parameters),
    )


def _steps(clock: Clock, model: nn.Module, values: Tensor) -> tuple[float, float, float]:
    """Seconds of forward, backward and update."""
    optimizer = torch.optim.AdamW(model.parameters())
    marks: list[list[float]] = []

    def mark(times: list[float]) -> None:
        clock.wait()
        times.append(perf_counter())

    for _ in range(_STEPS):
        times: list[float] = []
        mark(times)
        loss = model(values).sum()
        mark(times)
        loss.backward()
        mark(times)
        optimizer.step()
        optimizer.zero_grad()
        mark(times)
        marks.append(times)
    first, second, third = (
        clock.typical([times[i + 1] - times[i] for times in marks[_STEPS // 4 :]]) for i in range(3)
    )
    return first, second, third


def _beyond(seconds: float, operations: list[RawOperation], curves: Curves) -> float:
    known = sum(seconds_of(curves[CAUSAL.get(o.kind, o.kind)], size_of(o)) for o in operations)
    return max(0.0, seconds - known) / len(operations)


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mix(self.norms[0](x)).unflatten(-1, (4, -1)).transpose(1, 2).chunk(3, -1)
        x = x + self.output(scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(gelu(self.up(self.norms[1](x))))
        return found


def network(layers: int, width: int) -> nn.Sequential:
    """Layers of a transformer, of values (samples, tokens, width)."""
    return nn.Sequential(*(_Layer(width) for _ in range(layers)))
