"""DenseSum: tensors added up over a wire as they are, whatever their dtypes, shapes and strides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed.communication.exchange import DenseSum, PendingExchange
from distributed.communication.wire import Reply
from distributed.testing.thread_wire import ThreadWire, run_ranks

SIZE = 3


def tensors_of_rank(rank: int) -> dict[str, Tensor]:
    """Two dtypes in turn, strides of each kind, a single element and none."""
    draw = torch.Generator().manual_seed(rank)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=dtype)

    return {
        "matrix": normal(4, 6),
        "double": normal(5, dtype=torch.float64),
        "transposed": normal(3, 7).T,
        "image": normal(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar": normal(dtype=torch.float64),
        "empty": normal(0, 3),
        "complex": normal(3, dtype=torch.complex64),
    }


class LeavesOutADtype(DenseSum):
    """Broken: only tensors of the first one's dtype are sent."""

    def begin(self, tensors: Mapping[str, Tensor]) -> PendingExchange:
        first = next(iter(tensors.values())).dtype
        return super().begin({name: t for name, t in tensors.items() if t.dtype == first})


class ReadsMemoryInOrder(DenseSum):
    """Broken: the memory of a tensor is taken for its elements, also of a transposed one."""

    def begin(self, tensors: Mapping[str, Tensor]) -> PendingExchange:
        flat = {name: t.as_strided((t.numel(),), (1,)) for name, t in tensors.items()}
        flat["transposed"] = tensors["transposed"].reshape(-1)
        return super().begin(flat)


def agrees_with_the_oracle(kind: type[DenseSum]) -> bool:
    """Whether each rank has the sum over the ranks of each tensor, in its own shape and strides."""

    def work(wire: ThreadWire) -> dict[str, Tensor]:
        tensors = tensors_of_rank(wire.rank)
        kind(wire).begin(tensors).finish()
        return tensors

    given = [tensors_of_rank(rank) for rank in range(SIZE)]
    sums = {name: given[0][name] + given[1][name] + given[2][name] for name in given[0]}
    return all(
        torch.equal(found[name], total) and found[name].stride() == given[0][name].stride()
        for found in run_ranks(SIZE, work)
        for name, total in sums.items()
    )


def test_each_rank_has_the_sums() -> None:
    assert agrees_with_the_oracle(DenseSum)


@pytest.mark.parametrize("kind", [LeavesOutADtype, ReadsMemoryInOrder])
def test_a_broken_one_is_noticed(kind: type[DenseSum]) -> None:
    assert not agrees_with_the_oracle(kind)


def test_bytes_are_those_that_the_wire_counts() -> None:
    def work(wire: ThreadWire) -> tuple[float, float]:
        tensors, exchange = tensors_of_rank(wire.rank), DenseSum(wire)
        exchange.begin(tensors).finish()
        return exchange.sent_bytes(tensors), wire.sent

    for stated, sent in run_ranks(SIZE, work):
        assert stated == pytest.approx(sent, rel=1e-12)


def test_a_single_rank_keeps_its_tensors_and_sends_nothing() -> None:
    tensors, exchange = tensors_of_rank(0), DenseSum(None)
    exchange.begin(tensors).finish()
    assert all(torch.equal(tensors[name], value) for name, value in tensors_of_rank(0).items())
    assert exchange.sent_bytes(tensors) == 0.0
    assert exchange.add(torch.tensor([2.0])).tolist() == [2.0]


class SlowWire:
    """A wire of one rank whose collectives arrive when they are told to.

    Args:
        tells: whether it knows that one has arrived.
    """

    rank, size = 0, 1

    def __init__(self, tells: bool) -> None:
        self._tells = tells
        self.arrived: list[bool] = []

    def sum(self, values: Tensor) -> Reply:
        """Start an all-reduce."""
        self.arrived.append(False)
        number = len(self.arrived) - 1
        return Reply(lambda: values, (lambda: self.arrived[number]) if self._tells else None)

    gather: Any = None
    scatter: Any = None


def test_it_is_complete_when_all_dtypes_are() -> None:
    wire = SlowWire(tells=True)
    pending = DenseSum(wire).begin({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.float64)})
    assert pending.is_completed is not None
    seen = [pending.is_completed()]
    for number in range(2):
        wire.arrived[number] = True
        seen.append(pending.is_completed())
    assert seen == [False, False, True]


def test_completion_is_unknown_where_the_wire_cannot_tell() -> None:
    assert DenseSum(SlowWire(tells=False)).begin({"a": torch.zeros(2)}).is_completed is None
