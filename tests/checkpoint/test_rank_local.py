"""Tensors of which each replica has its own: as many replicas read their own, others keep the sum or mean."""

from __future__ import annotations

import pytest
import torch

from distributed.checkpoint.rank_local import Replica, export_rank_local, read_rank_local, saved_kinds
from distributed.errors import UserError
from distributed.interfaces.state import Chunk, StateReader

KIND = "compression.residual"
PARAMETERS = {"a": torch.zeros(3, 2), "b": torch.zeros(5)}


class Memory(StateReader):
    """A saved state that is the chunks of all ranks."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self._chunks = chunks

    def tensors(self) -> dict[tuple[str, str], tuple[int, ...]]:
        return {(c.key, c.name): c.shape for c in self._chunks}

    def read(self, key: str, name: str, start: int = 0, length: int | None = None) -> torch.Tensor:
        parts = sorted((c for c in self._chunks if (c.key, c.name) == (key, name)), key=lambda c: c.start)
        flat = torch.cat([c.data for c in parts])
        return flat[start : None if length is None else start + length]


def _saved(number: int) -> tuple[Memory, list[dict[str, torch.Tensor]]]:
    torch.manual_seed(0)
    values = [{name: torch.randn_like(p) for name, p in PARAMETERS.items()} for _ in range(number)]
    chunks = [
        chunk
        for index, tensors in enumerate(values)
        for copy in range(2)  # two ranks hold the same elements of each replica
        for chunk in export_rank_local(
            KIND, tensors, PARAMETERS, dict.fromkeys(PARAMETERS, Replica(index, number, copy, 2))
        )
    ]
    return Memory(chunks), values


def _read(reader: Memory, index: int, number: int, keep: str) -> tuple[dict[str, torch.Tensor], bool]:
    return read_rank_local(
        KIND, reader, PARAMETERS, dict.fromkeys(PARAMETERS, Replica(index, number)), keep=keep
    )


@pytest.mark.parametrize("number", [1, 2, 11])
def test_the_same_number_reads_its_own(number: int) -> None:
    reader, values = _saved(number)
    for index, own in enumerate(values):
        found, exact = _read(reader, index, number, "sum")
        assert exact
        assert all(torch.equal(found[name], own[name]) for name in PARAMETERS)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_another_number_keeps_sum_or_mean(number: int) -> None:
    reader, values = _saved(3)
    for keep, times in (("sum", 1.0), ("mean", number / 3)):
        parts = [_read(reader, index, number, keep) for index in range(number)]
        assert not any(exact for _, exact in parts)
        for name in PARAMETERS:
            total = sum(found[name] for found, _ in parts)
            expected = sum(own[name] for own in values) * times
            torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)


def test_kinds_are_listed() -> None:
    assert saved_kinds(_saved(2)[0]) == {KIND}


def test_a_missing_replica_is_refused() -> None:
    reader, _ = _saved(3)
    kept = [chunk for chunk in reader._chunks if ".1.of." not in chunk.key]
    with pytest.raises(UserError, match="only some of the replicas"):
        _read(Memory(kept), 0, 3, "sum")
