"""The written-out all-reduces against the library's, their order of additions, and their formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed import Callback
from distributed.communication import all_reduce_algorithms
from distributed.communication.all_reduce_algorithms import ALL_REDUCES
from distributed.communication.all_reduce_algorithms.messages import Peers
from distributed.communication.collective_costs import (
    ALGORITHMS,
    BUS_FACTORS,
    chunk_bounds,
    core_size,
    ideal_bytes,
)
from distributed.testing.rank_pool import RankPool
from tests.communication.all_reduce_mutants import MUTANTS
from tests.support.training import make_trainer

RANKS = 5
LENGTHS = (0, 1, 3, 4, 37, 1000)
LARGE = 250_001
"""Elements of a message whose bytes are counted: the header of a message is 144 bytes."""


# -- the oracles ---------------------------------------------------------------------------------------------


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Values of very different size, whose sum depends on the order of the additions."""
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.int64:
        return torch.randint(-(2**62), 2**62, (numel,), generator=generator)
    exponents = torch.randint(-20, 20, (numel,), generator=generator)
    return torch.randn(numel, generator=generator, dtype=dtype) * 2.0**exponents


def sum_by_ring(parts: list[Tensor]) -> Tensor:
    size, result = len(parts), torch.empty_like(parts[0])
    for chunk, (start, end) in enumerate(chunk_bounds(len(result), size)):
        total = parts[chunk][start:end]
        for step in range(1, size):
            total = total + parts[(chunk + step) % size][start:end]
        result[start:end] = total
    return result


def sum_by_tree(parts: list[Tensor], rank: int = 0) -> Tensor:
    total = parts[rank]
    for child in (2 * rank + 1, 2 * rank + 2):
        if child < len(parts):
            total = total + sum_by_tree(parts, child)
    return total


def sum_by_halving(parts: list[Tensor]) -> Tensor:
    core = core_size(len(parts))
    sums = [parts[r] + parts[r + core] if r + core < len(parts) else parts[r] for r in range(core)]
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [sums[r] + sums[r + half] for r in range(half)]
    return sums[0]


ORACLES = {"ring": sum_by_ring, "tree": sum_by_tree, "halving-doubling": sum_by_halving}


# -- the checks, on every rank -------------------------------------------------------------------------------


def check_sum(name: str, function: Callable[..., Tensor], group: Any) -> bool:
    """Against the library's, for every length and dtype, and for tensors that are not contiguous."""
    rank = dist.get_rank(group)
    good = True
    for numel in LENGTHS:
        for dtype in (torch.float64, torch.int64):
            own = values(rank, numel, dtype)
            if dtype == torch.float64:
                own = (own * 2**20).round().clamp(-(2**40), 2**40)  # whole numbers: any order is exact
            expected = own.clone()
            dist.all_reduce(expected, group=group)
            good &= torch.equal(function(own, group), expected)
    wide = torch.arange(24.0).reshape(4, 6) + rank
    for view in (wide.t(), wide[:, ::2], wide[1:3, 1:4]):
        expected = view.clone().contiguous()
        dist.all_reduce(expected, group=group)
        good &= function(view, group) is view and torch.equal(view, expected)
    return good


def check_order(name: str, function: Callable[..., Tensor], group: Any) -> bool:
    """Bit for bit the sum in the order that the algorithm promises, the same on all ranks."""
    rank, size, good = dist.get_rank(group), dist.get_world_size(group), True
    for numel in LENGTHS:
        parts = [values(other, numel, torch.float32) for other in range(size)]
        good &= torch.equal(function(parts[rank].clone(), group), ORACLES[name](parts))
    return good


def bytes_written() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


@contextmanager
def counted_messages() -> Iterator[list[int]]:
    """The numbers of elements of the messages that this rank sends."""
    sent: list[int] = []
    real = dist.batch_isend_irecv

    def run(operations: list[dist.P2POp]) -> list[dist.Work]:
        sent.extend(op.tensor.numel() for op in operations if op.op is dist.isend)
        return real(operations)

    dist.batch_isend_irecv = run
    try:
        yield sent
    finally:
        dist.batch_isend_irecv = real


