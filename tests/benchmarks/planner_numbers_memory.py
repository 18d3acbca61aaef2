"""Memory of a rank from numbers of a transformer, compared with that from facts of a model of these sizes.

    python -m tests.benchmarks.planner_numbers_memory

Facts are within 1 % of measured peaks (`tests.benchmarks.predicted_memory`). For each decoder and precision,
every plan on 4 GPUs is predicted both ways: a row for each kind of split with the mean and the range of the
difference. What libraries take whatever the model, and reserved segments, are equal and left out.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import distributed
from distributed.operations.planning.decoder import Decoder, next_token_loss
from distributed.planner.estimates.device_memory import GPU
from distributed.planner.estimates.ledger import MemoryParts
from distributed.planner.estimates.memory_by_numbers import rank_memory
from distributed.planner.estimates.numbers import model_numbers
from distributed.planner.estimates.split import Split

__all__ = ["DECODERS", "compared"]

DECODERS = {
    "narrow": {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 1024, "vocabulary": 32000},
    "grouped": {"layers": 4, "hidden": 1024, "heads": 16, "kv_heads": 4, "ffn": 3584, "vocabulary": 8192},
    "wide": {"layers": 4, "hidden": 1024, "heads": 16, "kv_heads": 16, "ffn": 3584, "vocabulary": 2048},
    "deep": {"layers": 12, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 1408, "vocabulary": 4096},
}
_SEQUENCES, _BATCH = {"wide": 64}, 16
_AXES = {
    "wide": ("data", "shard", "pipeline"),
    "grouped": ("data", "shard", "tensor"),
    "deep": ("data", "shard", "pipeline"),
}


def compared(name: str, precision: str, axes: Sequence[str] = ()) -> Iterator[tuple[Split, float]]:
    """(split, difference of the memory from numbers relative to that from facts) for every plan."""
    sequence = _SEQUENCES.get(name, 512)
    sizes: dict[str, Any] = {**DECODERS[name], "sequence": sequence}
    rows = _BATCH, sequence
    data = torch.utils.data.TensorDataset(
        torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
    )
    plans = distributed.plan(
        Decoder(**sizes),
        data,
        {"mixed_precision": precision},
        hardware="H100",
        num_devices=4,
        num_plans=10**6,
        axes=axes or _AXES.get(name, ("data", "shard")),
        global_batch_size=_BATCH,
        training_step=next_token_loss,
    )
    numbers = model_numbers(**sizes, global_batch=_BATCH)
    for plan in plans.rows:
        found = rank_memory(numbers, plan.split, plans.profile)
        yield plan.split, _bytes(found) / _bytes(plan.memory) - 1.0


def _bytes(memory: MemoryParts) -> int:
    return memory.total - memory.fragmentation - GPU.framework_bytes


def _kind(plan: Split) -> str:
    axes = [axis for axis in ("tensor", "pipeline", "context") if plan.dims.size(axis) > 1]
    stage = f", ZeRO {plan.zero_stage}" if plan.zero_stage else ""
    recomputed = ", activation checkpointing" if plan.activation_checkpointing else ""
    return plan.backend + "".join(f", {axis}" for axis in axes) + stage + recomputed


def main() -> int:
    """Print a row for each kind of split."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name in DECODERS:
        for precision in ("no", "bf16"):
            for split, error in compared(name, precision):
                found[_kind(split), split.precision].append(error)
    for (kind, precision), errors in sorted(found.items()):
        print(f"| {kind} | {precision} | {len(errors)} | {_row(errors)} |")
    every = [error for errors in found.values() for error in errors]
    print(f"| all | | {len(every)} | {_row(every)} |")
    return 0


def _row(errors: list[float]) -> str:
    mean = sum(map(abs, errors)) / len(errors)
    return f"{mean:.1%} | {min(errors):+.1%} to {max(errors):+.1%}"


if __name__ == "__main__":
    sys.exit(main())
