"""Bytes that real ranks write to their sockets in a step, beside those that a codec states."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import Callback
from distributed.config.compression import CompressionSection
from distributed.interfaces.callback import Context
from distributed.interfaces.codec import DENSE, dense_bytes
from distributed.registry.catalog import get_catalog
from distributed.testing.rank_pool import RankPool
from tests.communication.codec_mutants import MUTANTS, SendsZeros, StatesHalf
from tests.support.training import make_trainer

OPTIONS: dict[str, dict[str, Any]] = {
    DENSE: {},
    "fp16": {},
    "bf16": {},
    "int8": {},
    "fp8": {},
    "top-k": {"ratio": 0.02},
    "random-k": {"ratio": 0.05},
    "powersgd": {"rank": 16},
}
WIDTH = 1024
"""Of two square layers: about 2 million parameters, beside which what else a step sends is small."""
FIRST, LAST = 2, 5
"""The bytes between the ends of these steps are counted; connections are open before."""
TOLERANCE = 0.02


@pytest.fixture(scope="module")
def own_ranks() -> Iterator[RankPool]:
    """Ranks in which no other test has run: Horovod's threads send on, as long as a process lives."""
    with closing(RankPool()) as pool:
        yield pool


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def written() -> int:
    """Bytes that this process has given to its open TCP sockets.

    What it writes to files, such as the bytecode of a module at its first import, does not count.
    """
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since, or of another family
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                total += sent_through(int(name))
    return total


def sent_through(descriptor: int) -> int:
    """Bytes given to a TCP socket, each counted once: the kernel repeats some if a receiver has to wait."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
    # notsent_bytes, bytes_sent and bytes_retrans of struct tcp_info (linux/tcp.h)
    (waiting,), (sent, repeated) = struct.unpack_from("=I", info, 144), struct.unpack_from("=QQ", info, 200)
    return int(waiting + sent - repeated)


class CountBytes(Callback):
    """Write the bytes that each rank sent in a step to a file."""

    all_ranks = True

    def __init__(self, path: Path) -> None:
        self.path, self.before = path, 0

    def on_step_end(self, context: Context) -> None:
        if context.progress.step == FIRST:
            self.before = written()
        if context.progress.step == LAST:
            sent = (written() - self.before) / (LAST - FIRST)
            ranks = context.backend.gather_objects(sent)
            if context.world.rank == 0:
                self.path.write_text(json.dumps(ranks), encoding="utf-8")


def bytes_per_step(rank_pool: RankPool, codec: str, ranks: int, folder: Path) -> list[float]:
    """What each rank sends in one step."""
    path = folder / "sent.json"
    trainer = make_trainer(
        build(),
        ranks,
        rank_pool,
        callbacks=[CountBytes(path)],
        compression={"codec": codec, **OPTIONS.get(codec, {})},
        loss_fn=nn.MSELoss(),
        batch_size=1,
        optimizer="sgd",
        log_every_n_steps=LAST + 1,
        return_weights="none",
    )
    data: tuple[Tensor, Tensor] = (torch.ones(LAST * ranks, WIDTH), torch.ones(LAST * ranks, WIDTH))
    trainer.fit(data, max_steps=LAST)
    found: list[float] = json.loads(path.read_text(encoding="utf-8"))
    return found


def stated(codec: str, ranks: int) -> float:
    """The sum of `wire_bytes` over the parameters."""
    options = CompressionSection(codec=codec, **OPTIONS.get(codec, {}))
    shapes = [tuple(parameter.shape) for parameter in build().parameters()]
    if codec == DENSE:
        return sum(dense_bytes(shape, 4, ranks) for shape in shapes)
    spec = get_catalog().codecs[codec]
    return sum(spec.wire_bytes(shape, 4, options, ranks) for shape in shapes)


def test_all_codecs_are_counted() -> None:
    assert {DENSE, *get_catalog().codecs} == {*OPTIONS}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("codec", OPTIONS)
def test_ranks_send_what_is_stated(own_ranks: RankPool, codec: str, ranks: int, tmp_path: Path) -> None:
    expected = stated(codec, ranks)
    for sent in bytes_per_step(own_ranks, codec, ranks, tmp_path):
        assert sent == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize(("mutant", "off"), [(StatesHalf, 2.0), (SendsZeros, 25.0)])
def test_other_bytes_than_stated_show(
    own_ranks: RankPool, mutant: type[Any], off: float, tmp_path: Path
) -> None:
    """A codec that states half; and one that sets what it does not send to zero, and sends that."""
    (row,) = [one for one in MUTANTS if one.kind is mutant]
    codecs = get_catalog().codecs
    codecs[row.name] = row.spec
    try:
        expected = stated(row.name, 2)
        for sent in bytes_per_step(own_ranks, row.name, 2, tmp_path):
            assert sent > off * expected
    finally:
        del codecs[row.name]
