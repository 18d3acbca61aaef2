"""Predicted and measured peaks of the same runs, side by side."""

from __future__ import annotations

import json
import sys
from functools import cache, partial
from typing import Any

from distributed.config.compression import CompressionSection
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.operations.planning.codec_trace import ExchangeOptions
from distributed.operations.planning.collect_facts import facts_source
from distributed.planner.estimates.device_memory import MAPPED_CPU, DeviceMemory
from distributed.planner.estimates.memory import predict_memory
from distributed.planner.estimates.model_facts import FactsSource
from distributed.planner.estimates.split import Split
from tests.support.commands import run
from tests.support.small_transformers import MODELS, as_pair

__all__ = [
    "AGAIN",
    "ALL",
    "CODECS",
    "CP",
    "DDP",
    "DECIDING",
    "GPIPE",
    "INTERLEAVED",
    "LOOPED_BFS",
    "MESHES",
    "ONE_F_ONE_B",
    "PAIRS",
    "TP",
    "DUAL_PIPE_V",
    "FSDP",
    "FULL",
    "SERIAL",
    "SHARDED_STAGES",
    "SMALL_BUCKETS",
    "ZBV",
    "ZERO",
    "ZERO_BUBBLE",
    "compare",
    "predicted",
    "source_of",
]

SAMPLES = 4
"""Of a micro-batch."""

AGAIN = {"gradient_accumulation_steps": 3}
FULL = {"activation_checkpointing": "full"}
DDP: dict[str, Any] = {"backend": "pytorch-ddp", "ranks": 2}
FSDP: dict[str, Any] = {"backend": "fsdp", "ranks": 2}
ZERO: dict[str, Any] = {"backend": "deepspeed", "ranks": 2}
SERIAL: dict[str, Any] = {"backend": "serial", "ranks": 1}

PAIRS = {"pairs": True}
"""Batches (tokens, targets), of which ranks can hold slices."""
TP = DDP | {"parallel": {"tensor": 2}}
CP = DDP | PAIRS | {"parallel": {"context": 2}}
GPIPE = DDP | {"gradient_accumulation_steps": 4, "parallel": {"pipeline": 2, "schedule": "gpipe"}}
ONE_F_ONE_B = DDP | {"gradient_accumulation_steps": 4, "parallel": {"pipeline": 2, "schedule": "1f1b"}}
INTERLEAVED = DDP | {
    "gradient_accumulation_steps": 4,
    "parallel": {"pipeline": 2, "schedule": "interleaved-1f1b"},
}
ZBV = DDP | {"gradient_accumulation_steps": 4, "parallel": {"pipeline": 2, "schedule": "zbv"}}
ZERO_BUBBLE = DDP | {
    "gradient_accumulation_steps": 4,
    "parallel": {"pipeline": 2, "schedule": "interleaved-zero-bubble"},
}
DUAL_PIPE_V = DDP | {"gradient_accumulation_steps": 4, "parallel": {"pipeline": 2, "schedule": "dualpipev"}}
LOOPED_BFS = DDP | {"gradient_accumulation_steps": 4, "parallel": {"pipeline": 2, "schedule": "looped-bfs"}}

CODECS: list[dict[str, Any]] = [
    DDP | {"compression": {"codec": codec}} for codec in ("fp16", "int8", "top-k", "random-k", "powersgd")
]
SMALL_BUCKETS = {"bucket_cap_mb": 4}

SHARDED_STAGES: list[dict[str, Any]] = [
    FSDP
    | {"ranks": 4, "gradient_accumulation_steps": 4}
    | {"parallel": {"pipeline": 2, "shard": 2, "schedule": schedule}}
    for schedule in ("interleaved-1f1b", "looped-bfs")
]

