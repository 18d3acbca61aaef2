"""Plans for the model object of a task."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from distributed.config import DistributedConfig, Layer
from distributed.config.load import as_layers
from distributed.interfaces.framework import Framework
from distributed.interfaces.plan import Facts
from distributed.interfaces.task import Task
from distributed.operations.planning.default_hardware import profile_of
from distributed.operations.planning.plans import Plans, names_in
from distributed.operations.planning.task_facts import TaskFacts
from distributed.parallel.expert_layers import expert_layers
from distributed.planner.batch import DEFAULT_BATCH_SIZE
from distributed.planner.estimates.candidates import SearchSpace
from distributed.planner.estimates.codec_shares import codec_share
from distributed.planner.estimates.configuration import refusal_of
from distributed.planner.estimates.device_memory import CUDA, DeviceMemory
from distributed.planner.estimates.facts_time import FactsTimer
from distributed.planner.estimates.from_facts import FactsSizes, FromFacts
from distributed.planner.estimates.hardware import HardwareProfile
from distributed.planner.estimates.model_facts import Cut, FactsSource
from distributed.planner.estimates.space_of_config import precision_of, space_of
from distributed.planner.estimates.table import table_of
from distributed.registry.catalog import get_catalog

__all__ = ["plan_task", "predictions_for"]

_CPU = DeviceMemory(copies_in_collectives=True)


def plan_task(
    task: Task,
    framework: Framework,
    facts: Facts,
    config: DistributedConfig,
    asked: Sequence[Layer],
    hardware: str | Path | HardwareProfile | None = None,
    num_devices: int | None = None,
    num_plans: int = 10,
    codecs: Collection[str] = (),
) -> Plans:
    """See `distributed.plan`.

    Args:
        task: what a run would train.
        framework: of its objects.
        facts: what the planner of runs knows of them.
        config: the configuration of the run, the fields of `asked` included.
        asked: layers with the fields that a plan has to have.

    Raises:
        UserError: the control flow of the model depends on values; and as `distributed.plan`.
    """
    catalog, layers = get_catalog(), as_layers(config)
    profile, whence = profile_of(hardware)
    devices = num_devices or config.num_ranks or profile.devices_per_node
    precision = precision_of(config, profile.device)
    known = TaskFacts(task)
    source = known.source(config, precision, profile.device)
    whole = source(Cut())
    sizes = FactsSizes(
        _global_batch(config, facts, devices), max(1, len(whole.blocks) - 1), _experts(task.model)
    )
    space = space_of(sizes, config, names_in(asked), profile, devices, catalog, codecs)
    space = replace(
        space,
        optimizer=known.optimizer(config)[0],
        micro_batch=facts.train_batch_size or space.micro_batch,
        checkpointing=space.checkpointing if whole.first_recomputed else (False,),
    )
    predictions = predictions_for(source, profile, space)
    table = table_of(
        space,
        lambda space: predictions,
        profile,
        num_plans,
        lambda split: refusal_of(
            split,
            catalog,
            profile.device,
            layers,
            facts,
            lambda plan: framework.check_split(task.model, plan),
        ),
    )
    subject = f"{whole.name} with {whole.num_parameters:,} parameters"
    return Plans(subject, space, profile, table, tuple(layers), tuple(asked), whence)


def predictions_for(source: FactsSource, profile: HardwareProfile, space: SearchSpace) -> FromFacts:
    """Predictions of the model of `source` on `profile`."""
    share = codec_share(space.codec_specs, [p.shape for p in source(Cut()).parameters if p.trained])
    timer = FactsTimer(source, profile, codec_share=share)
    return FromFacts(source, timer, _CPU if profile.device == "cpu" else CUDA)


def _global_batch(config: DistributedConfig, facts: Facts, devices: int) -> int:
    """Samples of a step: as set, else what the configuration makes of its batch on all devices."""
    if config.global_batch_size is not None:
        return config.global_batch_size
    size = facts.train_batch_size or config.batch_size
    sharing = config.parallel.tensor * config.parallel.pipeline * config.parallel.context
    slices = max(1, devices // sharing)
    each = size if isinstance(size, int) else DEFAULT_BATCH_SIZE
    return each * (config.gradient_accumulation_steps or 1) * slices


def _experts(model: Any) -> int:
    """Experts of a block whose layers can be divided; 1 without a mixture."""
    layers = expert_layers(model) if isinstance(model, nn.Module) else []
    return max((layer.num_experts for layer in layers), default=1)
