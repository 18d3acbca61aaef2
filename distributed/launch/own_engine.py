"""DeepSpeed's engine around a model, for a script with a loop of its own."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from typing import Any

from distributed.communication.environment import detect
from distributed.config import DistributedConfig
from distributed.config.load import Layer, load_layers, top_fields
from distributed.errors import UserError, hide_own_frames
from distributed.interfaces.placement import LauncherEnvironment
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.launch.own_loop import cleanup_distributed
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from distributed.system.devices import visible_gpus
from distributed.system.output import print_line

__all__ = ["DeepSpeedDilatedAttentionEngine"]

_BACKEND = "deepspeed"
_HERE = frozenset(
    {
        *("device", "seed", "communication_backend", "collective_timeout", "mixed_precision"),
        *("weight_decay", "momentum", "gradient_clipping", "optimizer_offload", "zero", "deepspeed_config"),
    }
)
"""Fields that an engine in a loop of the user's own applies."""


class DeepSpeedDilatedAttentionEngine:
    """DeepSpeed for any model in a loop of the user's own, by the name that a guide to dilated attention has.

    `Trainer` needs none of this: ``backend=deepspeed`` is the same engine under the loop of `fit`, with
    validation, checkpoints and batches that need not divide evenly.
    """

    @staticmethod
    @hide_own_frames
    def initialize_deepspeed(
        model: Any,
        train_batch_size: int | None = None,
        learning_rate: float | None = None,
        zero_stage: int | None = None,
        *,
        gradient_accumulation_steps: int | None = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        training_data: Any = None,
        **fields: Any,
    ) -> tuple[Any, Any, Any, Any]:
        """Build DeepSpeed's engine on the ranks of a launcher, or in this process alone. Collective.

        ``loss = loss_of(engine(inputs))``, ``engine.backward(loss)``, ``engine.step()`` is one micro-batch;
        the optimizer steps after `gradient_accumulation_steps` of them, with the mean over the samples of all
        ranks. The ranks start with rank 0's weights. The default group of torch is used if there is one.

        Args:
            model: a ``torch.nn.Module``, of whose weights each rank has its own. It is moved to the rank's
                device.
            train_batch_size: samples per optimizer step over all ranks. Each call of the engine takes
                ``train_batch_size / ranks / gradient_accumulation_steps`` of them, in dimension 0 of its
                first tensor.
            learning_rate: of the optimizer that is built; None is the default of `learning_rate`.
            zero_stage: 0 to 3; None is 2, or what ``deepspeed_config`` sets.
            gradient_accumulation_steps: calls of the engine for each step; None is 1.
            optimizer: as for `Trainer`; None is AdamW.
            lr_scheduler: a scheduler of `optimizer`, or a function from an optimizer to one; it steps in
                ``engine.step()``.
            training_data: a map-style dataset, for which a DataLoader of this rank's part is returned,
                shuffled by ``seed`` and the epoch of ``loader.sampler.set_epoch``.
            fields: of `DistributedConfig`: ``device``, ``weight_decay``, ``gradient_clipping``,
                ``mixed_precision="bf16"``, ``zero``, ``deepspeed_config`` and a few more.

        Returns:
            (DeepSpeed's engine, the optimizer that it steps, a DataLoader or None, the scheduler or None).

        Raises:
            UserError: a wrong value; a batch that the ranks do not divide; a model or optimizer that ZeRO
                cannot train; in calls of the engine, another number of samples.
        """
        place = _place()
        if isinstance(optimizer, str):
            fields["optimizer"], optimizer = optimizer, None
        given = {
            "global_batch_size": train_batch_size,
            "learning_rate": learning_rate,
            "zero_stage": zero_stage,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            **fields,
        }
        plan = _plan({name: value for name, value in given.items() if value is not None}, place, optimizer)
        backend = get_catalog().load_backend(plan.spec)
        if plan.joined is None or plan.joined.rank == 0:
            print_line(plan.summary(), sys.stdout)
        atexit.register(cleanup_distributed)  # also a group of the script, whose threads would outlive it
        atexit.register(backend.teardown)
        engine, stepped, scheduler = backend.engine_outside_fit(plan, model, optimizer, lr_scheduler)
        loader = None if training_data is None else _loader(training_data, plan)
        return engine, stepped, loader, scheduler


def _place() -> LauncherEnvironment | None:
    """This process among the ranks of a launcher, or of a process group that it has joined; None alone."""
    found = detect(os.environ)
    if found is not None:
        return found
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return detect(
        {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            **os.environ,
            "RANK": str(dist.get_rank()),
            "WORLD_SIZE": str(dist.get_world_size()),
        }
    )


def _plan(given: Mapping[str, Any], place: LauncherEnvironment | None, optimizer: Any) -> RunPlan:
    ranks = 1 if place is None else place.size
    _check_fields(given)
    config = load_layers(
        [Layer("argument", {"backend": _BACKEND, "launch": "auto", "num_processes": ranks, **given})]
    )
    _check_batch(config, ranks)
    facts = Facts(has_optimizer=hasattr(optimizer, "param_groups"))
    gpus = 0 if config.device == "cpu" else visible_gpus()
    return resolve(config, get_catalog(), facts, Resources(gpus), place)


def _check_fields(given: Mapping[str, Any]) -> None:
    """Raise a UserError for fields that would change nothing here."""
    own = {"global_batch_size", "learning_rate", "zero_stage", "gradient_accumulation_steps", "optimizer"}
    fields = top_fields()
    for name, value in given.items():
        top = name.partition(".")[0]
        if top in fields and top not in _HERE | own:
            raise UserError(
                "an engine in a loop of your own does not apply it",
                field=name,
                got=value,
                remedy="Leave it out, or use Trainer(model, backend='deepspeed')",
            )


def _check_batch(config: DistributedConfig, ranks: int) -> None:
    batch, micro_batches = config.global_batch_size, config.gradient_accumulation_steps or 1
    if batch is None and config.batch_size is None:
        raise UserError(
            "the number of samples per step is missing",
            field="train_batch_size",
            allowed=f"a multiple of {ranks * micro_batches}",
            remedy="Pass it, or train_batch_size in deepspeed_config",
        )
    if batch is not None and batch % (ranks * micro_batches):
        calls = f" and {micro_batches} calls for each step" if micro_batches > 1 else ""
        below = batch - batch % (ranks * micro_batches)
        nearest = " or ".join(str(n) for n in (below, below + ranks * micro_batches) if n)
        raise UserError(
            f"{batch} samples cannot be divided between {ranks} ranks{calls}",
            field="train_batch_size",
            got=batch,
            allowed=f"multiples of {ranks * micro_batches}; nearest: {nearest}",
            remedy="Set one of these, or use Trainer, whose batches need not divide evenly",
        )


def _loader(data: Any, plan: RunPlan) -> Any:
    from torch.utils.data import DataLoader, DistributedSampler

    rank, size = (plan.joined.rank, plan.joined.size) if plan.joined else (0, 1)
    sampler: Any = DistributedSampler(data, size, rank, seed=plan.config.seed, drop_last=True)
    return DataLoader(data, plan.batch.batch_size, sampler=sampler, drop_last=True)
