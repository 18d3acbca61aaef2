"""Random models, splits and profiles for the tests of predictions."""

from __future__ import annotations

import random
from dataclasses import replace

from distributed.interfaces.parallel_dims import ParallelDims
from distributed.planner.estimates.hardware import HardwareProfile, load_profile
from distributed.planner.estimates.numbers import ModelNumbers, model_numbers
from distributed.planner.estimates.split import Split

__all__ = ["random_numbers", "random_profile", "random_split"]

_SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv")


def random_numbers(draw: random.Random) -> ModelNumbers:
    """A small transformer, now and then a mixture of experts."""
    heads = draw.choice([4, 8, 12])
    return model_numbers(
        layers=draw.choice([2, 4, 6, 12]),
        hidden=heads * draw.choice([32, 64, 128]),
        heads=heads,
        kv_heads=draw.choice([n for n in (1, 2, 4, heads) if heads % n == 0]),
        vocabulary=draw.choice([1000, 32000]),
        sequence=draw.choice([128, 1024, 4096]),
        global_batch=draw.choice([4, 6, 8, 16, 24]),
        experts=draw.choice([1, 1, 1, 4]),
        family=draw.choice(["llama", "gpt"]),
        fused_attention=draw.random() < 0.5,
    )


def random_profile(draw: random.Random) -> HardwareProfile:
    """A shipped profile with other links, and nodes of another size."""
    profile = load_profile(draw.choice(["A100", "H100", "L40S", "CPU"]))
    changed = {
        "devices_per_node": draw.choice([1, 2, 4, 8]),
        "link_within_node": profile.link_within_node * 10 ** draw.uniform(-2, 1),
        "link_between_nodes": profile.link_between_nodes * 10 ** draw.uniform(-2, 1),
    }
    return profile.model_copy(update=changed)


def random_split(draw: random.Random, numbers: ModelNumbers) -> Split:
    """Any split, one that no backend trains included."""
    dims = ParallelDims(**{axis: draw.choice([1, 1, 2, 4]) for axis in ParallelDims.__dataclass_fields__})
    dims = replace(dims, expert=min(dims.expert, dims.data_parallel_size) if numbers.experts > 1 else 1)
    return Split(
        dims,
        "any",
        zero_stage=0 if dims.shard > 1 else draw.choice([0, 0, 1, 2, 3]),
        micro_batch=draw.choice([1, 2, 4]),
        num_micro_batches=draw.choice([1, 2, 4, 8]),
        schedule=draw.choice(_SCHEDULES) if dims.pipeline > 1 else "1f1b",
        activation_checkpointing=draw.random() < 0.5,
        offload=draw.random() < 0.3,
        precision=draw.choice(["fp32", "bf16"]),
        optimizer=draw.choice(["adamw", "sgd"]),
    )
