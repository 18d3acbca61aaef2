"""Ring attention: dense attention over a sequence that no rank holds whole.

Keys and values travel round the ring of ranks while each computes (arXiv:2310.01889). With a causal mask
the contiguous layout leaves the first ranks idle; in the zigzag layout rank i of P holds the chunks i and
2P - 1 - i of 2P, and every rank has the same work at every hop.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup

from distributed_kernels.attention.engine import Piece, RingPart, draw_dropout, piecewise_attention
from distributed_kernels.attention.input_checks import check_attention, check_dropout, scale_of
from distributed_kernels.attention.ring_exchange import (
    Ring,
    all_gather,
    check_equal_slices,
    default_group,
    gather_key_masks,
)
from distributed_kernels.attention.row_views import RowRange, RowView
from distributed_kernels.errors import KernelError
from distributed_kernels.foreign_names import answers_foreign_names


@answers_foreign_names
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "zigzag",
    dropout_p: float = 0.0,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Dense attention over the whole sequence, of which each rank of `group` holds a slice.

    Received per rank, in elements: 2 batch h head_dim length (P - 1) forward and as much again backward, and
    2 batch h head_dim length P of gradients in float32, with h heads of keys; all while computing.

    Args:
        q: (batch, heads, length, head_dim), this rank's slice, of one length on all ranks.
        k, v: the same; or with fewer heads, which divide those of q and travel as they are (grouped-query
            attention).
        group: the ranks that hold the sequence; torch's default group when None.
        causal: a query sees no later position.
        scale: factor on the scores; 1/sqrt(head_dim) when None.
        layout: ``zigzag`` (slices cut by `zigzag_slice`) or ``contiguous`` (in the ranks' order), which is
            what ``x.chunk(size, 2)[rank]`` makes. Tensors do not tell which they are: contiguous slices in
            the default layout give the attention of another order of positions. There is a warning where q
            is a view of the whole sequence, as `chunk` returns. Without a causal mask both are the same.
        dropout_p: probability with which a weight is dropped after the softmax; others are divided by 1 - p.
            Masks are drawn from torch's global generator. 0.0 in evaluation.
        key_mask: bool (batch, length), True where a key of this rank's slice may be seen; on all ranks or on
            none. It goes to all of them.

    Returns:
        out, shaped and typed as q: the slice that belongs to this rank's queries.

    Raises:
        KernelError: tensors or ranks that do not agree, an unknown layout, an odd length in zigzag.
    """
    check_attention(q, k, v)
    check_dropout(dropout_p)
    pieces_of = _layout(layout)
    group = default_group(group)
    check_equal_slices(q, group)
    masks = None if key_mask is None else gather_key_masks(key_mask, q, group)
    length, ring = q.shape[2], Ring.of(group)
    if layout == "zigzag" and ring.size > 1 and causal:
        _check_even(length)
        _warn_of_chunk(q, ring)

    def pieces(source: int) -> list[Piece]:
        found = pieces_of(length, ring.position, source)
        if not causal or source == ring.position:
            found = [Piece(RowView.all(length), RowView.all(length), causal)]
        return found if masks is None else [_masked(piece, masks[source]) for piece in found]

    branch = RingPart([pieces(source) for source in range(ring.size)], ring)
    dropout = draw_dropout(dropout_p, group)
    return piecewise_attention(q, k, v, [branch], scale_of(q, scale), dropout)[0]


def _masked(piece: Piece, mask: Tensor) -> Piece:
    """`piece` without the keys that `mask`, bool (batch, length) of the keys' slice, leaves out."""
    rows = piece.keys.gather(mask[:, None, :]).squeeze(2)
    return replace(piece, mask=rows[:, :, None, :])


def _zigzag_pieces(length: int, position: int, source: int) -> list[Piece]:
    half = length // 2
    low, high = RowView.rows(RowRange(0, half, half)), RowView.rows(RowRange(half, half, half))
    if source < position:
        # Its early chunk lies before both of ours, its late chunk after both.
        return [Piece(RowView.all(length), low)]
    return [Piece(high, RowView.all(length))]


