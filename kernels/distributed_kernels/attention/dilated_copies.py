"""Copies of dilated attention: rows of tiles gathered, outputs mixed, gradients added back.

`Copies` has torch's operators, for every device. On CUDA they would be most of the time of a short sequence,
and `TritonCopies` starts one kernel where they start several.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from distributed_kernels.attention.block_kernels_reference import accumulator
from distributed_kernels.attention.dilated_tiles import (
    DilatedPlan,
    Fold,
    HeadOffsets,
    Tile,
    dilated_plan,
)

_VARIABLE = "DISTRIBUTED_KERNELS_DILATED"
"""Environment variable; ``torch`` forbids Triton."""
_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Copies:
    """Copies by torch's operators, and the mix of the outputs taken so far.

    Args:
        q: (B, H, N, D).
        plan: of N rows and H heads.
    """

    def __init__(self, q: Tensor, plan: DilatedPlan) -> None:
        self._q, self._plan = q, plan
        self._dtype = accumulator(q.dtype)
        self._outs: list[tuple[Tensor, Fold]] = []
        self._lses: list[tuple[Tensor, Fold]] = []

    def gather(self, tile: Tile, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Fold]:
        """(B, H, N, ...) each, the first like q, the last of them possibly lse -> folded blocks."""
        if tensors[-1].dim() == 4:
            return tile.gather(tensors)
        blocks, fold = tile.gather(tensors[:-1])
        rows, _ = tile.gather(tensors[-1:], fold)
        return [*blocks, rows[0].contiguous()], fold

    def take(self, out: Tensor, lse: Tensor, fold: Fold) -> None:
        """Take the folded (out, lse) of the plan's next tile."""
        self._outs.append((out, fold))
        self._lses.append((lse, fold))

    def mixed(self) -> tuple[Tensor, Tensor]:
        """Outputs weighted by the softmax of their lse, and the lse of all; both (B, H, N, ...).

        A row that no branch keeps gives out 0 and lse -inf.
        """
        q, tiles = self._q, self._plan.tiles
        if self._plan.whole and len(tiles) == 1:
            tile = tiles[0][1]
            return tile.whole(*self._outs[0], q), tile.whole(*self._lses[0], q)
        lses = q.new_full((len(self._plan.branches), *q.shape[:3]), -torch.inf, dtype=self._dtype)
        pairs = [
            pair
            for (number, tile), lse in zip(tiles, self._lses, strict=True)
            for pair in tile.matched(lses[number], *lse)
        ]
        if pairs:
            torch._foreach_copy_(*_unzipped(pairs))
        return self._sum(torch.softmax(lses, 0)), torch.logsumexp(lses, 0)

    def _sum(self, shares: Tensor) -> Tensor:
        """Sum of the outputs times `shares`, (branches, B, H, N); NaN shares are those of no output."""
        q, tiles, whole = self._q, self._plan.tiles, self._plan.whole
        weights = shares.unsqueeze(-1).unbind(0)
        if whole:
            mixed = tiles[0][1].whole(*self._outs[0], q) * weights[0]
        else:
            mixed = q.new_zeros(q.shape, dtype=self._dtype)
        for (number, tile), out in list(zip(tiles, self._outs, strict=True))[whole:]:
            for (rows, part), run in zip(tile.matched(mixed, *out), tile.runs, strict=True):
                rows.addcmul_(part, tile.view(weights[number], run))
        return mixed

    def add(self, tile: Tile, totals: Sequence[Tensor], grads: Sequence[Tensor], fold: Fold) -> None:
        """Add folded blocks of `tile` to the rows of `totals`, (B, H, N, D) each."""
        both = zip(totals, grads, strict=True)
        torch._foreach_add_(*_unzipped([pair for x, grad in both for pair in tile.matched(x, grad, fold)]))


