"""Layers over the functions of this package: projections, the attention, and a transformer block.

Across ranks each holds a contiguous slice of the sequence, and its gradients of the parameters are those
of its slice: sum or average them as data parallelism does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distributed_kernels.attention.dilated import dilated_attention
from distributed_kernels.attention.dilated_tiles import check_head_offsets
from distributed_kernels.attention.input_checks import check_segments, refuse_options
from distributed_kernels.attention.patterns import check_pattern
from distributed_kernels.attention.sparse_dilated import block_sparse_dilated_attention
from distributed_kernels.attention.ulysses import ulysses_attention
from distributed_kernels.errors import KernelError

_HEADS = ("embed_dim", "num_heads")
_ARGUMENTS = (*_HEADS, "segment_lengths", "dilation_rates", "causal", "group", "sparsity_ratio", "block_size")
"""Arguments of these classes that other libraries call differently."""


class _Shared:
    """Process groups of a module: copies of the module share them, and they stay out of pickles.

    Attributes:
        group: given when the module was built.
        context: given by `set_context_group`; None for whole sequences.
        method: how `context` computes attention; None before `set_context_group`.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.context: ProcessGroup | None = None
        self.method: str | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.group is not None:
            raise KernelError(
                "group: a process group cannot be pickled with its module",
                remedy="Build the module on each rank, or pickle its state_dict",
            )
        return _Shared, (None,)


