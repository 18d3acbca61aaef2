"""Collectives and messages of three ranks, whose results do not depend on what carries them.

Values are whole numbers in float64, so that sums are equal in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distributed import Callback

__all__ = ["CALLS", "RANKS", "MakesCalls"]

RANKS = 3
_OPS: Any = torch.ops._c10d_functional


def values(rank: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 9, shape, generator=generator).double()


def rows(rank: int, to: int) -> int:
    """Rows that a rank sends to another one; some send none."""
    return (2 * rank + to) % 4


def reduced(op: Any, whole: bool = False) -> Callable[[int], list[Tensor]]:
    def call(rank: int) -> list[Tensor]:
        tensor = values(rank, 4, 3)
        tensor = tensor.long() if whole else tensor
        dist.all_reduce(tensor, op)
        return [tensor]

    return call


def reduce(rank: int) -> list[Tensor]:
    tensor = values(rank, 5)
    dist.reduce(tensor, 1)
    return [tensor] if rank == 1 else []


def broadcast(rank: int) -> list[Tensor]:
    tensor = values(rank, 5)
    dist.broadcast(tensor, 2)
    return [tensor]


def all_gather(rank: int) -> list[Tensor]:
    found = [torch.empty(2, 3).double() for _ in range(RANKS)]
    dist.all_gather(found, values(rank, 2, 3))
    return found


def all_gather_into_tensor(rank: int) -> list[Tensor]:
    found = torch.empty(2 * RANKS, 3).double()
    dist.all_gather_into_tensor(found, values(rank, 2, 3))
    return [found]


def gather(rank: int) -> list[Tensor]:
    found = [torch.empty(2).double() for _ in range(RANKS)] if rank == 1 else None
    dist.gather(values(rank, 2), found, dst=1)
    return found or []


def scatter(rank: int) -> list[Tensor]:
    found = torch.empty(2).double()
    dist.scatter(found, [values(number, 2) for number in range(RANKS)] if rank == 2 else None, src=2)
    return [found]


def reduce_scatter(rank: int) -> list[Tensor]:
    found = torch.empty(2, 3).double()
    dist.reduce_scatter(found, [values(10 * rank + to, 2, 3) for to in range(RANKS)])
    return [found]


def reduce_scatter_tensor(rank: int) -> list[Tensor]:
    found = torch.empty(2, 3).double()
    dist.reduce_scatter_tensor(found, values(rank, 2 * RANKS, 3))
    return [found]


def exchange_rows(rank: int) -> list[Tensor]:
    send = [rows(rank, to) for to in range(RANKS)]
    receive = [rows(source, rank) for source in range(RANKS)]
    found, equal = torch.empty(sum(receive), 2).double(), torch.empty(RANKS, 2).double()
    dist.all_to_all_single(found, values(rank, sum(send), 2), receive, send)
    dist.all_to_all_single(equal, values(rank, RANKS, 2))
    return [found, equal]


def messages(rank: int) -> list[Tensor]:
    """Around a ring, both directions at once; then by tags that are received in the opposite order."""
    after, before = (rank + 1) % RANKS, (rank - 1) % RANKS
    found = [torch.empty(4).double() for _ in range(4)]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, values(rank, 4), after),
            dist.P2POp(dist.isend, values(rank + 5, 4), before),
            dist.P2POp(dist.irecv, found[0], before),
            dist.P2POp(dist.irecv, found[1], after),
        ]
    )
    for number, tag in enumerate((7, 8)):
        works.append(dist.isend(values(rank + 10 * number, 4), after, tag=tag))
    for number, tag in enumerate((8, 7)):
        works.append(dist.irecv(found[2 + number], before, tag=tag))
    for work in works:
        work.wait()
    return found


def blocking_messages(rank: int) -> list[Tensor]:
    """From rank 0 to 1, from 1 to 2, and from whoever sends to 0."""
    found = torch.empty(3).double()
    if rank > 0:
        dist.recv(found, rank - 1)
        found += 1
    dist.send(found if rank else values(0, 3), (rank + 1) % RANKS)
    if rank == 0:
        source = dist.recv(found)
        return [found, torch.tensor(source)]
    return [found]


def objects(rank: int) -> list[Any]:
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * 10 * rank})
    sent = [f"of {rank}", rank]
    dist.broadcast_object_list(sent, src=1)
    got: list[Any] = [None]
    dist.scatter_object_list(got, [[number] * number for number in range(RANKS)], src=0)
    at_root: list[Any] | None = [None] * RANKS if rank == 2 else None
    dist.gather_object(rank, at_root, dst=2)
    return [gathered, sent, got, at_root]


def subgroups(rank: int) -> list[Tensor]:
    """Groups with another order of ranks, without some of them, and of one alone."""
    found = []
    for members in ([2, 0], [1, 2], [1]):
        group = dist.new_group(members)
        if rank in members:
            tensor, parts = values(rank, 3), torch.empty(len(members) * 3).double()
            dist.all_gather_into_tensor(parts, tensor, group=group)
            dist.broadcast(tensor, group_src=0, group=group)
            found += [parts, tensor]
    dist.barrier()
    return found


def overlapping(rank: int) -> list[Tensor]:
    """Two groups of all ranks, which each rank uses in an order of its own, and waits for in another."""
    groups = [dist.new_group(list(range(RANKS))) for _ in range(2)]
    tensors = [values(rank + 5 * number, 3) for number in range(2)]
    order = [0, 1] if rank == 1 else [1, 0]
    works = {
        number: dist.all_reduce(tensors[number], group=groups[number], async_op=True) for number in order
    }
    works[0].wait()
    works[1].wait()
    return tensors


def coalesced(rank: int) -> list[Tensor]:
    tensors = [values(rank + number, 2 + number) for number in range(3)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    return tensors


def functional(rank: int) -> list[Tensor]:
    """As `distributed.parallel.collectives` calls them."""
    name = dist.group.WORLD.group_name
    send = [rows(rank, to) for to in range(RANKS)]
    receive = [rows(source, rank) for source in range(RANKS)]
    found = [
        _OPS.all_reduce(values(rank, 4), "sum", name),
        _OPS.all_gather_into_tensor(values(rank, 2, 2), RANKS, name),
        _OPS.reduce_scatter_tensor(values(rank, 2 * RANKS), "sum", RANKS, name),
        _OPS.all_to_all_single(values(rank, sum(send), 2), receive, send, name),
        _OPS.broadcast(values(rank, 4), 1, name),
    ]
    return [_OPS.wait_tensor(tensor) for tensor in found]


CALLS: dict[str, Callable[[int], list[Any]]] = {
    "sum": reduced(dist.ReduceOp.SUM),
    "product": reduced(dist.ReduceOp.PRODUCT),
    "min": reduced(dist.ReduceOp.MIN),
    "max": reduced(dist.ReduceOp.MAX),
    "and": reduced(dist.ReduceOp.BAND, whole=True),
    "or": reduced(dist.ReduceOp.BOR, whole=True),
    "xor": reduced(dist.ReduceOp.BXOR, whole=True),
    "reduce": reduce,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "all_gather_into_tensor": all_gather_into_tensor,
    "gather": gather,
    "scatter": scatter,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "all_to_all_single": exchange_rows,
    "messages": messages,
    "blocking messages": blocking_messages,
    "objects": objects,
    "subgroups": subgroups,
    "overlapping": overlapping,
    "coalesced": coalesced,
    "functional": functional,
}


class MakesCalls(Callback):
    """Writes what each rank receives in each of `CALLS`."""

    all_ranks = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_run_start(self, context: Any) -> None:
        rank = context.world.rank
        torch.save({name: call(rank) for name, call in CALLS.items()}, self.folder / f"{rank}.pt")
