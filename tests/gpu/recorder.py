"""torch's Flight Recorder: what a report of a hang says of real collectives."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.gpu.checks import Measured, Settings
from tests.gpu.product import FlightRecord, Trainer, WorkerError, dump_recorder, parse_dump

__all__ = ["hang", "one_rank"]

_NUMEL = 2**18
_NAME = "all_reduce #3 of group 'experts' (1.0 MiB float32)"


class Skips(nn.Module):
    """Reduces 1 MiB in each forward pass; rank 1 leaves that out in the third and never returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 1:
            self.group: Any = dist.new_group(list(range(dist.get_world_size())), group_desc="experts")
        if self.calls == 3 and os.environ["RANK"] == "1":
            threading.Event().wait()
        dist.all_reduce(torch.ones(_NUMEL, device=x.device), group=self.group)
        found: Tensor = self.layer(x)
        return found


def one_rank(setting: Settings) -> Iterator[Measured]:
    """NCCL's own recorder, in a group of one rank: what differs between its dump and what was called."""
    device = torch.device("cuda", 0)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{setting.scratch}/store",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=60),
        device_id=device,
    )
    try:
        dist.all_reduce(torch.ones(_NUMEL, device=device))
        dist.broadcast(torch.ones(7, dtype=torch.int64, device=device), 0)
        torch.cuda.synchronize()
        record: FlightRecord = parse_dump(dump_recorder(), 0)
    finally:
        dist.destroy_process_group()
    called = [(one.operation, one.inputs, one.dtypes, one.state) for one in record.collectives]
    expected = [
        ("all_reduce", ((_NUMEL,),), ("Float",), "completed"),
        ("broadcast", ((7,),), ("Long",), "completed"),
    ]
    differ = sum(one not in called for one in expected)
    yield Measured(float(differ), f"{record.problem or called}")


def hang(setting: Settings) -> Iterator[Measured]:
    """A rank that leaves a collective out, over NCCL with several GPUs and otherwise over gloo."""
    nccl = setting.num_gpus >= 2
    transport = {} if nccl else {"communication_backend": "gloo"}
    trainer = Trainer(
        Skips(),
        backend="pytorch-ddp",
        device=setting.device,
        num_processes=2,
        batch_size=4,
        hang_timeout=10.0,
        stall_report=None,
        tracking={"progress": "off"},
        **transport,
    )
    try:
        trainer.fit((torch.ones(64, 4), torch.zeros(64, dtype=torch.long)), epochs=1)
        text = "the run did not hang"
    except WorkerError as error:
        text = error.summary
    expected = (f"rank 0: {_NAME}", f"Rank 1 has not called {_NAME}, which rank 0 has called.")
    missing = [part for part in expected if part not in text]
    yield Measured(float(len(missing)), f"{'nccl' if nccl else 'gloo'}: {text if missing else 'named'}")