class MultiheadDilatedAttention(nn.Module):
    """Self-attention by `dilated_attention`, between a projection to q, k, v and one back.

    Args:
        embed_dim: width of a position.
        num_heads: heads; divides `embed_dim`. Each rate above the number of heads leaves positions out.
        segment_lengths: w of each branch, in positions of the whole sequence.
        dilation_rates: r of each branch; one should be 1, so that no position goes without.
        bias: whether the projections have one.
        causal: a position sees no later one.
        group: the ranks that hold the sequence in contiguous slices; None for one process.
        head_offsets: ``interleaved`` or ``grouped``, as for `dilated_attention`.
        device, dtype: device and dtype of the parameters.

    Raises:
        KernelError: heads that do not divide the width, lists that do not agree, or an argument that is a
            field of the run's configuration, such as ``model_parallel``, or another library's.
    """

    context_methods: ClassVar[tuple[str, ...]] = ("dilated", "ulysses")
    """How several ranks can compute this attention."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        bias: bool = True,
        causal: bool = False,
        group: ProcessGroup | None = None,
        head_offsets: str = "interleaved",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        refuse_options(type(self).__name__, unknown, own=_ARGUMENTS)
        _check_heads(embed_dim, num_heads)
        check_segments(segment_lengths, dilation_rates)
        check_head_offsets(head_offsets)
        self.embed_dim, self.num_heads, self.causal = embed_dim, num_heads, causal
        self.head_offsets = head_offsets
        self.segment_lengths, self.dilation_rates = tuple(segment_lengths), tuple(dilation_rates)
        self._shared = _Shared(group)
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=bias, device=device, dtype=dtype)
        self.out = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks that hold the sequence; None when this one holds all of it."""
        return self._built_group() if self._shared.method is None else self._shared.context

    def _built_group(self) -> ProcessGroup | None:
        """The group by the arguments of the module, without `set_context_group`."""
        return self._shared.group

    def set_context_group(self, group: ProcessGroup | None, method: str | None) -> None:
        """Let the ranks of `group` hold the sequence in contiguous slices from here on.

        A trainer with an axis for slices of sequences calls it; it takes the place of the argument `group`.

        Args:
            group: the ranks; None for whole sequences on this one.
            method: one of `context_methods`, or ``auto`` for the first of them; None returns to the group
                that the module was built with.

        Raises:
            KernelError: another method, which would compute another attention than the module's, or a module
                that was built with a group.
        """
        if method is not None and method not in ("auto", *self.context_methods):
            raise KernelError(
                f"method: {type(self).__name__} does not compute this attention",
                got=method,
                allowed=", ".join(("auto", *self.context_methods)),
                remedy="Choose one of these",
            )
        if method is not None and self._shared.group is not None:
            raise KernelError(
                "group: the module was built with a group, and the trainer brings the ranks that share a"
                " sequence",
                remedy="Leave group out where the module is built",
            )
        self._shared.context, self._shared.method = group, method

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, embed_dim) -> the same; across ranks, of this rank's slice.

        Raises:
            KernelError: another shape, or what `dilated_attention` raises.
        """
        if x.dim() != 3 or x.shape[-1] != self.embed_dim:
            raise KernelError(
                "x: not a batch of sequences of this width",
                got=tuple(x.shape),
                allowed=f"(batch, length, {self.embed_dim})",
                remedy="A single sequence is a batch of one: x[None]",
            )
        # As many heads as the projection makes: under tensor parallelism a part of them.
        heads = self.qkv(x).unflatten(-1, (3, -1, self.embed_dim // self.num_heads)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        mixed: Tensor = self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return mixed

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(batch, heads, length, head_dim) each -> the same, of this rank's slice."""
        group, first = self.group, self.first_head(q.shape[1])
        if group is None or self._shared.method != "ulysses":
            return self.attend(q, k, v, group, first)

        def whole(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: None, first_head: int) -> Tensor:
            return self.attend(q, k, v, None, first + first_head)

        return ulysses_attention(q, k, v, group=group, causal=self.causal, attention=whole)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup | None, first_head: int) -> Tensor:
        """(batch, heads, length, head_dim) each -> the same; what a subclass replaces.

        Args:
            q, k, v: slices of the sequence that the ranks of `group` hold.
            group: None for the whole sequence.
            first_head: number of the first of these heads.
        """
        options = {"causal": self.causal, "group": group, **self.part_of_heads(first_head)}
        return dilated_attention(q, k, v, self.segment_lengths, self.dilation_rates, **options)

    def part_of_heads(self, first_head: int) -> dict[str, Any]:
        """Arguments of the attention functions that say which positions the heads from `first_head` keep."""
        return {
            "first_head": first_head,
            "head_offsets": self.head_offsets,
            "total_heads": self.num_heads,
        }

    def first_head(self, heads: int) -> int:
        """Number of the first of this rank's `heads`: which positions a head keeps depends on its number.

        Raises:
            KernelError: the projection makes fewer heads than the module has, and is not cut as a DTensor.
        """
        if heads == self.num_heads:
            return 0
        weight: Any = self.qkv.weight
        if not hasattr(weight, "placements"):
            raise KernelError(
                "num_heads: the projection makes other heads than those of this module",
                got=heads,
                allowed=self.num_heads,
                remedy="Cut the projection by tensor parallelism with DTensors, such as parallel.tensor",
            )
        mesh = weight.device_mesh
        return int(mesh.get_local_rank(mesh.ndim - 1)) * heads

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, causal={self.causal}, "
            f"segment_lengths={self.segment_lengths}, dilation_rates={self.dilation_rates}"
        )


class RingDistributedDilatedAttention(MultiheadDilatedAttention):
    """`MultiheadDilatedAttention` over a sequence that ranks hold in slices.

    Segments longer than a slice go round the ring of the ranks they span; of keys and values, only what
    the branch keeps travels.

    Args:
        group: the ranks that hold the sequence; None where there is one process.
        **options: as for `MultiheadDilatedAttention`.

    Raises:
        KernelError: there are several ranks and no group: whether they hold slices of one sequence, or
            sequences of their own, cannot be inferred.
    """

    def _built_group(self) -> ProcessGroup | None:
        group = super()._built_group()
        if group is None and _several_ranks():
            raise KernelError(
                f"group: {type(self).__name__} needs the ranks that hold slices of one sequence",
                allowed="a process group",
                remedy="Pass group=torch.distributed.group.WORLD when all do, or set parallel.context of a"
                " trainer; where each rank trains on sequences of its own, as in data parallelism, use"
                " MultiheadDilatedAttention",
            )
        return group


