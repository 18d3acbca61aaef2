"""GatherOrder: whether all ranks gather the parameters of the same modules in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from secrets import token_hex
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distributed.errors import UserError
from distributed.interfaces.backend import Backend

__all__ = ["GatherOrder"]

_LONGEST_WAIT = 30.0
"""Seconds."""


class GatherOrder:
    """For backends that gather the parameters of a module in its forward: if ranks call different modules,
    weights of different modules are mixed, or the ranks block each other.

    The first forward of each kind compares every call with the other ranks before the gather. Later ones
    compare it with this rank's first forward, which costs no communication. A rank that leaves that order
    waits for the other ranks to leave it in the same way; then every further call is compared.

    The backend removes the hooks that this class adds to modules, together with its own.

    Args:
        modules: those that gather parameters, the same on all ranks.
        hang_timeout: seconds after which a run without progress ends; a rank waits for half of them, or for
            30 seconds.
        group: the ranks that have these modules; None for all.
    """

    def __init__(
        self,
        backend: Backend,
        modules: Sequence[nn.Module],
        hang_timeout: float | None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.backend, self._end, self._gathering = backend, len(modules), group
        self._limit = min(_LONGEST_WAIT, (hang_timeout or float("inf")) / 2)
        first = dist.get_global_rank(group, 0) if group is not None else 0
        self._key = f"gather_order/{backend.broadcast_object(token_hex(4))}/{first}"
        self._known: dict[str, list[int]] = {}
        self._varies: set[str] = set()
        self._calls: list[int] = []
        self._kind: str | None = None
        self._forwards = 0
        for number, module in enumerate(modules):
            module.register_forward_pre_hook(self._hook(number), prepend=True)

    @contextmanager
    def checked(self, kind: str) -> Iterator[None]:
        """Compare the calls of modules within the block. Collective.

        Args:
            kind: of forward; each kind has an order of its own.

        Raises:
            UserError: the ranks call different modules.
        """
        self._kind, self._calls = kind, []
        self._forwards += 1
        try:
            yield
            self._compare(self._end)
            self._known.setdefault(kind, self._calls)
        finally:
            self._kind = None

    def follow(self, kind: str, gather: Callable[[int], None]) -> None:
        """Take part in a forward pass of the other ranks without one of this rank. Collective.

        Args:
            kind: as of `checked`.
            gather: gathers the parameters of a module, by its number.
        """
        self._forwards += 1
        calls = self._known.get(kind)
        if calls is not None and kind not in self._varies:
            for number in calls[:-1]:
                gather(number)
            return
        followed: list[int] = []
        while self._end not in followed:
            # Less than what the other ranks give, and less than its negative.
            both = torch.tensor([-1, -(2**40)])
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self._gathering)
            followed.append(int(both[0]))
            if followed[-1] != self._end:
                gather(followed[-1])
        self._known.setdefault(kind, followed)

    def _hook(self, number: int) -> Callable[..., None]:
        def compare(*_: Any) -> None:
            if self._kind is not None:  # backward calls them again under activation checkpointing
                self._compare(number)

        return compare

    def _compare(self, number: int) -> None:
        """Compare the next call, of module `number`, or the end of the forward."""
        kind, position = str(self._kind), len(self._calls)
        self._calls.append(number)
        known = self._known.get(kind)
        if known is None or kind in self._varies:
            self._compare_now(number)
        elif position >= len(known) or known[position] != number:
            self._depart(number)
            self._varies.add(kind)

    def _compare_now(self, number: int) -> None:
        both = torch.tensor([number, -number])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._gathering)
        if int(both[0]) != -int(both[1]):
            raise self._refusal()

    def _depart(self, number: int) -> None:
        """Wait until every rank has left the known order by the same call."""
        store: Any = dist.distributed_c10d._get_default_store()
        key, call = f"{self._key}/{self._forwards}", f"{len(self._calls)}: {number}"
        if store.compare_set(f"{key}/first", "", call).decode() != call:
            store.set(f"{key}/verdict", "different")
        elif store.add(f"{key}/count", 1) == dist.get_world_size(self._gathering):
            store.set(f"{key}/verdict", "equal")
        try:
            store.wait([f"{key}/verdict"], timedelta(seconds=self._limit))
        except dist.DistStoreError:
            raise self._refusal() from None
        if store.get(f"{key}/verdict") != b"equal":
            raise self._refusal()

    def _refusal(self) -> UserError:
        name = self.backend.spec.name
        return UserError(
            f"the ranks called different modules in one micro-batch, and {name} gathers the parameters of a"
            " module in its forward. The step was not taken",
            field="backend",
            got=name,
            allowed="models of which all samples use the same modules",
            remedy="Use pytorch-ddp, horovod or fsdp with fsdp.wrap=whole, and find_unused_parameters=true",
        )
