"""Every model of the tests of meshes on every mesh, against one process in plain PyTorch: a Markdown table.

    python -m tests.campaigns.meshes
    python -m tests.campaigns.meshes --experts
    python -m tests.campaigns.meshes --pipelines
    python -m tests.campaigns.meshes --slices

The largest difference of any weight after 10 steps of AdamW in float64: masked tokens, clipping, accumulation
of 1 and 2, a ragged last window. One pool of ranks for each number of ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from distributed_kernels.attention.language_model import DilatedLanguageModel

from distributed.errors import UserError
from distributed.interfaces.backend_spec import SCHEDULES
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.testing.rank_pool import RankPool
from tests.parallel.expert_models import EXPERT_ENTRIES
from tests.parallel.models import ENTRIES, SEQUENCES, Entry, Reference, tokens, train_plainly
from tests.parallel.test_pipeline import chain
from tests.parallel.test_tensor_parallel import GLOBAL_BATCH, MAX_NORM, STEPS, difference, trainer_of

__all__ = ["EXPERT_MESHES", "MESHES", "PIPELINES", "SLICES", "rows"]

MESHES: list[tuple[str, ParallelDims]] = [
    ("pytorch-ddp", ParallelDims(tensor=2)),
    ("fsdp", ParallelDims(tensor=2)),
    ("pytorch-ddp", ParallelDims(data=2, tensor=2)),
    ("fsdp", ParallelDims(shard=2, tensor=2)),
    ("pytorch-ddp", ParallelDims(data=4, tensor=2)),
    ("fsdp", ParallelDims(shard=4, tensor=2)),
    ("fsdp", ParallelDims(data=2, shard=2, tensor=2)),
    ("pytorch-ddp", ParallelDims(data=2, tensor=4)),
    ("fsdp", ParallelDims(shard=2, tensor=4)),
]
EXPERT_MESHES: list[tuple[Any, ...]] = [
    ("pytorch-ddp", ParallelDims(data=2, expert=2)),
    ("fsdp", ParallelDims(shard=2, expert=2)),
    ("pytorch-ddp", ParallelDims(data=4, expert=2)),
    ("fsdp", ParallelDims(shard=4, expert=2)),
    ("fsdp", ParallelDims(data=2, shard=2, expert=2)),
    ("pytorch-ddp", ParallelDims(data=4, expert=4)),
    ("pytorch-ddp", ParallelDims(data=2, tensor=2, expert=2)),
    ("fsdp", ParallelDims(shard=2, tensor=2, expert=2)),
    ("pytorch-ddp", ParallelDims(data=4, tensor=2, expert=2)),
    ("pytorch-ddp", ParallelDims(pipeline=2, data=2, expert=2), "1f1b"),
    ("pytorch-ddp", ParallelDims(data=2, context=2, expert=2)),
    ("fsdp", ParallelDims(shard=2, context=2, expert=2)),
    ("pytorch-ddp", ParallelDims(data=4, context=2, expert=2)),
    ("pytorch-ddp", ParallelDims(data=2, context=2, tensor=2, expert=2)),
    ("pytorch-ddp", ParallelDims(pipeline=2, data=2, context=2, expert=2), "1f1b"),
    ("fsdp", ParallelDims(pipeline=2, shard=2, context=2, expert=2), "1f1b"),
]
SLICES: list[tuple[Any, ...]] = [
    ("pytorch-ddp", ParallelDims(context=2)),
    ("fsdp", ParallelDims(context=2)),
    ("pytorch-ddp", ParallelDims(context=4)),
    ("pytorch-ddp", ParallelDims(data=2, context=2)),
    ("fsdp", ParallelDims(shard=2, context=2)),
    ("fsdp", ParallelDims(data=2, shard=2, context=2)),
    ("pytorch-ddp", ParallelDims(context=2, tensor=2)),
    ("pytorch-ddp", ParallelDims(data=2, context=2, tensor=2)),
    ("fsdp", ParallelDims(shard=2, context=2, tensor=2)),
    *(("pytorch-ddp", ParallelDims(pipeline=2, context=2), schedule) for schedule in sorted(SCHEDULES)),
    ("fsdp", ParallelDims(pipeline=2, context=2), "1f1b"),
    ("pytorch-ddp", ParallelDims(pipeline=4, context=2), "1f1b"),
    ("pytorch-ddp", ParallelDims(pipeline=2, data=2, context=2), "1f1b"),
    ("fsdp", ParallelDims(pipeline=2, shard=2, context=2), "1f1b"),
    ("pytorch-ddp", ParallelDims(pipeline=2, context=2, tensor=2), "1f1b"),
]
PIPELINES: list[tuple[str, ParallelDims, str]] = [
    *(("pytorch-ddp", ParallelDims(pipeline=2), schedule) for schedule in sorted(SCHEDULES)),
    ("fsdp", ParallelDims(pipeline=2), "1f1b"),
    ("pytorch-ddp", ParallelDims(pipeline=4), "gpipe"),
    ("pytorch-ddp", ParallelDims(pipeline=4), "1f1b"),
    ("pytorch-ddp", ParallelDims(pipeline=2, data=2), "1f1b"),
    ("pytorch-ddp", ParallelDims(pipeline=2, data=2), "zbv"),
    ("fsdp", ParallelDims(pipeline=2, shard=2), "1f1b"),
    ("pytorch-ddp", ParallelDims(pipeline=2, tensor=2), "1f1b"),
    ("pytorch-ddp", ParallelDims(pipeline=2, tensor=2), "zbv"),
    ("pytorch-ddp", ParallelDims(pipeline=2, data=2, tensor=2), "1f1b"),
    ("fsdp", ParallelDims(pipeline=2, shard=2, tensor=2), "1f1b"),
]
CHAINS = {name: entry for name, entry in ENTRIES.items() if name != "bert with a plan"}
MODELS: dict[str, Entry] = {
    **ENTRIES,
    "dilated, slices": Entry(ENTRIES["dilated"].build, dict(DilatedLanguageModel.sequence_plan)),
}
SLICED = {**SEQUENCES, "chain": Entry(chain), "mixtral": EXPERT_ENTRIES["mixtral"]}
HEADS = {"llama": 2, "llama tied": 2, "encoder": 32}
"""The largest tensor axis of a model, where that is below 4."""
_CANNOT = ("parallel.pipeline", "parallel.tensor")
"""Fields of the errors for a model that has fewer blocks than stages, or no layer that can be cut."""
DATA = tokens(21)


def rows(
    models: dict[str, Entry], meshes: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[str, list[float | None]]]:
    """(mesh, distance of each model; None where the mesh is refused for the model)

    Args:
        meshes: (backend, axes), and the schedule of a pipeline.
    """
    references: dict[str, Reference] = {}
    for name, entry in models.items():
        options: dict[str, Any] = {"global_batch_size": GLOBAL_BATCH, "steps": STEPS, "max_norm": MAX_NORM}
        references[name] = train_plainly(entry.build(), DATA, **options)
    with closing(RankPool(timeout=300.0)) as pool:
        for backend, dims, *schedule in meshes:
            place = (backend, dims, *schedule)
            found = [_distance(name, models[name], references[name], place, pool) for name in models]
            yield f"`{backend}` {dims}{''.join(f', {name}' for name in schedule)}", found


def _distance(
    name: str, entry: Entry, reference: Reference, place: tuple[Any, ...], pool: RankPool
) -> float | None:
    backend, dims, *schedule = place
    if dims.tensor > HEADS.get(name, 4):
        return None
    axes = {axis: dims.size(axis) for axis in ("data", "tensor", "expert", "pipeline", "context")}
    found = []
    for accumulation in (1, 2):
        if GLOBAL_BATCH % (accumulation * dims.data_parallel_size):
            continue
        model = entry.build()
        mesh = {**axes, "tensor_plan": entry.plan, **({"schedule": schedule[0]} if schedule else {})}
        given = {"gradient_accumulation_steps": accumulation}
        try:
            trainer_of(model, backend, dims.world_size, pool, mesh, **given).fit(DATA, max_steps=STEPS)
        except UserError as error:
            if error.field not in _CANNOT:
                raise
            return None
        found.append(difference(model, reference.weights))
    return max(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", choices=[*MODELS, *EXPERT_ENTRIES, *SLICED])
    parser.add_argument("--experts", action="store_true", help="models and meshes with divided experts")
    parser.add_argument("--pipelines", action="store_true", help="schedules and meshes with stages")
    parser.add_argument("--slices", action="store_true", help="models and meshes with slices of sequences")
    given = parser.parse_args()
    every: dict[str, Entry]
    meshes: Sequence[tuple[Any, ...]]
    every, meshes = (EXPERT_ENTRIES, EXPERT_MESHES) if given.experts else (MODELS, MESHES)
    if given.pipelines:
        every, meshes = CHAINS, PIPELINES
    if given.slices:
        every, meshes = SLICED, SLICES
    models = {name: entry for name, entry in every.items() if given.models is None or name in given.models}
    print(f"| mesh | {' | '.join(models)} |\n|{' --- |' * (len(models) + 1)}", flush=True)
    for mesh, distances in rows(models, meshes):
        cells = ["" if off is None else f"{off:.1e}" for off in distances]
        print(f"| {mesh} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
