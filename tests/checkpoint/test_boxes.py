"""Boxes of tensors: which elements each rank holds, how they are written, and read back in any other cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from distributed.checkpoint.dtensor import copy_part, own_copies, own_pieces, own_shares, read_part
from distributed.checkpoint.reader import PortableReader
from distributed.checkpoint.weight_digests import add_digests, weight_digests
from distributed.errors import UserError
from distributed.interfaces.state import BackendState, Chunk
from distributed.system.boxes import first_element, is_one_range, ranges_of
from tests.campaigns.thread_ranks import save_state as save

SHAPES = [(6,), (7, 5), (4, 6), (2, 3, 4), (1, 8), (12, 1), (3, 2, 2, 3)]


@pytest.fixture
def fake_group() -> Iterator[Any]:
    """Become one rank of several, one after the other, without the others."""

    def become(rank: int, *sizes: int) -> Any:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=prod(sizes))
        return init_device_mesh("cpu", sizes, mesh_dim_names=tuple("xyz"[: len(sizes)]))

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


def boxes_of(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    spans = [[(low, high - low) for low in range(n) for high in range(low + 1, n + 1)] for n in shape]
    for box in product(*spans):
        yield tuple(low for low, _ in box), tuple(length for _, length in box)


@pytest.mark.parametrize("shape", [(6,), (3, 4), (2, 3, 3)])
def test_ranges_of_a_box_are_its_elements(shape: tuple[int, ...]) -> None:
    whole = torch.arange(prod(shape)).reshape(shape)
    for offsets, lengths in boxes_of(shape):
        box = whole[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        found = torch.cat(
            [torch.arange(start, start + n) for start, _, n in ranges_of(shape, offsets, lengths)]
        )
        assert found.tolist() == box.flatten().tolist()
        assert first_element(shape, offsets) == int(box.flatten()[0])
        assert is_one_range(shape, lengths) == (
            found.tolist() == list(range(found[0], found[0] + len(found)))
        )


def cut(full: Tensor, mesh: Any, placements: Sequence[Any]) -> DTensor:
    """`full` as torch itself cuts it."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, mesh, list(placements), src_data_rank=None)


@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_are_what_torch_gives_a_rank(shape: tuple[int, ...], fake_group: Any) -> None:
    full = torch.arange(float(prod(shape))).reshape(shape)
    choices = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    for placements in product(choices, repeat=2):
        dims = [p.dim for p in placements if isinstance(p, Shard)]
        if len(dims) != len(set(dims)):
            continue
        seen = torch.zeros(shape)
        for rank in range(6):
            tensor = cut(full, fake_group(rank, 2, 3), placements)
            _, copies = own_copies(tensor)
            for piece in own_pieces(tensor):
                assert torch.equal(piece.data, full[piece.box])
                seen[piece.box] += 1 / copies
            refilled = cut(torch.zeros_like(full), tensor.device_mesh, placements)
            copy_part(refilled, full)
            assert torch.equal(refilled.to_local(), tensor.to_local())
        torch.testing.assert_close(seen, torch.ones(shape))


def test_two_axes_along_one_dimension_in_torchs_own_order_are_refused(fake_group: Any) -> None:
    tensor = cut(torch.zeros(12, 2), fake_group(1, 2, 3), [Shard(0), Shard(0)])
    with pytest.raises(UserError, match="not known which of its elements"):
        own_pieces(tensor)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (1, 4)])
def test_any_cut_is_read_in_any_other(sizes: tuple[int, int], fake_group: Any, tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(shape, dtype=torch.float64) for i, shape in enumerate(SHAPES)}
    ranks = prod(sizes)
    by_rank = []
    for rank in range(ranks):
        mesh = fake_group(rank, *sizes)
        shares: dict[str, int] = {}
        chunks = []
        for name, full in tensors.items():
            placements = [Replicate(), Shard(full.dim() - 1)] if full.dim() > 1 else [Shard(0), Replicate()]
            tensor = cut(full, mesh, placements)
            shares |= weight_digests({name: tensor}, rank, ranks)
            for share in own_shares(tensor, *own_copies(tensor)):
                if len(share.data):
                    given = (share.start, share.data.clone(), share.offsets, share.lengths)
                    chunks.append(Chunk(name, "model", tuple(full.shape), *given))
        by_rank.append((BackendState(chunks), shares))
    dist.destroy_process_group()
    assert add_digests([shares for _, shares in by_rank]) == add_digests([weight_digests(tensors, 0, 1)])
    assert any(chunk.lengths for state, _ in by_rank for chunk in state.chunks)
    reader = PortableReader(save(tmp_path, ranks, lambda rank, _: by_rank[rank][0]))
    for name, full in tensors.items():
        assert torch.equal(read_part(reader, "model", name, full), full)
        for offsets, lengths in list(boxes_of(tuple(full.shape)))[:400]:
            box = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
            assert torch.equal(reader.read_box("model", name, offsets, lengths), full[box])
    with pytest.raises(ValueError, match="is not in 't1'"):
        reader.read_box("model", "t1", (6, 1), (2, 3))


def test_large_boxes_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed.checkpoint.writer._PIECE", 100)
    full = torch.randn(40, 6, dtype=torch.float64)
    halves = [full[:, 3 * rank : 3 * rank + 3].reshape(-1) for rank in range(2)]
    states = [
        BackendState([Chunk("w", "model", (40, 6), 3 * rank, half, (0, 3 * rank), (40, 3))])
        for rank, half in enumerate(halves)
    ]
    reader = PortableReader(save(tmp_path, 2, lambda rank, _: states[rank]))
    assert len(reader.entries()) == 20
    assert torch.equal(reader.read("model", "w"), full.flatten())
    assert torch.equal(reader.read_box("model", "w", (5, 2), (30, 2)), full[5:35, 2:4])
