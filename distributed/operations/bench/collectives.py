"""The collectives that ``bench comm`` measures: their buffers, their call, and the result to expect."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.communication.all_reduce_algorithms import ALL_REDUCES
from distributed.communication.all_reduce_algorithms.messages import Peers
from distributed.communication.collective_costs import ALGORITHMS, ideal_bytes

__all__ = ["Collective", "formula_bytes", "num_elements"]

# torch renamed them; the old names warn.
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_PERIOD = 8191
"""Elements after which values repeat: a prime, so that a part at the wrong place is noticed."""
_EXACT_SUMS = {torch.bfloat16: 2**8, torch.float16: 2**11}
"""dtype -> largest number of ranks whose sums of zeros and ones are exact. Sums of integers are, modulo their
range."""


def num_elements(operation: str, nbytes: int, itemsize: int, size: int) -> int:
    """Elements of the largest buffer of a rank: as many as fit into `nbytes`, and where ranks have equal
    parts of it, a multiple of their number. At least one for each rank."""
    step = size if operation in ("reduce-scatter", "all-gather", "all-to-all") else 1
    return max(nbytes // itemsize // step, 1) * step


def formula_bytes(operation: str, algorithm: str, count: int, itemsize: int, size: int) -> float:
    """Bytes that a rank sends by the formula, as the mean over the ranks."""
    if algorithm in ALGORITHMS:
        traffic = ALGORITHMS[algorithm].traffic
        return sum(traffic(rank, size, count).elements for rank in range(size)) * itemsize / size
    return ideal_bytes(operation, count * itemsize, size)


class Collective:
    """One operation on buffers of one size, on this rank.

    Args:
        operation: of `collective_costs.OPERATIONS`.
        algorithm: ``library``, or a name of `ALL_REDUCES`.
        count: elements of the largest buffer, as `num_elements` returns.
        dtype: of the elements.
        device: of the buffers.
    """

    def __init__(
        self, operation: str, algorithm: str, count: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._operation, self._peers = operation, Peers(None)
        self._share = count // self._peers.size
        given = self._share if operation == "all-gather" else count
        got = self._share if operation == "reduce-scatter" else count
        self._given = torch.empty(given, dtype=dtype, device=device)
        in_place = operation in ("all-reduce", "broadcast")
        self._got = self._given if in_place else torch.empty(got, dtype=dtype, device=device)
        self._call = self._call_of(operation, algorithm)
        self._tables = [
            self._table(rank, 2 if "reduce" in operation else 100) for rank in range(self._peers.size)
        ]

    def _call_of(self, operation: str, algorithm: str) -> Callable[[], object]:
        given, got, peers = self._given, self._got, self._peers
        after, before = (peers.rank + 1) % peers.size, (peers.rank - 1) % peers.size
        reduce = dist.all_reduce if algorithm == "library" else ALL_REDUCES[algorithm]
        calls: dict[str, Callable[[], object]] = {
            "all-reduce": partial(reduce, given),
            "reduce-scatter": partial(_REDUCE_SCATTER, got, given),
            "all-gather": partial(_ALL_GATHER, got, given),
            "broadcast": partial(dist.broadcast, given, 0),
            "all-to-all": partial(dist.all_to_all_single, got, given),
            "send-recv": partial(peers.exchange, given, after, got, before),
        }
        return calls[operation]

    def run(self) -> None:
        """Call the operation once. Collective; on a GPU, it is enqueued on the current stream."""
        self._call()

    def fill(self) -> None:
        """Set the input of this rank, and clear what it receives."""
        self._got.zero_()
        if self._operation != "broadcast" or self._peers.rank == 0:
            self._given.copy_(self._values(self._peers.rank, 0, self._given.numel()))

    def is_right(self) -> bool:
        """Whether this rank has the right result, after `fill` and one `run`."""
        expected = self._expected().to(self._got.dtype)
        if self._peers.size <= _EXACT_SUMS.get(self._got.dtype, 2**24):
            return torch.equal(self._got, expected)
        # Each addition rounds by half a unit of the sum, which is at most the number of ranks.
        error = (self._got.double() - expected.double()).abs().max().item()
        return error <= torch.finfo(self._got.dtype).eps * self._peers.size**2

    def _expected(self) -> Tensor:
        rank, ranks, share, count = self._peers.rank, range(self._peers.size), self._share, self._got.numel()
        match self._operation:
            case "all-reduce":
                return self._tiled(sum(self._tables, torch.zeros_like(self._tables[0])), 0, count)
            case "reduce-scatter":
                total = sum(self._tables, torch.zeros_like(self._tables[0]))
                return self._tiled(total, rank * share, count)
            case "all-gather":
                return torch.cat([self._values(other, 0, share) for other in ranks])
            case "broadcast":
                return self._values(0, 0, count)
            case "all-to-all":
                return torch.cat([self._values(other, rank * share, share) for other in ranks])
            case _:
                return self._values((rank - 1) % self._peers.size, 0, count)

    def _values(self, rank: int, start: int, length: int) -> Tensor:
        return self._tiled(self._tables[rank], start, length)

    def _tiled(self, table: Tensor, start: int, length: int) -> Tensor:
        # A table of small numbers, so that a check needs no more memory than the buffers.
        return table.roll(-(start % _PERIOD)).to(self._got.dtype).repeat(-(-length // _PERIOD))[:length]

    def _table(self, rank: int, limit: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.randint(0, limit, (_PERIOD,), generator=generator).to(self._got.device)
