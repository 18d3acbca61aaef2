"""Kernels: error against a float64 oracle, time and peak memory beside torch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import distributed_kernels as kernels
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.gpu.checks import NEEDS_GPU, Measured, Settings
from tests.kernels import oracles

__all__ = ["BOUNDS", "Contender", "compare", "flash_attention", "kernel", "measure_memory", "measure_time"]

BOUNDS = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Error allowed in outputs and gradients, relative to the largest of each if that is above 1."""
_TURNS = 15
_CALLS = 4
"""Calls that are timed together: as in training, the host launches the next while the device computes one."""
Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Contender:
    """A function and what it is measured beside, on the same leaves.

    Attributes:
        mine: the kernel.
        other: torch's own.
        leaves: arguments.
        backward: time forward and backward; False where there is no backward.
    """

    mine: Function
    other: Function
    leaves: list[Tensor]
    backward: bool = True


def kernel(setting: Settings, name: str) -> Iterator[Measured]:
    """The rows of one kernel: error, time, memory."""
    torch.manual_seed(0)
    error, contender = _KERNELS[name]
    yield _worst(setting, partial(error, setting))
    found = contender(setting)
    yield measure_time(setting, found)
    yield measure_memory(setting, found)


def _worst(setting: Settings, error: Callable[[torch.dtype], float]) -> Measured:
    """The largest error over its bound, over dtypes."""
    dtypes = setting.pick(list(BOUNDS), [torch.float32, torch.bfloat16])
    found = {dtype: error(dtype) for dtype in dtypes}
    detail = ", ".join(f"{str(dtype)[6:]} {value:.1e}" for dtype, value in found.items())
    return Measured(_largest([value / BOUNDS[dtype] for dtype, value in found.items()]), detail)


def _largest(values: list[float]) -> float:
    """The largest; NaN if one is NaN, which max() may pass over."""
    return float(torch.tensor(values, dtype=torch.float64).amax())


def relative(mine: Tensor, theirs: Tensor) -> Tensor:
    """Largest difference, relative to the largest of `theirs` if that is above 1; NaN stays NaN."""
    wanted = theirs.detach().cpu().double()
    return (mine.detach().cpu().double() - wanted).abs().amax() / wanted.abs().amax().clamp(min=1.0)


def compare(mine: Function, oracle: Function, leaves: list[Tensor]) -> float:
    """Largest error of output and gradients against `oracle` in float64 on the same numbers."""
    out = mine(*leaves)
    dout = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
    grads = torch.autograd.grad(out, leaves, dout.to(out.device))
    exact = [x.detach().cpu().double().requires_grad_() for x in leaves]
    wanted = oracle(*exact)
    wanted_grads = torch.autograd.grad(wanted, exact, dout.double())
    pairs = zip((out, *grads), (wanted, *wanted_grads), strict=True)
    return float(torch.stack([relative(*pair) for pair in pairs]).amax())


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal dense attention by the flash kernel: on Hopper, torch 2.11 takes cuDNN's where none is named."""
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _leaves(setting: Settings, dtype: torch.dtype, *shape: int) -> list[Tensor]:
    return [torch.randn(shape).to(setting.device, dtype).requires_grad_() for _ in range(3)]


# -- attention ---------------------------------------------------------------------------


def _attention_error(setting: Settings, dtype: torch.dtype, build: Any) -> float:
    """With and without a causal mask, heads that need no padding and heads that do."""
    length, found = setting.pick(256, 40), []
    for width in (64, 20):
        for causal in (False, True):
            mine, count = build(length, causal)
            oracle = partial(oracles.weighted_attention, count=count)
            found.append(compare(mine, oracle, _leaves(setting, dtype, 2, 2, length, width)))
    return _largest(found)


