"""Measure how long operations of each kind take on a device, by their size.

Sizes are what `WorkTrace` counts for the same calls, so that a prediction reads a curve at the sizes at which
it was measured. On CPUs, operations of all kinds that move about as many bytes take turns, as in a step of
a model: the same operation in a loop finds its tensors in the caches and the other threads of the process
awake. `measure_host` measures what steps take beyond these operations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from random import Random
from statistics import fmean, median
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, gelu, layer_norm, max_pool2d, scaled_dot_product_attention

from distributed.operations.planning.work_trace import RawOperation, WorkTrace
from distributed.planner.estimates.work_facts import MATRIX_KINDS, THIN

__all__ = [
    "Clock",
    "Curves",
    "matmul_rate",
    "measure_kinds",
    "memory_bandwidth",
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
_ELEMENTS = (2**8, 2**12, 2**15, 2**17, 2**19, 2**21, 2**22, 2**23)
_SCALES = (2**16, 2**20, 2**24)
"""Bytes between operations that do not take turns: tensors of a model are of about the same size, and so are
those in the caches when an operation begins."""
_WIDTH = 256
"""Elements of a row that is normalized or gathered."""
_UPDATED = (2**8, 2**13, 2**16, 2**18, 2**20)
"""Elements of a parameter that is updated."""
_UPDATE_ELEMENTS = 2**22
"""Elements of all parameters that are updated one after another, each with a gradient and two moments."""
_MOST_UPDATED = 256
"""Parameters that are updated one after another."""
_REPEATS = 3
_ROUNDS = 40
"""Calls of each operation that takes turns with others, unless they take longer than they should."""


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

    def in_turns(self, calls: Sequence[Call]) -> list[float]:
        """Seconds of each call while the calls take turns, in an order that changes: the median.

        The host of a GPU runs ahead of it, so that there each call is timed by itself. Where processors are
        shared, the median is that of the time on a processor, by the share of them that the process got.
        """
        if self.device != "cpu":
            return [self.seconds(call) for call in calls]
        for call in calls:
            call()
        clock = process_time if self._shared else perf_counter
        found: list[list[float]] = [[] for _ in calls]
        order, random = list(range(len(calls))), Random(0)
        begun, own = perf_counter(), process_time()
        for _ in range(_ROUNDS):
            random.shuffle(order)
            for index in order:
                times = found[index]
                if times and (perf_counter() > self._deadline or _enough(times, self.duration)):
                    continue
                start = clock()
                calls[index]()
                times.append(clock() - start)
        slower = (perf_counter() - begun) / (process_time() - own) if self._shared else 1.0
        return [max(1e-7, median(times) * slower) for times in found]

    def _block(self, call: Call, length: int) -> float:
        self.wait()
        start = perf_counter()
        for _ in range(length):
            call()
        self.wait()
        return (perf_counter() - start) / length

    def typical(self, seconds: list[float]) -> float:
        """The median, or the mean where the device is shared."""
        return fmean(seconds) if self._shared else median(seconds)

    def wait(self) -> None:
        """Wait until the device has computed what was called."""
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)


def _enough(times: list[float], duration: float) -> bool:
    return len(times) >= _REPEATS and sum(times) >= duration


def measure_kinds(clock: Clock) -> Curves:
    """The curve of each kind, and of ``update``: AdamW on one parameter, by the bytes of its operations."""
    scales: list[list[tuple[RawOperation, Call]]] = [[] for _ in range(len(_SCALES) + 1)]
    for kind, given in _calls(clock.device).items():
        for call in given():
            (operation,) = _of_kind(kind, call)
            scales[bisect_right(_SCALES, operation.nbytes)].append((operation, call))
    points: dict[str, list[tuple[float, float]]] = {}
    for scale in scales:
        seconds = clock.in_turns([call for _, call in scale])
        for (operation, _), each in zip(scale, seconds, strict=True):
            points.setdefault(operation.kind, []).append((size_of(operation), each))
    curves = {kind: rising(found) for kind, found in points.items()}
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
        for _ in range(max(4, min(_MOST_UPDATED, _UPDATE_ELEMENTS // number)))
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
    values = torch.randn(rows or side, side, device=device).to(dtype)
    weight = torch.randn(side, side, device=device).to(dtype)
    return lambda: torch.mm(values, weight.t())


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


def reference_operation(clock: Clock) -> Call:
    """A matrix product of some hundred microseconds on a CPU."""
    return _matmul(256, torch.float32, clock.device)
