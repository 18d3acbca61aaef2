"""What each codec computes, in plain PyTorch in one process: the values of all ranks in, the sum out.

``make(codec)(values, name of the parameter, step)`` takes one tensor for each rank and returns the sum that
all ranks use, and what each rank has contributed to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from distributed.system.derived_seed import mix
from distributed.system.keyed_permutation import KeyedPermutation

RATIO, RANK, SEED = 0.2, 2, 7

Outcome = tuple[Tensor, list[Tensor]]


def cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda values: values.to(dtype).to(values.dtype)


def int8(values: Tensor) -> Tensor:
    """Each 256 elements: whole numbers of -127 to 127, times a float32 scale."""
    found = []
    for block in values.flatten().split(256):
        scale = (block.abs().max() / 127).float().to(block.dtype)
        found.append((block / scale).round() * scale if scale > 0 else block * 0)
    return torch.cat(found).view(values.shape)


def fp8(values: Tensor) -> Tensor:
    """Each 256 elements: float8 e4m3, times a float32 scale."""
    found = []
    for block in values.flatten().split(256):
        scale = (block.abs().max() / 448).float().to(block.dtype)
        units = (block / scale).float().clamp(-448, 448).to(torch.float8_e4m3fn) if scale > 0 else block * 0
        found.append(units.to(block.dtype) * scale)
    return torch.cat(found).view(values.shape)


def rounded(quantize: Callable[[Tensor], Tensor], row: int) -> Callable[..., Outcome]:
    """Each rank's values are rounded, added up in the order of the ranks, and the sum is rounded again. The
    error of the second rounding belongs to the rank that has added up the row: the ranks in turn."""

    def reduce(values: Sequence[Tensor], name: str, step: int, first_row: int = 0) -> Outcome:
        own = [quantize(v) for v in values]
        exact = sum(own[1:], start=own[0])
        total = quantize(exact)
        rows = torch.arange(exact.numel()).view(exact.shape) // row
        for rank, part in enumerate(own):
            mine = (rows + first_row) % len(values) == rank
            part += torch.where(mine, total - exact, torch.zeros_like(total))
        return total, own

    return reduce


def top_k(
    values: Sequence[Tensor], name: str, step: int, first_row: int = 0, ratio: float = RATIO
) -> Outcome:
    """Each rank sends its largest elements."""
    own = []
    for v in values:
        count = max(1, math.ceil(ratio * v.numel()))
        kept = v.flatten().abs().topk(count).indices
        sent = torch.zeros_like(v.flatten())
        sent[kept] = v.flatten()[kept]
        own.append(sent.view(v.shape))
    return sum(own[1:], start=own[0]), own


def random_k(
    values: Sequence[Tensor], name: str, step: int, first_row: int = 0, ratio: float = RATIO
) -> Outcome:
    """All ranks send the same random elements."""
    numel = values[0].numel()
    order = KeyedPermutation(numel, mix("random-k", SEED, name, step))
    mask = torch.zeros(numel, dtype=torch.bool)
    mask[order[: max(1, math.ceil(ratio * numel))]] = True
    own = [torch.where(mask.view(v.shape), v, torch.zeros_like(v)) for v in values]
    return sum(own[1:], start=own[0]), own


class PowerSGD:
    """The mean-free form: sums in the place of means. P of all ranks is made orthonormal by QR, whose columns
    differ from those of Gram-Schmidt by signs at most, which cancel out."""

    def __init__(self) -> None:
        self.factors: dict[str, Tensor] = {}

    def __call__(self, values: Sequence[Tensor], name: str, step: int, first_row: int = 0) -> Outcome:
        first = values[0]
        rows, columns = (first.shape[0], first[0].numel()) if first.dim() > 1 else (0, 0)
        rank = min(RANK, rows, columns)
        if (rows + columns) * rank >= rows * columns:
            return sum(values[1:], start=values[0]), [v.clone() for v in values]
        matrices = [v.reshape(rows, columns) for v in values]
        if name not in self.factors:
            draw = torch.Generator().manual_seed(mix("powersgd", SEED, name, step))
            self.factors[name] = torch.randn(columns, rank, generator=draw, dtype=torch.float64).to(first)
        left = torch.linalg.qr(sum(m @ self.factors[name] for m in matrices)).Q
        # Signs as Gram-Schmidt leaves them: only the factor that the next step begins with depends on them.
        left *= torch.sign((left * sum(m @ self.factors[name] for m in matrices)).sum(0))
        own = [(left @ (left.T @ m)).view(first.shape) for m in matrices]
        self.factors[name] = sum(m.T @ left for m in matrices)
        return sum(own[1:], start=own[0]), own


def first_rows(names: Iterable[str]) -> dict[str, int]:
    """Which rank adds up the first row of each parameter: all in turn, in the order of their names."""
    return {name: index for index, name in enumerate(sorted(names))}


def make(codec: str, ratio: float = RATIO) -> Callable[..., Outcome]:
    """The oracle of a codec, without memory of earlier steps; `ratio` is that of top-k and random-k."""
    if codec == "powersgd":
        return PowerSGD()
    return {
        "fp16": rounded(cast(torch.float16), 64),
        "bf16": rounded(cast(torch.bfloat16), 64),
        "int8": rounded(int8, 256),
        "fp8": rounded(fp8, 256),
        "top-k": partial(top_k, ratio=ratio),
        "random-k": partial(random_k, ratio=ratio),
    }[codec]


class ErrorFeedback:
    """Adds to each rank's values what it has not sent before.

    Args:
        rows: first row of each parameter, by name, for the codecs that share out rows.
        feeds_back: keep what was not sent.
        ratio: share of the elements that top-k and random-k send.
    """

    def __init__(
        self, codec: str, rows: dict[str, int] | None = None, feeds_back: bool = True, ratio: float = RATIO
    ) -> None:
        self.reduce, self.rows, self.feeds_back = make(codec, ratio), rows or {}, feeds_back
        self.residuals: dict[tuple[str, int], Tensor] = {}

    def __call__(self, values: Sequence[Tensor], name: str, step: int) -> Tensor:
        full = [v + self.residuals.get((name, rank), 0) for rank, v in enumerate(values)]
        total, own = self.reduce(full, name, step, self.rows.get(name, 0))
        for rank, (value, sent) in enumerate(zip(full, own, strict=True)):
            if self.feeds_back:
                self.residuals[name, rank] = value - sent
        return total