def _segments(length: int) -> dict[str, Any]:
    return {"segment_lengths": [length // 4, length // 2, length], "dilation_rates": [1, 2, 4]}


def _dilated(length: int, causal: bool) -> tuple[Function, Tensor]:
    options = _segments(length)
    count = oracles.dilated_counts(length, 2, *options.values(), causal=causal)
    return partial(kernels.dilated_attention, causal=causal, **options), count


def _block_sparse(length: int, causal: bool) -> tuple[Function, Tensor]:
    mask = kernels.block_pattern("local+global", length, block_size=8, sparsity_ratio=0.3, causal=causal)
    count = oracles.block_counts(mask, length, 8, causal=causal)
    return partial(kernels.block_sparse_attention, mask=mask, block_size=8, causal=causal), count


def _ring(length: int, causal: bool) -> tuple[Function, Tensor]:
    count = torch.ones(length, length, dtype=torch.float64)
    return _ring_of_one(causal), count.tril() if causal else count


def _ring_of_one(causal: bool) -> Function:
    """Ring attention in a process group of this process alone."""
    if not dist.is_initialized():
        kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)
    return partial(kernels.ring_attention, group=dist.group.WORLD, causal=causal)


def _long(setting: Settings, mine: Callable[[int], Function]) -> Contender:
    length = setting.pick(8192, 256)
    dtype = setting.pick(torch.bfloat16, torch.float32)
    other = partial(F.scaled_dot_product_attention, is_causal=True)
    return Contender(mine(length), other, _leaves(setting, dtype, 1, 8, length, 64))


def _long_dilated(length: int) -> Function:
    return partial(kernels.dilated_attention, causal=True, **_segments(length))


def _long_sparse(length: int) -> Function:
    return partial(kernels.block_sparse_attention, causal=True, block_size=64, sparsity_ratio=0.1)


def _long_ring(length: int) -> Function:
    return _ring_of_one(causal=True)


# -- linear layers -----------------------------------------------------------------------


def _layer(setting: Settings, dtype: torch.dtype, width: int, rank: int, train_both: bool) -> nn.Module:
    layer: nn.Module = kernels.SKLinear(width, width + 24, rank, train_both=train_both)
    return layer.to(setting.device, dtype)


def _sketched_error(setting: Settings, dtype: torch.dtype, train_both: bool) -> float:
    """Against the dense weight that the layer stands for, its gradients by autograd in float64."""
    width = setting.pick(488, 40)
    layer = _layer(setting, dtype, width, width // 8, train_both)
    wide: Any = copy.deepcopy(layer).cpu().double()
    x = torch.randn(300, width).to(setting.device, dtype).requires_grad_()
    leaves = [x, *layer.parameters()]
    names = [name for name, _ in layer.named_parameters()]

    def oracle(x: Tensor, *parameters: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(_Dense(wide), _prefixed(names, parameters), (x,))
        return found

    return compare(lambda x, *_: layer(x), oracle, leaves)


class _Dense(nn.Module):
    """The `nn.Linear` that a sketched layer equals."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.dense_weight(), self.layer.bias)


def _prefixed(names: list[str], parameters: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {f"layer.{name}": value for name, value in zip(names, parameters, strict=True)}


def _linear(setting: Settings, train_both: bool) -> Contender:
    width, rows = setting.pick(4096, 128), setting.pick(8192, 64)
    dtype = setting.pick(torch.bfloat16, torch.float32)
    mine = _layer(setting, dtype, width, width // 16, train_both)
    other = nn.Linear(width, width + 24, device=setting.device, dtype=dtype)
    return Contender(mine, other, _leaves(setting, dtype, rows, width)[:1])


def _triton_error(setting: Settings, dtype: torch.dtype) -> float:
    """Sizes that fill no tile; what lies between the two products is rounded to the dtype."""
    found = []
    for rows, into, out, rank in ((5, 40, 30, 7), (700, 640, 1300, 64), (333, 1000, 650, 128)):
        shapes = ((rows, into), (rank, into), (out, rank), (out,))
        x, a, b, c = ((torch.randn(shape) / shape[-1] ** 0.5).to(setting.device, dtype) for shape in shapes)
        hidden = F.linear(x.double(), a.double()).to(dtype).double()
        wanted = F.linear(hidden, b.double(), c.double())
        found.append(float(relative(kernels.fused_linear(x, a, b, c), wanted)))
    return _largest(found)


def _triton(setting: Settings) -> Contender:
    found = _linear(setting, train_both=True)
    layer: Any = _layer(setting, torch.bfloat16, 4096, 64, True)
    factors = [layer.factor_in.detach(), layer.factor_out.detach(), layer.bias.detach()]
    leaves = [x.detach() for x in found.leaves]
    return Contender(lambda x: kernels.fused_linear(x, *factors), found.other, leaves, backward=False)


# -- time and memory ---------------------------------------------------------------------


def _once(function: Function, found: Contender) -> None:
    if not found.backward:
        with torch.no_grad():
            function(*found.leaves)
        return
    out = function(*found.leaves)
    out.backward(torch.ones_like(out))
    for leaf in found.leaves:
        leaf.grad = None


def _seconds(setting: Settings, function: Function, found: Contender) -> float:
    if setting.device == "cpu":
        start = perf_counter()
        _once(function, found)
        return perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_CALLS):
        _once(function, found)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / _CALLS


def measure_time(setting: Settings, found: Contender) -> Measured:
    """Median time of `mine` over that of `other`, in turns."""
    pair = (found.mine, found.other)
    for function in pair * 2:
        _once(function, found)
    turns = [
        [_seconds(setting, function, found) for function in pair] for _ in range(setting.pick(_TURNS, 3))
    ]
    mine, other = (median(column) for column in zip(*turns, strict=True))
    what = "forward and backward" if found.backward else "forward"
    shape = "x".join(map(str, found.leaves[0].shape))
    return Measured(mine / other, f"{mine * 1e3:.2f} ms, {other * 1e3:.2f} ms; {what}, {shape}")


def measure_memory(setting: Settings, found: Contender) -> Measured:
    """Peak memory of `mine` over that of `other`."""
    if setting.device == "cpu":
        return Measured(0.0, skipped=NEEDS_GPU)
    mine, other = (_peak(function, found) for function in (found.mine, found.other))
    return Measured(mine / other, f"{mine / 2**20:.0f} MiB, {other / 2**20:.0f} MiB")


def _peak(function: Function, found: Contender) -> int:
    """Bytes allocated at the peak beyond what there was before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _once(function, found)
    torch.cuda.synchronize()
    return max(1, torch.cuda.max_memory_allocated() - before)


_KERNELS: dict[str, tuple[Callable[[Settings, torch.dtype], float], Callable[[Settings], Contender]]] = {
    "dilated": (partial(_attention_error, build=_dilated), partial(_long, mine=_long_dilated)),
    "block-sparse": (partial(_attention_error, build=_block_sparse), partial(_long, mine=_long_sparse)),
    "ring": (partial(_attention_error, build=_ring), partial(_long, mine=_long_ring)),
    "sketched": (partial(_sketched_error, train_both=True), partial(_linear, train_both=True)),
    "sketched-frozen": (partial(_sketched_error, train_both=False), partial(_linear, train_both=False)),
    "triton": (_triton_error, _triton),
}
