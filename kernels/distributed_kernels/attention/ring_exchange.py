"""Communication of this package with other ranks, with a count of the received bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup

from distributed_kernels.errors import KernelError


@dataclass
class Traffic:
    """Bytes received by this rank.

    Attributes:
        received: bytes of activations and gradients; exchanged shapes are not counted.
    """

    received: int = 0


_counters: ContextVar[tuple[Traffic, ...]] = ContextVar("traffic", default=())
_agreed: WeakKeyDictionary[ProcessGroup, set[tuple[int, ...]]] = WeakKeyDictionary()


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the bytes that this rank receives in attention inside the ``with``.

    The backward counts if it is called inside as well and in this thread, as on a CPU; autograd runs it
    in threads of its own on CUDA, which the counter does not see.
    """
    traffic = Traffic()
    token = _counters.set((*_counters.get(), traffic))
    try:
        yield traffic
    finally:
        _counters.reset(token)


def _count(tensors: Sequence[Tensor]) -> None:
    for traffic in _counters.get():
        traffic.received += sum(x.numel() * x.element_size() for x in tensors)


class Shift:
    """Tensors on their way from the previous rank of a ring; `wait` returns them."""

    def __init__(self, arriving: list[Tensor], leaving: list[Tensor], works: list[dist.Work]) -> None:
        self._arriving, self._leaving, self._works = arriving, leaving, works

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        self._leaving = []
        _count(self._arriving)
        return self._arriving


@dataclass(frozen=True)
class Ring:
    """Ranks that pass tensors on, each to the next.

    Attributes:
        group: a group that holds them all; None for a ring of this rank alone.
        members: ranks within `group`, in the ring's order.
        position: this rank's place in `members`.
    """

    group: ProcessGroup | None = None
    members: tuple[int, ...] = (0,)
    position: int = 0

    @classmethod
    def of(cls, group: ProcessGroup, members: Sequence[int] | None = None) -> Ring:
        """The ring of `members` (ranks of `group`; all of them when None), which holds this rank."""
        ranks = tuple(range(dist.get_world_size(group)) if members is None else members)
        return cls(group, ranks, ranks.index(dist.get_rank(group)))

    @property
    def size(self) -> int:
        return len(self.members)

    def shift(self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Shift:
        """Send `tensors` to the next rank, receive tensors of `shapes` from the previous one."""
        arriving = [x.new_empty(tuple(shape)) for x, shape in zip(tensors, shapes, strict=True)]
        leaving = [x.contiguous() for x in tensors]
        sends = [self._operation(dist.isend, x, self.position + 1) for x in leaving if x.numel()]
        receives = [self._operation(dist.irecv, x, self.position - 1) for x in arriving if x.numel()]
        works = dist.batch_isend_irecv(sends + receives) if sends or receives else []
        return Shift(arriving, leaving, works)

    def _operation(self, kind: Callable[..., Any], x: Tensor, position: int) -> dist.P2POp:
        if self.group is None:
            raise RuntimeError("a ring of one rank cannot send")
        peer = dist.get_global_rank(self.group, self.members[position % self.size])
        return dist.P2POp(kind, x, peer, self.group)


def all_to_all(x: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange the slices of the first dimension, one for each rank of `group`; shape unchanged."""
    arriving = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(arriving, x.contiguous(), group=group)
    # One slice is this rank's own.
    _count([arriving[1:]])
    return arriving


def all_gather(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    """The tensors `x` of all ranks of `group`, equal in shape, in their order."""
    gathered = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(gathered, x.contiguous(), group=group)
    _count(gathered[1:])
    return gathered


def gather_key_masks(mask: Tensor, q: Tensor, group: ProcessGroup) -> list[Tensor]:
    """The ranks' masks of their slices of the keys, bool (batch, length) each, in the ranks' order.

    Raises:
        KernelError: this rank's is not such a mask.
    """
    wanted = (q.shape[0], q.shape[2])
    if tuple(mask.shape) != wanted or mask.dtype != torch.bool:
        raise KernelError(
            "key_mask: not a mask of this rank's keys",
            got=f"{tuple(mask.shape)} of {mask.dtype}",
            allowed=f"{wanted} of torch.bool, True where a key may be seen",
            remedy="For a mask of ones and zeros give mask.bool()",
        )
    return [each.bool() for each in all_gather(mask.to(torch.uint8), group)]


def default_group(group: ProcessGroup | None) -> ProcessGroup:
    """`group`, or torch's default group when None.

    Raises:
        KernelError: there is no process group.
    """
    found = group if group is not None or not dist.is_initialized() else dist.group.WORLD
    if found is None:
        raise KernelError(
            "group: there is no process group",
            allowed="a group of the ranks that hold the sequence",
            remedy="Call torch.distributed.init_process_group first, or use the attention of one process",
        )
    return found


def check_equal_slices(x: Tensor, group: ProcessGroup) -> None:
    """Raise unless the ranks of `group` hold slices of one shape.

    On CUDA, where the answer would have to be waited for, the others are asked once for each shape: a rank
    that departs from a shape known to the others meets torch's own timeout there.

    Raises:
        KernelError: this rank is not in the group, or the ranks' shapes differ.
    """
    if dist.get_rank(group) < 0:
        raise KernelError(
            "group: this rank is not one of its ranks",
            got=f"rank {dist.get_rank()}",
            allowed=f"ranks {dist.get_process_group_ranks(group)}",
            remedy="Pass every rank the group that its slice of the sequence belongs to",
        )
    if isinstance(x, FakeTensor):
        return  # it has no values to send
    known = _agreed.setdefault(group, set())
    if x.is_cuda and tuple(x.shape) in known:
        return
    mine = torch.tensor(x.shape, dtype=torch.int64, device=x.device)
    shapes = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(shapes, mine, group=group)
    if any(not torch.equal(mine, other) for other in shapes):
        raise KernelError(
            "q: the ranks of the group hold slices of different shapes",
            got={rank: tuple(shape.tolist()) for rank, shape in enumerate(shapes)},
            remedy="Cut the sequence into as many equal slices as the group has ranks (pad it if need be)",
        )
    known.add(tuple(x.shape))
