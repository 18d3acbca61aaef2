"""Measure how long operations of each kind take on a device, by their size.

Sizes are what `WorkTrace` counts for the same calls, so that a prediction reads a curve at the sizes at which
it was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, gelu, layer_norm, max_pool2d, scaled_dot_product_attention

from distributed.operations.planning.work_trace import RawOperation, WorkTrace
from distributed.planner.estimates.measured_node import seconds_of
from distributed.planner.estimates.work_facts import MATRIX_KINDS, THIN

__all__ = [
    "Clock",
    "Curves",
    "matmul_rate",
    "measure_host",
    "measure_kinds",
    "memory_bandwidth",
    "network",
    "reference_operation",
    "rising",
    "size_of",
]

Call = Callable[[], Any]
Curves = dict[str, tuple[tuple[float, float], ...]]
"""Kind -> (size, seconds) in order of size: floating-point operations, or bytes."""

_SIDES = (32, 64, 128, 256, 512, 1024)
"""Of square matrices."""
_THIN_SIDES = (256, 512, 1024, 2048)


_IMAGES = ((32, 4), (32, 8), (32, 16), (64, 16), (128, 16), (128, 32))
"""(channels, side) of 8 images."""
_NARROW_IMAGES = ((8, 8), (16, 16), (16, 32), (16, 64), (16, 128))
_SEQUENCES = ((1, 32), (4, 64), (8, 128), (16, 256), (8, 1024))
"""(heads of 64 elements, tokens)."""
_ELEMENTS = (2**8, 2**12, 2**15, 2**17, 2**19, 2**21, 2**23)
_WIDTH = 256
"""Elements of a row that is normalized or gathered."""
_UPDATED = (2**8, 2**13, 2**16, 2**18, 2**20)
"""Elements of a parameter that is updated."""
_UPDATE_ELEMENTS = 2**21
"""Elements of all parameters that are updated one after another, each with a gradient and two moments."""
_WEIGHT_BYTES = 2**25
"""Bytes of the weights among which matrix products take turns."""
_REPEATS = 3


class Clock:
    """Times calls.

    Args:
        duration: seconds for each measurement.
        device: on which the calls compute.
        shared: whether more ranks than cores compute, so that the scheduler interrupts each of them.
        limit: seconds from now on after which each call is timed only once.
    """

    def __init__(self, duration: float, device: str, *, shared: bool = False, limit: float = 60.0) -> None:
        self.duration, self.device, self._shared = duration, device, shared
        self._deadline = perf_counter() + limit

    def seconds(self, call: Call) -> float:
        """Seconds of one call: the median over blocks of calls, or the mean where the device is shared."""
        call()
        once = max(self._block(call, 1), 1e-7)
        if once > self.duration or perf_counter() > self._deadline:
            return once
        if self._shared:
            return self._block(call, max(1, int(self.duration / once)))
        length = max(1, int(self.duration / _REPEATS / once))
        return median(self._block(call, length) for _ in range(_REPEATS))

    def _block(self, call: Call, length: int) -> float:
        self._wait()
        start = perf_counter()
        for _ in range(length):
            call()
        self._wait()
        return (perf_counter() - start) / length

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)


def measure_kinds(clock: Clock) -> Curves:
    """The curve of each kind, and of ``update``: AdamW on one parameter, by the bytes of its operations."""
    curves: Curves = {}
    for kind, calls in _calls(clock.device).items():
        points = []
        for call in calls():
            (operation,) = _of_kind(kind, call)
            points.append((size_of(operation), clock.seconds(call)))
        curves[kind] = rising(points)
    curves["update"] = rising([_update(clock, number) for number in _UPDATED])
    return curves


def size_of(operation: RawOperation) -> float:
    """What the curve of its kind is over."""
    return float(operation.flops if operation.kind in MATRIX_KINDS else operation.nbytes)


def rising(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """`points` in order, none slower than a larger one: what noise says otherwise is lowered to it."""
    curve, least = [], float("inf")
    for size, seconds in sorted(points, reverse=True):
        least = min(least, seconds)
        curve.append((size, least))
    return tuple(reversed(curve))


def _update(clock: Clock, number: int) -> tuple[float, float]:
    """(bytes, seconds) of the update of a parameter of `number` elements, of many: none is in the caches."""
    parameters = [
        nn.Parameter(torch.zeros(number, device=clock.device))
        for _ in range(max(4, _UPDATE_ELEMENTS // number))
    ]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step()
    trace = WorkTrace()
    with trace:
        optimizer.step()
    moved = sum(operation.nbytes for operation in trace.take())
    return moved / len(parameters), clock.seconds(optimizer.step) / len(parameters)


def _of_kind(kind: str, call: Call) -> list[RawOperation]:
    trace = WorkTrace()
    with trace:
        call()
    return [operation for operation in trace.take() if operation.kind == kind]


def _calls(device: str) -> dict[str, Callable[[], Iterator[Call]]]:
    return {
        "matmul": lambda: (_matmul(side, torch.float32, device) for side in _SIDES),
        "thin-matmul": lambda: (_matmul(side, torch.float32, device, side // THIN) for side in _THIN_SIDES),
        "convolution": lambda: (_convolution(*image, device) for image in _IMAGES),
        "convolution-backward": lambda: (_convolution_backward(*image, device) for image in _IMAGES),
        "narrow-convolution": lambda: (_convolution(*image, device) for image in _NARROW_IMAGES),
        "narrow-convolution-backward": lambda: (
            _convolution_backward(*image, device) for image in _NARROW_IMAGES
        ),
        "attention": lambda: (_attention(*sizes, device) for sizes in _SEQUENCES),
        "attention-backward": lambda: (_attention_backward(*sizes, device) for sizes in _SEQUENCES),
        "elementwise": lambda: (_elementwise(number, device) for number in _ELEMENTS),
        "transcendental": lambda: (_transcendental(number, device) for number in _ELEMENTS),
        "reduction": lambda: (_reduction(number, device) for number in _ELEMENTS),
        "pooling": lambda: (_pooling(number, device) for number in _ELEMENTS[1:-2]),
        "indexing": lambda: (_indexing(number, device) for number in _ELEMENTS[:-1]),
        "random": lambda: (_random(number, device) for number in _ELEMENTS[:-2]),
    }


def _matmul(side: int, dtype: torch.dtype, device: str, rows: int | None = None) -> Call:
    # A model has other weights in each layer, which are not in the caches nearest to the processor.
    number = max(1, min(16, _WEIGHT_BYTES // (side * side * dtype.itemsize)))
    values = torch.randn(rows or side, side, device=device).to(dtype)
    weights = cycle([torch.randn(side, side, device=device).to(dtype) for _ in range(number)])
    return lambda: torch.mm(values, next(weights).t())


def _convolution(channels: int, side: int, device: str) -> Call:
    images, weight = _images(channels, side, device)
    return lambda: conv2d(images, weight, padding=1)


def _convolution_backward(channels: int, side: int, device: str) -> Call:
    images, weight = _images(channels, side, device)
    ones = (1, 1)
    return lambda: torch.ops.aten.convolution_backward(
        images, images, weight, None, ones, ones, ones, False, (0, 0), 1, (True, True, False)
    )


def _images(channels: int, side: int, device: str) -> tuple[Tensor, Tensor]:
    images = torch.randn(8, channels, side, side, device=device)
    return images, torch.randn(channels, channels, 3, 3, device=device)


def _attention(heads: int, tokens: int, device: str) -> Call:
    query = torch.randn(1, heads, tokens, 64, device=device)
    return lambda: scaled_dot_product_attention(query, query, query)


def _attention_backward(heads: int, tokens: int, device: str) -> Call:
    parts = [torch.randn(1, heads, tokens, 64, device=device, requires_grad=True) for _ in range(3)]
    mixed = scaled_dot_product_attention(parts[0], parts[1], parts[2])
    gradient = torch.randn_like(mixed)
    return lambda: torch.autograd.grad(mixed, parts, gradient, retain_graph=True)


def _elementwise(number: int, device: str) -> Call:
    one, other = torch.randn(number, device=device), torch.randn(number, device=device)
    return lambda: torch.mul(one, other)


def _transcendental(number: int, device: str) -> Call:
    values = torch.randn(number, device=device)
    return lambda: gelu(values)


def _reduction(number: int, device: str) -> Call:
    values = torch.randn(-(-number // _WIDTH), _WIDTH, device=device)
    return lambda: layer_norm(values, (_WIDTH,))


def _indexing(number: int, device: str) -> Call:
    rows = -(-number // _WIDTH)
    table = torch.randn(max(rows, 256), _WIDTH, device=device)
    where = torch.randint(0, len(table), (rows,), device=device)
    return lambda: torch.index_select(table, 0, where)


def _pooling(number: int, device: str) -> Call:
    images = torch.randn(number // 256, 1, 16, 16, device=device)
    return lambda: max_pool2d(images, 2)


def _random(number: int, device: str) -> Call:
    values = torch.rand(number, device=device)
    return lambda: torch.bernoulli(values)


def matmul_rate(clock: Clock, dtype: torch.dtype) -> float:
    """Floating-point operations per second of the fastest matrix product in `dtype`."""
    sides = (512,) if clock.device == "cpu" else (2048, 4096, 8192)
    return max(2.0 * side**3 / clock.seconds(_matmul(side, dtype, clock.device)) for side in sides)


def memory_bandwidth(clock: Clock) -> float:
    """Bytes per second of a large copy, read and written."""
    source = torch.randn(2**24, device=clock.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / clock.seconds(lambda: target.copy_(source))


def measure_host(clock: Clock, curves: Curves) -> tuple[float, float]:
    """Seconds of the host for an operation of forward and of backward, beyond the curves.

    Modules, the graph of autograd and Python take time that a call in a loop does not show. It is that of a
    network with small tensors, less the sum of its operations, over their number.
    """
    small = _Pass(clock, network(16, 64), torch.randn(1, 16, 64, device=clock.device))
    forward, backward = (
        max(0.0, (small.seconds[i] - small.known(curves, i)) / small.count(i)) for i in (0, 1)
    )
    return forward, backward


class _Pass:
    """Forward and backward of a network: measured seconds, and counted operations."""

    def __init__(self, clock: Clock, network: nn.Module, values: Tensor) -> None:
        network = network.to(clock.device)
        trace = WorkTrace()
        with trace:
            network(values).sum().backward()
        self._operations = trace.take()

        def both() -> None:
            network(values).sum().backward()

        forward = clock.seconds(lambda: network(values))
        self.seconds = forward, max(0.0, clock.seconds(both) - forward)

    def _of(self, backward: int) -> list[RawOperation]:
        return [o for o in self._operations if o.backward == bool(backward) and o.kind != "view"]

    def count(self, backward: int) -> int:
        return len(self._of(backward))

    def known(self, curves: Curves, backward: int) -> float:
        return sum(seconds_of(curves[o.kind], size_of(o)) for o in self._of(backward))


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


def reference_operation(clock: Clock) -> Call:
    """A matrix product of some hundred microseconds on a CPU."""
    return _matmul(256, torch.float32, clock.device)
