"""The feeds of one rank: its share of the training and of the validation data."""

from __future__ import annotations

from typing import Any

from distributed.data import Feed
from distributed.interfaces.backend import Backend
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.task import Task


def train_feed(plan: RunPlan, task: Task, backend: Backend) -> Feed | None:
    """The training data of this rank; None when the caller brings each batch."""
    if task.train_data is None:
        return None
    batch = plan.batch
    feed = _make_feed(plan, task.train_data, backend, batch.batch_size, batch.gradient_accumulation_steps)
    feed.live = bool(task.run_state)
    feed.continues_fit = feed.live or task.state_dir is not None
    return feed


def val_feeds(plan: RunPlan, task: Task, backend: Backend) -> dict[str, Feed]:
    """The validation data of this rank by the names of the sets."""
    return {
        name: _make_feed(plan, source, backend, source.batch_size or plan.val_batch_size, 1, evaluation=True)
        for name, source in task.val_data.items()
    }


def _make_feed(
    plan: RunPlan, source: Any, backend: Backend, batch_size: int, accumulation: int, evaluation: bool = False
) -> Feed:
    config, world = plan.config, backend.world
    return Feed(
        source,
        batch_size * world.num_replicas,
        accumulation,
        rank=world.data_parallel_rank,
        size=world.data_parallel_size,
        seed=config.seed,
        broadcast=backend.broadcast_object,
        total=lambda value: int(backend.all_reduce([value])[0]) // world.model_parallel_size,
        gather=backend.gather_objects if world.size > 1 and config.data.verify else None,
        drop_last=config.data.drop_last,
        per_sample_rng=config.data.per_sample_rng,
        evaluation=evaluation,
        repeats=config.deterministic and not evaluation,
        keeps_size=not evaluation
        and (config.global_batch_size is not None or config.lr_scaling.rule != "none"),
        pin=config.data.prefetch_to_device and world.device.startswith("cuda"),
    )
