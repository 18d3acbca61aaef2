"""GroupWire: what ranks receive by each of its collectives, also of several that are under way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed import Callback
from distributed.communication import wire as wire_module
from distributed.communication.wire import GroupWire
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer

LENGTHS = (0, 1, 1000, 3 * (1 << 18) + 5)
"""Bytes for each rank: the last are sent in four messages."""


def content(rank: int, to: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + to)
    return torch.randint(0, 256, (length,), generator=generator, dtype=torch.uint8)


def received_by_all(group: Any, length: int) -> bool:
    """Whether two exchanges of each kind, begun before one has ended, bring what the ranks have sent."""
    wire = GroupWire(group)
    ranks = range(wire.size)
    parts = torch.stack([content(wire.rank, to, length) for to in ranks])
    others = torch.stack([content(wire.rank + 50, to, length) for to in ranks])
    replies = [wire.scatter(parts), wire.gather(parts[0]), wire.scatter(others), wire.gather(others[0])]
    expected = [
        torch.stack([content(rank + first, wire.rank * each, length) for rank in ranks])
        for first in (0, 50)
        for each in (1, 0)
    ]
    return all(torch.equal(reply(), right) for reply, right in zip(replies, expected, strict=True))


class Exchange(Callback):
    """Checks groups of two and three ranks; rank 0 writes whether all have received what was sent."""

    all_ranks = True

    def __init__(self, found: Path) -> None:
        self.found = found

    def on_run_start(self, context: Any) -> None:
        good = True
        for members in ([2, 0], [0, 1, 2]):
            group = dist.new_group(members)
            if context.world.rank in members:
                good &= all(received_by_all(group, length) for length in LENGTHS)
        everywhere = context.backend.gather_objects(good)
        if context.world.rank == 0:
            self.found.write_text(str(all(everywhere)))


class SwapsMessages(Exchange):
    """Broken: the last message of a large part arrives in the opposite order."""

    def on_run_start(self, context: Any) -> None:
        real = dist.irecv

        def swapped(tensor: Tensor, **where: Any) -> Any:
            return real(tensor.flip(0) if len(tensor) == 5 else tensor, **where)

        wire_module.dist.irecv = swapped
        try:
            super().on_run_start(context)
        finally:
            wire_module.dist.irecv = real


@pytest.mark.parametrize(("check", "sound"), [(Exchange, True), (SwapsMessages, False)])
def test_each_rank_receives_what_the_others_send_it(
    rank_pool: RankPool, tmp_path: Path, check: type[Exchange], sound: bool
) -> None:
    callbacks = [check(tmp_path / "found")]
    trainer = make_trainer(nn.Linear(2, 1), 3, rank_pool, loss_fn=nn.MSELoss(), callbacks=callbacks)
    trainer.fit((torch.ones(3, 2), torch.ones(3, 1)), max_steps=1)
    assert (tmp_path / "found").read_text() == str(sound)