class BlockSparseRingDistributedDilatedAttention(RingDistributedDilatedAttention):
    """`RingDistributedDilatedAttention` that keeps only some blocks inside every segment.

    Args:
        sparsity_ratio: share of a segment's blocks to keep.
        pattern: which: ``local``, ``strided``, ``global``, or several joined by ``+``.
        block_size: kept positions of a block.
        **options: as for `MultiheadDilatedAttention`.

    Raises:
        KernelError: as `MultiheadDilatedAttention`; an unknown pattern, a ratio outside (0, 1].
    """

    context_methods: ClassVar[tuple[str, ...]] = ("block-sparse", "ulysses")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        sparsity_ratio: float = 0.1,
        pattern: str = "local",
        block_size: int = 64,
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, segment_lengths, dilation_rates, **options)
        check_pattern(pattern, block_size, sparsity_ratio)
        self.sparsity_ratio, self.pattern, self.block_size = sparsity_ratio, pattern, block_size

    def attend(self, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup | None, first_head: int) -> Tensor:
        return block_sparse_dilated_attention(
            q,
            k,
            v,
            self.segment_lengths,
            self.dilation_rates,
            pattern=self.pattern,
            block_size=self.block_size,
            sparsity_ratio=self.sparsity_ratio,
            causal=self.causal,
            group=group,
            **self.part_of_heads(first_head),
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, pattern={self.pattern!r}, sparsity_ratio={self.sparsity_ratio}"


class DistributedMultiheadDilatedAttention(MultiheadDilatedAttention):
    """`MultiheadDilatedAttention` whose sequence the ranks share, or not, by one argument.

    Args:
        sequence_parallel: each rank of `group` (torch's default group when None) holds a slice of the
            sequence; if not, each holds whole sequences of its own, without communication. Under a trainer,
            ``parallel.context`` decides: `set_context_group`.
        **options: as for `MultiheadDilatedAttention`.

    Raises:
        KernelError: a `group` without `sequence_parallel`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        sequence_parallel: bool = False,
        **options: Any,
    ) -> None:
        if options.get("group") is not None and not sequence_parallel:
            raise KernelError(
                "group: the ranks of a group share a sequence, and without sequence_parallel each rank has"
                " whole sequences",
                got="a process group, with sequence_parallel=False",
                allowed="group=None, or a process group with sequence_parallel=True",
                remedy="Pass sequence_parallel=True, or leave group out",
            )
        super().__init__(embed_dim, num_heads, segment_lengths, dilation_rates, **options)
        self.sequence_parallel = sequence_parallel

    def _built_group(self) -> ProcessGroup | None:
        if not self.sequence_parallel:
            return None
        return super()._built_group() or (dist.group.WORLD if _several_ranks() else None)


DistributedImprovedMultiheadDilatedAttention = DistributedMultiheadDilatedAttention


class DilatedTransformerBlock(nn.Module):
    """A pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x)), with GELU.

    Args:
        embed_dim: width of a position.
        num_heads: heads; divides `embed_dim`.
        segment_lengths, dilation_rates: the branches, as for `dilated_attention`.
        mlp_ratio: width of the MLP's hidden layer, in widths of a position.
        dropout: share of the outputs of attention and MLP dropped in training.
        attention: class of the attention, or what builds one from the same arguments.
        **options: `bias`, `causal`, `group`, `device`, `dtype` and the class's own, handed to it.

    Raises:
        KernelError: as the attention's class.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        attention: type[MultiheadDilatedAttention] = MultiheadDilatedAttention,
        **options: Any,
    ) -> None:
        super().__init__()
        where = {name: options[name] for name in ("device", "dtype") if name in options}
        hidden = round(embed_dim * mlp_ratio)
        self.attention = attention(embed_dim, num_heads, segment_lengths, dilation_rates, **options)
        self.attention_norm = nn.LayerNorm(embed_dim, **where)
        self.mlp_norm = nn.LayerNorm(embed_dim, **where)
        self.mlp = nn.Sequential(
            nn.Linear(embed_dim, hidden, **where), nn.GELU(), nn.Linear(hidden, embed_dim, **where)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, embed_dim) -> the same."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        grown: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return grown


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _check_heads(embed_dim: int, num_heads: int) -> None:
    if num_heads < 1 or embed_dim % num_heads:
        raise KernelError(
            f"num_heads: a width of {embed_dim} cannot be split into as many heads",
            got=num_heads,
            allowed=f"divisors of {embed_dim}",
            remedy="Change embed_dim or num_heads",
        )
