"""WorkFacts: what a step computes, counted operation by operation, as plain data.

`distributed.operations.planning.work_trace` counts it under fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distributed.planner.estimates.size import Size

__all__ = [
    "CAUSAL",
    "KINDS",
    "NOT_COUNTED",
    "MATRIX_KINDS",
    "MEASURED_KINDS",
    "NARROW",
    "THIN",
    "BlockWork",
    "Operations",
    "OptimizerWork",
    "WorkFacts",
    "matmul_kind",
]

MATRIX_KINDS = (
    "matmul",
    "thin-matmul",
    "convolution",
    "convolution-backward",
    "narrow-convolution",
    "narrow-convolution-backward",
    "attention",
    "attention-backward",
    "causal-attention",
    "causal-attention-backward",
)
"""Kinds whose size is their floating-point operations; that of all others is the bytes that they move. A
thin matrix product has a side of at most the largest side divided by `THIN`; a narrow convolution has fewer
than `NARROW` input channels in a group."""

THIN = 16
"""How many times a side of a thin matrix product is in its largest one."""

NARROW = 32
"""Input channels of a group from which on a convolution is not narrow."""

KINDS = (
    *MATRIX_KINDS,
    "elementwise",
    "transcendental",
    "reduction",
    "pooling",
    "indexing",
    "random",
    "view",
)
"""Kinds of operations. ``transcendental`` computes exponentials, ``indexing`` gathers or scatters rows,
``random`` draws numbers, such as dropout, and ``view`` moves nothing."""

CAUSAL = {"causal-attention": "attention", "causal-attention-backward": "attention-backward"}
"""Kind whose mask lets kernels leave out half of the operations -> the kind of the same without a mask."""

MEASURED_KINDS = (*(kind for kind in KINDS if kind not in CAUSAL and kind != "view"), "update")
"""Kinds of which a measured profile has a curve; ``update`` is that of one parameter, by the bytes of its
operations."""


def matmul_kind(sides: Sequence[float]) -> str:
    """The kind of a matrix product whose factors have these `sides`."""
    return "thin-matmul" if min(sides) * THIN <= max(sides) else "matmul"


class Operations(NamedTuple):
    """Equal operations of one kind.

    Attributes:
        kind: of `KINDS`.
        number: how many there are.
        flops: floating-point operations of each; 0 for kinds other than `MATRIX_KINDS`.
        nbytes: bytes that each reads and writes.
        sides: of the factors of a matrix product, by which it is thin or not for a number of samples.
    """

    kind: str
    number: int
    flops: Size
    nbytes: Size
    sides: tuple[Size, ...] = ()

    def kind_at(self, num_samples: int) -> str:
        """The kind for a micro-batch of `num_samples` samples."""
        return matmul_kind([side.at(num_samples) for side in self.sides]) if self.sides else self.kind


@dataclass(frozen=True)
class BlockWork:
    """Work of one micro-batch in a block, without that of blocks inside it.

    Attributes:
        forward: operations of its forward pass.
        backward: operations of its backward pass, without recomputation.
    """

    forward: tuple[Operations, ...] = ()
    backward: tuple[Operations, ...] = ()


@dataclass(frozen=True)
class OptimizerWork:
    """Work of the update of one parameter.

    Attributes:
        operations: their `Size` is a line in the elements of the parameter instead of samples.
        at_once: whether an operation is called once for all parameters (``foreach``).
    """

    operations: tuple[Operations, ...] = ()
    at_once: bool = False


_NO_UPDATE = OptimizerWork()


@dataclass(frozen=True)
class WorkFacts:
    """Work of a model, its loss and its optimizer.

    Attributes:
        blocks: in the order of `ModelFacts.blocks`.
        optimizer: of one parameter.
    """

    blocks: tuple[BlockWork, ...] = ()
    optimizer: OptimizerWork = _NO_UPDATE

    @property
    def forward(self) -> Iterator[Operations]:
        """Operations of the forward pass of all blocks."""
        return (operations for block in self.blocks for operations in block.forward)

    @property
    def backward(self) -> Iterator[Operations]:
        """Operations of the backward pass of all blocks."""
        return (operations for block in self.blocks for operations in block.backward)

    def flops(self, num_samples: int) -> float:
        """Floating-point operations of both directions, for a micro-batch of `num_samples` samples."""
        return flops_of(self.forward, num_samples) + flops_of(self.backward, num_samples)


NOT_COUNTED = WorkFacts()
"""Work of a model whose operations were not counted."""


def flops_of(operations: Iterable[Operations], num_samples: int) -> float:
    """Sum of the floating-point operations of `operations`."""
    return float(sum(each.number * each.flops.at(num_samples) for each in operations))