MESHES: list[dict[str, Any]] = [
    TP,
    CP,
    GPIPE,
    ONE_F_ONE_B,
    INTERLEAVED,
    LOOPED_BFS,
    ZERO_BUBBLE,
    ZBV,
    DUAL_PIPE_V,
    FSDP | {"ranks": 4, "parallel": {"data": 2, "shard": 2}},
    FSDP | {"ranks": 4, "parallel": {"tensor": 2, "shard": 2}},
    FSDP | PAIRS | {"ranks": 4, "parallel": {"context": 2, "shard": 2}},
    DDP | {"ranks": 4, "parallel": {"tensor": 2, "data": 2}},
    ONE_F_ONE_B | {"ranks": 4, "parallel": {"pipeline": 2, "data": 2}},
    *SHARDED_STAGES,
]
"""Ranks that share a model, or hold copies of shards."""

ALL: list[dict[str, Any]] = [
    DDP,
    DDP | AGAIN,
    FSDP,
    FSDP | AGAIN,
    FSDP | FULL,
    ZERO | {"zero_stage": 0},
    ZERO | {"zero_stage": 1},
    ZERO | {"zero_stage": 1} | AGAIN,
    ZERO | {"zero_stage": 2},
    ZERO | {"zero_stage": 2} | AGAIN,
    ZERO | {"zero_stage": 3},
    ZERO | {"zero_stage": 3} | AGAIN,
    SERIAL | FULL,
    SERIAL,
    SERIAL | AGAIN,
]
"""Those of serial come last in one process, with rising peaks: its maximum never falls."""

DECIDING = [
    DDP,
    FSDP,
    FSDP | FULL,
    *(ZERO | {"zero_stage": stage} for stage in (1, 2, 3)),
    TP,
    CP,
    GPIPE,
    ONE_F_ONE_B,
    INTERLEAVED,
    LOOPED_BFS,
    ZERO_BUBBLE,
    ZBV,
    DUAL_PIPE_V,
    SERIAL,
]
"""What models that were kept aside are measured with."""


def predicted(facts: FactsSource, entry: dict[str, Any], device: DeviceMemory = MAPPED_CPU) -> int:
    """Predicted bytes of the rank that needs most."""
    axis = {"fsdp": "shard"}.get(entry["backend"], "data")
    parallel = dict(entry.get("parallel", {axis: entry["ranks"]}))
    schedule = parallel.pop("schedule", "1f1b")
    pieces = parallel.pop("num_microbatches", 1)
    split = Split(
        ParallelDims(**parallel),
        entry["backend"],
        zero_stage=entry.get("zero_stage", 0),
        micro_batch=SAMPLES // pieces,
        num_micro_batches=entry.get("gradient_accumulation_steps", 1) * pieces,
        schedule=schedule,
        activation_checkpointing="activation_checkpointing" in entry,
        codec=entry.get("compression", {}).get("codec", "none"),
    )
    return predict_memory(facts, split, device).total


Gradients = tuple[CompressionSection, bool, float]
"""Section of the codec; whether steps may be skipped; MiB of a bucket."""


def _gradients(entry: dict[str, Any]) -> Gradients:
    section = CompressionSection(**entry.get("compression", {}))
    return section, "on_nan" in entry, entry.get("bucket_cap_mb", 25.0)


def source_of(name: str, entry: dict[str, Any], device: str = "cpu") -> FactsSource:
    """Facts of a model as a run of `entry` has it."""
    return _source(name, "pairs" in entry, _gradients(entry), device)


def _source(name: str, pairs: bool, gradients: Gradients, device: str = "cpu") -> FactsSource:
    build, batch = MODELS[name]
    model, samples = build(), batch(SAMPLES)
    section, revocable, cap = gradients
    options = ExchangeOptions(section, revocable)
    if not pairs:
        return facts_source(model, samples, options, bucket_cap_mb=cap, device=device)
    model.config.use_cache = False
    return facts_source(model, as_pair(samples), options, bucket_cap_mb=cap, device=device)


def compare(name: str, runs: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int, int]]:
    """(run, measured bytes, predicted bytes) of each of `runs` of a model."""
    source = cache(partial(_source, name))
    arguments = json.dumps([{"name": name, "samples": SAMPLES, **entry} for entry in runs])
    command = [sys.executable, "-m", "tests.support.measure_memory", arguments]
    done = run(command, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    return [
        (entry, truth, predicted(source("pairs" in entry, _gradients(entry)), entry))
        for entry, truth in zip(runs, measured, strict=True)
    ]
