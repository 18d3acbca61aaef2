"""One rank of ``bench pipeline --measure``: stages that sleep, under the schedule of a real pipeline."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.parallel.pipeline_layout import TensorForm
from distributed.parallel.pipeline_schedule import Schedule
from distributed.planner.pipeline import PipelineShape

__all__ = ["main"]

Record = list[tuple[str, int, int, float, float]]


class _Sleep(torch.autograd.Function):
    """Takes `unit` seconds forward and twice as long backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: float, record: Record, stage: int, micro: int) -> Tensor:
        ctx.task = unit, record, stage, micro
        _sleep("F", unit, record, stage, micro)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        unit, record, stage, micro = ctx.task
        _sleep("B", 2 * unit, record, stage, micro)
        return gradients[0], None, None, None, None


def _sleep(kind: str, seconds: float, record: Record, stage: int, micro: int) -> None:
    start = time.time()
    time.sleep(seconds)
    record.append((kind, stage, micro, start, time.time()))


def main(text: str) -> None:
    """Run two steps, and write the actions of the second.

    Args:
        text: JSON: shape, rank, seconds of a forward pass, folder.
    """
    task = json.loads(text)
    shape, rank, unit, folder = (
        PipelineShape(**task["shape"]),
        task["rank"],
        task["unit"],
        Path(task["folder"]),
    )
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=shape.num_ranks
    )
    record: Record = []
    weight = nn.Parameter(torch.ones(1))

    def forward(stage: int, micro: int, received: Tensor | None) -> Tensor:
        x = (torch.ones(1, 8) if received is None else received) * weight
        slept: Tensor = _Sleep.apply(x, unit, record, stage, micro)  # type: ignore[no-untyped-call]
        return slept.sum() if stage == shape.num_stages - 1 else slept

    forms = [TensorForm((1, 8), torch.float32, 0)] * (shape.num_stages - 1)
    schedule = Schedule(
        shape, rank, dist.group.WORLD, "cpu", forms, forward, lambda stage: [weight], lambda *action: None
    )
    schedule.run()  # connects the ranks
    dist.barrier()
    record.clear()
    schedule.run()
    (folder / f"{rank}.json").write_text(json.dumps(record))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