def _unzipped(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


class TritonCopies(Copies):
    """Copies by Triton: one launch for each; the arguments of `Copies`."""

    def __init__(self, q: Tensor, plan: DilatedPlan) -> None:
        super().__init__(q, plan)
        self._kernels = _triton_kernels()
        self._count = 0
        self._state: tuple[Tensor, Tensor] | None = None

    def gather(self, tile: Tile, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Fold]:
        """As `Copies.gather`, of (q, k, v) or (q, k, v, out, dout, lse)."""
        if tile.rate == 1:
            return super().gather(tile, tensors)
        lse = tensors[5] if len(tensors) > 5 else None
        found: tuple[list[Tensor], Fold] = self._kernels.gather(tile, tensors[:5], lse)
        return found

    def take(self, out: Tensor, lse: Tensor, fold: Fold) -> None:
        """Merge the folded (out, lse) of the plan's next tile into those before."""
        q, (_, tile) = self._q, self._plan.tiles[self._count]
        self._count += 1
        if self._state is None and self._plan.whole:
            out, lse = tile.whole(out, fold, q), tile.whole(lse, fold, q)
            last = len(self._plan.tiles) == 1
            self._state = out if last else out.to(self._dtype), lse.contiguous()
            return
        self._kernels.merge(tile, *self._merged(), *_ordered(tile, (out, lse), fold, q.shape[0]))

    def mixed(self) -> tuple[Tensor, Tensor]:
        """As `Copies.mixed`."""
        return self._merged()

    def _merged(self) -> tuple[Tensor, Tensor]:
        if self._state is None:
            empty = self._q.new_full(self._q.shape[:3], -torch.inf, dtype=self._dtype)
            self._state = self._q.new_zeros(self._q.shape, dtype=self._dtype), empty
        return self._state

    def add(self, tile: Tile, totals: Sequence[Tensor], grads: Sequence[Tensor], fold: Fold) -> None:
        """As `Copies.add`."""
        if any(not same_strides(x, totals[0]) or x.stride(-1) != 1 for x in totals):
            super().add(tile, totals, grads, fold)
            return
        self._kernels.add(tile, totals, _ordered(tile, grads, fold, totals[0].shape[0]))


@cache
def _triton_kernels() -> Any:
    return import_module("distributed_kernels.attention.dilated_triton")


def _ordered(tile: Tile, blocks: Sequence[Tensor], fold: Fold, batch: int) -> list[Tensor]:
    """The folded blocks with memory in the order (B, heads, segments, rows, ...)."""
    if fold.by_segment:
        blocks = [fold.unfold(block, batch, tile.heads, tile.segments) for block in blocks]
    return [block.contiguous() for block in blocks]


def same_strides(x: Tensor, y: Tensor) -> bool:
    """Whether equally shaped tensors have the same strides, but for dimensions of one element."""
    return x.stride() == y.stride() or all(
        size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), y.stride(), strict=True)
    )


def chosen_copies(q: Tensor, k: Tensor, v: Tensor, plan: DilatedPlan) -> type[Copies]:
    """The copies for these tensors: Triton's where it is installed and can run them."""
    fits = (
        q.dtype in _TRITON_DTYPES
        and same_strides(q, k)
        and same_strides(q, v)
        and all(len(tile.runs) == 1 for _, tile in plan.tiles)
        and all(len(tile.runs) == 1 for tile in plan.backward)
        and not isinstance(q, FakeTensor)
        and not torch.compiler.is_compiling()
    )
    return TritonCopies if fits and triton_runs(q.device) else Copies


def exact_on_device(q: Tensor) -> ExitStack:
    """Context without autocast, in which Triton launches on the device of `q`."""
    found = ExitStack()
    if torch.is_autocast_enabled(q.device.type):
        found.enter_context(torch.autocast(q.device.type, enabled=False))
    found.enter_context(_on_device(q))
    return found


def _on_device(q: Tensor) -> Any:
    if not q.is_cuda or isinstance(q, FakeTensor) or q.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(q.device)


@cache
def triton_runs(device: torch.device) -> bool:
    """Whether Triton computes there what torch does; it needs a C compiler, which a host may not have."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if os.environ.get(_VARIABLE) == "torch" or find_spec("triton") is None:
        return False
    if device.type != "cuda" and not interpreted:
        return False
    plan = dilated_plan(((4, 2),), 8, 2, HeadOffsets())
    (tile,) = plan.branches[0]
    x = torch.arange(32, dtype=torch.float32, device=device).reshape(1, 2, 8, 2)
    try:
        with _on_device(x):
            blocks, _ = TritonCopies(x, plan).gather(tile, (x, x, x))
        right = all(torch.equal(*pair) for pair in zip(blocks, tile.gather((x, x, x))[0], strict=True))
    except Exception as error:  # noqa: BLE001 - errors of a compiler have no common class
        right, reason = False, f"{type(error).__name__}: {error}"
    else:
        reason = "wrong values"
    if not right:
        warnings.warn(
            f"Triton cannot run the copies of dilated attention ({reason}); torch's operators do,"
            f" which is slower for short sequences. {_VARIABLE}=torch silences this.",
            stacklevel=2,
        )
    return right