def _contiguous_pieces(length: int, position: int, source: int) -> list[Piece]:
    return [Piece(RowView.all(length), RowView.all(length))] if source < position else []


def _layout(name: str) -> Callable[[int, int, int], list[Piece]]:
    layouts = {"zigzag": _zigzag_pieces, "contiguous": _contiguous_pieces}
    if name not in layouts:
        raise KernelError("layout: unknown layout", got=name, allowed=", ".join(layouts))
    return layouts[name]


def _check_even(length: int) -> None:
    if length % 2:
        raise KernelError(
            "q: a zigzag slice is two chunks of equal length",
            got=length,
            allowed="an even length",
            remedy="Cut the sequence with zigzag_slice, or choose layout='contiguous'",
        )


def _warn_of_chunk(q: Tensor, ring: Ring) -> None:
    """Warn where `q` is the part at this rank's place of a tensor as long as the whole sequence."""
    if isinstance(q, FakeTensor) or q.is_meta:
        return
    heads, length, width = q.shape[1:]
    whole = ring.size * length
    dense = (whole * heads * width, whole * width, width, 1), (whole * heads * width, width, heads * width, 1)
    inside = q.untyped_storage().nbytes() == ring.size * q.numel() * q.element_size()
    if inside and q.stride() in dense and q.storage_offset() == ring.position * length * q.stride(2):
        warnings.warn(
            "ring_attention: q is a view of the whole sequence at this rank's place, as chunk() returns it."
            " layout='zigzag' is for slices of the chunks rank and 2 size - 1 - rank of 2 size. Pass"
            " layout='contiguous', or cut q, k and v with zigzag_slice(x, group, dim=2).",
            stacklevel=4,
        )


def zigzag_positions(length: int, rank: int, size: int) -> Tensor:
    """Positions in the whole sequence of a rank's zigzag slice, for instance for rotary embeddings.

    Args:
        length: positions of the whole sequence.
        rank: the rank's number in its group.
        size: ranks of the group.

    Returns:
        int64 (length / size,), ascending.

    Raises:
        KernelError: the length is no multiple of twice the size, or there is no such rank.
    """
    if length % (2 * size):
        raise KernelError(
            f"length: {size} ranks hold {2 * size} equal chunks",
            got=length,
            allowed=f"multiples of {2 * size}",
            remedy="Pad the sequence",
        )
    if not 0 <= rank < size:
        raise KernelError("rank: not a rank of the group", got=rank, allowed=f"0 to {size - 1}")
    chunk = length // (2 * size)
    late = 2 * size - 1 - rank
    return torch.cat([torch.arange(each * chunk, (each + 1) * chunk) for each in (rank, late)])


def zigzag_slice(x: Tensor, group: ProcessGroup | None, dim: int = 1) -> Tensor:
    """This rank's slice of a sequence that every rank holds whole.

    Args:
        x: any tensor with the sequence along `dim`; differentiable.
        group: the ranks; torch's default group when None.
        dim: the sequence's dimension.

    Raises:
        KernelError: the length is no multiple of twice the group's size.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return x.index_select(dim, zigzag_positions(x.shape[dim], rank, size).to(x.device))


def zigzag_gather(x: Tensor, group: ProcessGroup | None, dim: int = 1) -> Tensor:
    """The whole sequence from the ranks' zigzag slices, on every rank, without gradient.

    For looking at results; a loss belongs on the slices, summed over the ranks.

    Args:
        x: this rank's slice, of equal shape on all ranks.
        group: the ranks; torch's default group when None.
        dim: the sequence's dimension.
    """
    group = default_group(group)
    size, length = group.size(), x.shape[dim] * group.size()
    slices = all_gather(x.detach(), group)
    order = torch.cat([zigzag_positions(length, rank, size) for rank in range(size)])
    return torch.cat(slices, dim).index_select(dim, order.argsort().to(x.device))
