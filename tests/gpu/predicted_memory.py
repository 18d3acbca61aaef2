"""Predicted peaks of memory beside those that the allocator of a GPU counted."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.gpu.checks import Measured, Settings, Skipped
from tests.gpu.product import CUDA, MODEL_AXES, Callback, ParallelDims, Split, collect_facts, predict_memory
from tests.gpu.ranks import number_of_ranks, trainer
from tests.gpu.speed import BATCH, WIDTH, peak_memory, stack

__all__ = ["error", "of_model"]

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


# -- small models of transformers --------------------------------------------------------

_STEPS = 3


def of_model(setting: Settings, model: str, run: str) -> Iterator[Measured]:
    """Distance of the prediction from the peak of the rank that needs most, as a share of the peak.

    Args:
        model: of `tests.support.small_transformers`.
        run: of `_runs`.
    """
    from tests.support.predicted_memory import predicted, source_of

    entry = _runs()[run]
    if "parallel" in entry and setting.num_gpus < entry["ranks"]:
        raise Skipped(f"needs {entry['ranks']} GPUs: ranks that share a model do not do so over gloo")
    truth = _measured(setting, model, entry)
    facts = source_of(model, entry, device="cuda")
    found = predicted(facts, entry, CUDA)
    yield Measured(abs(found / truth - 1.0), f"{found / 2**20:,.2f} MiB predicted, {truth / 2**20:,.2f} MiB")


def _runs() -> dict[str, dict[str, Any]]:
    from tests.support import predicted_memory as runs

    return {
        "serial": runs.SERIAL,
        "ddp": runs.DDP,
        "fsdp": runs.FSDP,
        "fsdp-full": runs.FSDP | runs.FULL,
        **{f"zero-{stage}": runs.ZERO | {"zero_stage": stage} for stage in (1, 2, 3)},
        "tensor": runs.TP,
        "context": runs.CP,
        "gpipe": runs.GPIPE,
        "1f1b": runs.ONE_F_ONE_B,
    }


class PeakOfEachRank(Callback):
    """Writes the highest allocation of each rank, in bytes."""

    all_ranks = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_run_start(self, context: Any) -> None:
        torch.cuda.reset_peak_memory_stats()

    def on_run_end(self, context: Any, status: str) -> None:
        (self.folder / f"{context.world.rank}").write_text(str(torch.cuda.max_memory_allocated()))


def _measured(setting: Settings, name: str, entry: dict[str, Any]) -> int:
    from tests.support.predicted_memory import SAMPLES
    from tests.support.small_transformers import MODELS, Pairs, Samples

    torch.manual_seed(0)
    build, batch = MODELS[name]
    model, fields = build(), dict(entry)
    backend, ranks, pairs = fields.pop("backend"), fields.pop("ranks"), fields.pop("pairs", False)
    model.config.use_cache = not pairs and model.config.use_cache
    copies = ranks // prod(fields.get("parallel", {}).get(axis, 1) for axis in MODEL_AXES)
    window = SAMPLES * copies * fields.get("gradient_accumulation_steps", 1)
    fields |= {"batch_size": SAMPLES, "max_steps": _STEPS, "optimizer": "adamw"}
    transport = "default" if backend == "serial" or setting.num_gpus >= ranks else "gloo"
    ours = trainer(setting, model, backend, transport, **fields, num_processes=ranks)
    folder = Path(tempfile.mkdtemp(dir=setting.folder))  # other checks run beside this one
    ours.callbacks = [PeakOfEachRank(folder)]
    data = batch(window * _STEPS)
    ours.fit(Pairs(data) if pairs else Samples(data))
    return max(int(path.read_text()) for path in folder.iterdir())
