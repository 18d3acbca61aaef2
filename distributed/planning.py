"""plan: which split of a model over the ranks is fastest and fits, before a rank starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.config import DistributedConfig, Layer
from distributed.errors import UserError, hide_own_frames
from distributed.planner.estimates.hardware import HardwareProfile
from distributed.planner.estimates.numbers import ModelNumbers

if TYPE_CHECKING:
    from distributed.operations.planning.plans import Plans

__all__ = ["plan"]


@hide_own_frames
def plan(
    model: Any,
    train_loader: Any = None,
    config: DistributedConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    hardware: str | Path | HardwareProfile | None = None,
    num_devices: int | None = None,
    num_plans: int = 10,
    codecs: Collection[str] = (),
    optimizer: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    training_step: Callable[..., Any] | None = None,
    **fields: Any,
) -> Plans:
    """The fastest ways to train `model` that fit, without starting a rank.

    Args:
        model: as the `Trainer` takes it; or the numbers of a transformer: a mapping with the arguments of
            `distributed.planner.estimates.numbers.model_numbers`, such as ``parameters`` or ``layers`` and
            ``hidden``.
        train_loader: as `Trainer.fit` takes it, for a model object. Its first samples are read.
        config: where to start from: precision, optimizer and the global batch are kept, and how the ranks
            divide model and batch is chosen.
        hardware: name of a shipped profile, path of a file such as `calibrate` writes, or a profile. None:
            ``hardware.yaml`` of the working directory, else the profile of this machine's GPU, else ``CPU``.
        num_devices: number of devices, each with one rank. None: the configuration's number of ranks, else
            those of one node of the hardware.
        num_plans: number of plans to list.
        codecs: gradient codecs to try. They change gradients, so that none is tried by default.
        optimizer: as the `Trainer` takes it.
        loss_fn: as the `Trainer` takes it.
        training_step: as the `Trainer` takes it.
        fields: fields of the configuration that a plan has to have, e.g. ``backend="fsdp"``,
            ``global_batch_size=64`` or ``parallel={"tensor": 2}``.

    Raises:
        UserError: a wrong value; a global batch that no split divides; a model larger than the cluster, with
            the smallest cluster that fits; a model whose control flow depends on values.
    """
    from distributed.trainer import Trainer, config_layers

    base, asked = config_layers(config), Layer("argument", fields)
    if isinstance(model, Mapping | ModelNumbers):
        from distributed.operations.planning.plan_numbers import plan_numbers

        _check_no_data(train_loader)
        return plan_numbers(model, base, [asked], hardware, num_devices, num_plans, codecs)
    from distributed.operations.planning.plan_task import plan_task

    trainer = Trainer(
        model, config, optimizer=optimizer, loss_fn=loss_fn, training_step=training_step, **fields
    )
    task = trainer.task_of(trainer.config, train_loader, None)
    facts = trainer.facts_of(task)
    return plan_task(
        task, trainer.framework, facts, trainer.config, [asked], hardware, num_devices, num_plans, codecs
    )


def _check_no_data(train_loader: Any) -> None:
    if train_loader is not None:
        raise UserError(
            "numbers of a transformer were given together with data",
            field="train_loader",
            got=type(train_loader).__name__,
            allowed="None beside numbers",
            remedy="Leave it out, or give the model object",
        )
