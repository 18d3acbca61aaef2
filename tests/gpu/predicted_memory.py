"""Predicted peaks of memory beside those that the allocator of a GPU counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.gpu.checks import Measured, Settings
from tests.gpu.product import CUDA, ParallelDims, Split, collect_facts, predict_memory
from tests.gpu.ranks import number_of_ranks
from tests.gpu.speed import BATCH, WIDTH, peak_memory, stack

__all__ = ["error"]

_DIVIDED: dict[str, tuple[str, int]] = {"fsdp": ("shard", 0), "deepspeed": ("data", 2)}
"""Backend -> the axis of its ranks and the stage of ZeRO; other backends have copies along ``data``."""


def error(setting: Settings, backend: str) -> Iterator[Measured]:
    """Distance of the prediction from the peak of `peak_memory`, as a share of the peak."""
    (measured,) = peak_memory(setting, backend)
    transport = "default" if setting.num_gpus > 1 else "gloo"
    axis, stage = _DIVIDED.get(backend, ("data", 0))
    dims = ParallelDims(**{axis: number_of_ranks(setting, backend, transport)})
    split = Split(dims, backend, zero_stage=stage, micro_batch=BATCH)
    model: nn.Module = stack()
    batch: Any = torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, dtype=torch.long)
    predicted = predict_memory(collect_facts(model, batch, device="cuda"), split, CUDA).total / 2**20
    detail = f"{predicted:,.1f} MiB predicted, {measured.value:,.1f} MiB measured"
    yield Measured(abs(predicted / measured.value - 1.0), detail)
