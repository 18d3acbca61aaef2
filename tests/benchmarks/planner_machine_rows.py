"""Configurations of which predicted and measured step times are compared on this machine.

`BUILD` are those with which the first form of the model was chosen. `TEST` have other models, sizes and
divisions; docs/predicted-time.md names the forms that were chosen after they had been measured.
"""

from __future__ import annotations

from typing import Any

from distributed.interfaces.parallel_dims import ParallelDims
from distributed.planner.estimates.split import Split
from tests.support.timed_models import TimedRun

__all__ = ["BUILD", "TEST"]


def _row(
    kind: str, size: tuple[int, ...], backend: str, micro: int, number: int = 1, **given: Any
) -> TimedRun:
    dims = ParallelDims(**{axis: given.pop(axis) for axis in list(given) if axis in vars(ParallelDims())})
    split = Split(dims, backend, micro_batch=micro, num_micro_batches=number, **given)
    divided = " ".join(f"{axis}={size}" for axis, size in vars(dims).items() if size > 1)
    rest = " recomputed" if split.activation_checkpointing else ""
    schedule = f" {split.schedule}" if dims.pipeline > 1 else ""
    name = f"{kind}{list(size)} {backend} {divided or 'one rank'}{schedule} {number} x {micro}{rest}"
    return TimedRun(name, kind, size, split)


_AGAIN = {"activation_checkpointing": True}
_SMALL = (256, 3, 96, 1024)

BUILD = (
    _row("llama", _SMALL, "serial", 4),
    _row("llama", _SMALL, "pytorch-ddp", 4, data=2),
    _row("llama", _SMALL, "pytorch-ddp", 2, 2, data=4),
    _row("llama", _SMALL, "fsdp", 4, shard=2),
    _row("llama", _SMALL, "fsdp", 4, 2, shard=2, **_AGAIN),
    _row("llama", _SMALL, "fsdp", 4, shard=4),
    _row("llama", _SMALL, "fsdp", 4, data=2, shard=2),
    _row("llama", _SMALL, "pytorch-ddp", 4, tensor=2),
    _row("llama", _SMALL, "pytorch-ddp", 4, context=2),
    _row("llama", _SMALL, "pytorch-ddp", 2, 4, pipeline=2),
    _row("convnet", (48, 3, 24), "serial", 16),
    _row("convnet", (48, 3, 24), "pytorch-ddp", 16, data=2),
    _row("mlp", (768, 5), "serial", 128),
    _row("mlp", (768, 5), "pytorch-ddp", 128, data=2),
    _row("mlp", (768, 5), "fsdp", 128, shard=2),
)

_LLAMA, _LONG = (384, 4, 128, 2048), (256, 5, 256, 512)
_WIDE = (512, 3, 96, 1024)
_CONV, _MLP = (64, 4, 32), (1024, 6)

TEST = (
    _row("llama", _LLAMA, "serial", 2, 2),
    _row("llama", _LLAMA, "pytorch-ddp", 2, data=2),
    _row("llama", _LLAMA, "pytorch-ddp", 2, 3, data=2),
    _row("llama", _LLAMA, "pytorch-ddp", 4, data=2, **_AGAIN),
    _row("llama", _LONG, "pytorch-ddp", 2, data=4),
    _row("llama", _LLAMA, "fsdp", 4, shard=2),
    _row("llama", _LONG, "fsdp", 4, 2, shard=2),
    _row("llama", _LONG, "fsdp", 4, shard=4, **_AGAIN),
    _row("llama", _LLAMA, "fsdp", 2, data=2, shard=2),
    _row("llama", _WIDE, "pytorch-ddp", 4, tensor=2),
    _row("llama", _LONG, "pytorch-ddp", 4, data=2, tensor=2),
    _row("llama", _LONG, "pytorch-ddp", 4, context=2),
    _row("llama", _LLAMA, "pytorch-ddp", 2, 4, pipeline=2),
    _row("llama", _LONG, "pytorch-ddp", 2, 4, data=2, pipeline=2),
    _row("convnet", _CONV, "serial", 32),
    _row("convnet", _CONV, "pytorch-ddp", 16, 2, data=2),
    _row("convnet", _CONV, "fsdp", 16, shard=4),
    _row("mlp", _MLP, "serial", 256),
    _row("mlp", _MLP, "pytorch-ddp", 256, data=2),
    _row("mlp", _MLP, "fsdp", 256, shard=2),
)