def check_bytes(name: str, function: Callable[..., Tensor], group: Any) -> bool:
    """What the kernel has sent for this rank, and the number of messages, against the formulas."""
    rank, size, good = dist.get_rank(group), dist.get_world_size(group), True
    for numel in (3, LARGE):
        own, formula = values(rank, numel, torch.float64), ALGORITHMS[name].traffic(rank, size, numel)
        dist.barrier(group)
        with counted_messages() as sent:
            before = bytes_written()
            function(own, group)
            written = bytes_written() - before
        good &= (len(sent), sum(sent)) == formula
        if numel == LARGE:
            good &= abs(written - 8 * formula.elements) <= 0.02 * 8 * formula.elements
    return good


CHECKS = {"sum": check_sum, "order": check_order, "bytes": check_bytes}


# -- on real ranks -------------------------------------------------------------------------------------------


def in_place(algorithm: Callable[[Tensor, Peers], None]) -> Callable[..., Tensor]:
    def function(tensor: Tensor, group: Any = None) -> Tensor:
        return all_reduce_algorithms._in_place(algorithm, tensor, group)

    return function


class OnRanks(Callback):
    """Calls a function on every rank, with a group of the first 2, 3, 4 and 5 ranks if it is one of them."""

    all_ranks = True

    def __init__(self, check: Callable[[Any], None]) -> None:
        self.check = check

    def on_run_start(self, context: Any) -> None:
        for size in range(2, RANKS + 1):
            group = dist.new_group(list(range(size)))
            if dist.get_rank() < size:
                self.check(group)
            dist.barrier()


def check_sound(group: Any) -> None:
    for name, function in ALL_REDUCES.items():
        for kind, check in CHECKS.items():
            assert check(name, function, group), f"{name}: {kind} on {dist.get_world_size(group)} ranks"


def check_mutants(group: Any) -> None:
    if dist.get_world_size(group) not in (3, 5):
        return
    for mutant, (name, kind) in MUTANTS.items():
        good = torch.tensor([float(CHECKS[kind](name, in_place(mutant), group))])
        dist.all_reduce(good, dist.ReduceOp.MIN, group=group)
        assert not good.item(), f"{mutant.__name__} stays green"


@pytest.mark.parametrize("check", [check_sound, check_mutants])
def test_every_algorithm_keeps_what_it_promises(check: Callable[[Any], None], rank_pool: RankPool) -> None:
    make_trainer(
        nn.Linear(1, 1),
        RANKS,
        rank_pool,
        batch_size=1,
        backend="pytorch-ddp",
        loss_fn=nn.MSELoss(),
        callbacks=[OnRanks(check)],
    ).fit((torch.zeros(RANKS, 1), torch.zeros(RANKS, 1)), max_steps=1)


# -- the formulas --------------------------------------------------------------------------------------------


def test_the_formulas_are_those_of_the_literature() -> None:
    numel = 2**4 * 3 * 5
    for size in (2, 3, 4, 5, 8):
        for rank in range(size):
            if numel % size == 0:
                ring = ALGORITHMS["ring"].traffic(rank, size, numel)
                assert ring == (2 * (size - 1), 2 * (size - 1) * numel // size)
            if core_size(size) == size:
                halving = ALGORITHMS["halving-doubling"].traffic(rank, size, numel)
                assert halving == (2 * (size.bit_length() - 1), 2 * (size - 1) * numel // size)
        up_and_down = [ALGORITHMS["tree"].traffic(rank, size, numel) for rank in range(size)]
        assert sum(sent.messages for sent in up_and_down) == 2 * (size - 1)
        assert BUS_FACTORS["all-reduce"](size) == pytest.approx(2 * (size - 1) / size)
        assert ideal_bytes("broadcast", numel, size) * size == pytest.approx((size - 1) * numel)
    assert [ALGORITHMS["ring"].path(size).messages for size in (2, 4, 8)] == [2, 6, 14]
    assert [ALGORITHMS["tree"].path(size).messages for size in (2, 3, 4, 8)] == [2, 4, 6, 10]
    assert [ALGORITHMS["halving-doubling"].path(size).messages for size in (2, 3, 4, 8)] == [2, 4, 4, 6]
    # Latency decides for few bytes, and bandwidth for many.
    few, many = (
        {name: costs.path(8).seconds(nbytes, 1e-4, 1e9) for name, costs in ALGORITHMS.items()}
        for nbytes in (1e3, 1e9)
    )
    assert min(few, key=few.__getitem__) == "halving-doubling"
    assert few["tree"] < few["ring"]
    assert many["ring"] == pytest.approx(many["halving-doubling"], rel=1e-2)
    assert many["ring"] < many["tree"] / 5
