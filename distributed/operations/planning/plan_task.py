"""Plans for the model object of a task."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import nn

from distributed.config import DistributedConfig, Layer
from distributed.config.load import as_layers
from distributed.interfaces.framework import Framework
from distributed.interfaces.parallel_dims import DATA_AXES, ParallelDims
from distributed.interfaces.plan import Facts, RunPlan
from distributed.interfaces.task import Task
from distributed.operations.planning.default_hardware import profile_of
from distributed.operations.planning.machine_match import announce_difference
from distributed.operations.planning.micro_batch_effects import OTHER, effect_of_size
from distributed.operations.planning.options import (
    PlanOptions,
    left_out,
    limited,
    note_on_batch,
    recording_seconds,
)
from distributed.operations.planning.plans import Plans, names_in
from distributed.operations.planning.stage_check import StageCheck
from distributed.operations.planning.task_facts import TaskFacts
from distributed.parallel.expert_layers import expert_layers
from distributed.planner.batch import DEFAULT_BATCH_SIZE, resolve_batch
from distributed.planner.estimates.candidates import SearchSpace
from distributed.planner.estimates.codec_shares import codec_share
from distributed.planner.estimates.configuration import check_places, refusal_of, with_free_stages
from distributed.planner.estimates.device_memory import GPU, HOST
from distributed.planner.estimates.facts_time import FactsTimer
from distributed.planner.estimates.from_facts import FactsSizes, FromFacts
from distributed.planner.estimates.hardware import HardwareProfile
from distributed.planner.estimates.model_facts import Cut, FactsSource, ModelFacts
from distributed.planner.estimates.search import Ranked, Rejected
from distributed.planner.estimates.space_of_config import precision_of, space_of
from distributed.planner.estimates.split import Split
from distributed.planner.estimates.table import table_of
from distributed.registry.catalog import get_catalog, load_target
from distributed.system.output import print_line

__all__ = ["plan_task", "predict_row"]


_WITHOUT_GPU = (
    "there is no GPU here, so that operations of CPUs are recorded; kernels of a GPU may allocate otherwise"
)

_ANNOUNCED = 10.0
"""Seconds from which on recording is announced."""


def plan_task(
    task: Task,
    framework: Framework,
    facts: Facts,
    config: DistributedConfig,
    asked: Sequence[Layer],
    options: PlanOptions,
    written: Sequence[Layer] | None = None,
) -> Plans:
    """See `distributed.plan`.

    Args:
        task: what a run would train.
        framework: of its objects.
        facts: what the planner of runs knows of them.
        config: the configuration of the run, the fields of `asked` included.
        asked: layers with the fields that a plan has to have.
        written: layers that the file of a plan repeats; None for `asked`, beside a script that sets the rest.

    Raises:
        UserError: the control flow of the model depends on values; and as `distributed.plan`.
    """
    catalog, layers = get_catalog(), as_layers(config)
    profile, whence = profile_of(options.hardware)
    devices, kept = options.devices_of(config, profile), frozenset(names_in(asked))
    check_places(config, kept, devices, profile.device, profile.devices_of_host)
    announce_difference(profile, devices)
    precision = precision_of(config, profile.device)
    known = TaskFacts(task)
    model = known.model(config)
    source = known.source(with_free_stages(config, kept), precision, profile.device)
    whole = source(Cut())
    sizes = FactsSizes(_global_batch(config, facts, devices), max(1, len(whole.blocks) - 1), _experts(model))
    keeps_size = facts.has_batches or config.global_batch_size is None
    space = space_of(sizes, config, kept, profile, devices, catalog, options.codecs)
    space = replace(
        space,
        optimizer=known.optimizer(config)[0],
        micro_batch=(facts.train_batch_size if keeps_size else None) or space.micro_batch,
        checkpointing=space.checkpointing if whole.first_recomputed else (False,),
    )
    effect = effect_of_size(task, model, known.samples())
    space, notes = _same_micro_batches(space, effect, config, facts)
    notes += note_on_batch(config)
    stages = StageCheck(task, model, known.samples())
    if profile.device != "cpu" and not framework.num_gpus():
        notes += (_WITHOUT_GPU,)
    space, rejected = _affordable(space, whole, options, kept)

    def refuses(split: Split) -> str | None:
        def check(plan: RunPlan) -> None:
            framework.check_split(task.model, plan)
            load_target(plan.spec.target).check_model(model, plan)
            stages(plan)

        return refusal_of(split, catalog, profile.device, layers, kept, facts, check)

    predictions = _predictions(source, profile, space)
    table = table_of(space, lambda space: predictions, profile, options.num_plans, refuses)
    table.rejected += rejected
    subject = f"{whole.name} with {whole.num_parameters:,} parameters"
    return Plans(
        subject,
        space,
        profile,
        table,
        tuple(layers),
        kept,
        tuple(asked if written is None else written),
        predictions.device.spread,
        whence,
        notes,
        predictions.device.spread_bytes,
        known.weights(config),
    )


def _same_micro_batches(
    space: SearchSpace, effect: str, config: DistributedConfig, facts: Facts
) -> tuple[SearchSpace, tuple[str, ...]]:
    """`space` with the micro-batches and ranks that a run of the configuration has, if others would train the
    model in another way.

    Args:
        effect: of the size of a micro-batch on the training.

    Raises:
        UserError: the configuration cannot divide its global batch.
    """
    if not effect.startswith(OTHER):
        return space, (f"plans have micro-batches of other sizes: {effect}",) if effect else ()
    slices = _slices(config, space.world_size)
    batch = resolve_batch(
        batch_size=config.batch_size if isinstance(config.batch_size, int) else None,
        accumulation=config.gradient_accumulation_steps,
        global_batch_size=space.sizes.global_batch,
        data_parallel_size=slices,
        loader_batch_size=facts.train_batch_size,
        has_batches=facts.has_batches,
    )
    size, number = batch.batch_size, batch.gradient_accumulation_steps
    parts = f"{number} micro-batch{'es' if number > 1 else ''} of {size} sample{'s' if size > 1 else ''}"
    before = space.admits

    def admits(dims: ParallelDims, zero_stage: int) -> bool:
        return before(dims, zero_stage) and dims.data_parallel_size == slices

    note = (
        f"{effect.removeprefix(OTHER)}: every plan has {parts} on {slices} ranks with different samples,"
        " as the configuration"
    )
    kept = replace(space, micro_batch=size, num_micro_batches=number, admits=admits)
    return kept, (note,)


def _slices(config: DistributedConfig, devices: int) -> int:
    """Ranks with different samples that the configuration makes of so many devices."""
    sharing = config.parallel.tensor * config.parallel.pipeline * config.parallel.context
    return max(1, devices // sharing)


def _affordable(
    space: SearchSpace, whole: ModelFacts, options: PlanOptions, asked: Collection[str]
) -> tuple[SearchSpace, list[Rejected]]:
    """`space`, without ranks that share the model if facts of its parts would take long, and what is left
    out."""
    names_parts = any(name.startswith("parallel.") for name in asked)
    if options.axes is not None or names_parts:
        space, reason = limited(space, options.axes), None
    else:
        reason = left_out(recording_seconds(space, whole))
    if reason is not None:
        return limited(space, DATA_AXES), [Rejected("splits in which ranks share the model", reason)]
    seconds = recording_seconds(space, whole)
    if seconds > _ANNOUNCED:
        print_line(f"recording facts of the parts of the model, about {seconds:.0f} s")
    return space, []


def predict_row(task: Task, config: DistributedConfig, plans: Plans, split: Split) -> Ranked:
    """Predictions for another model than that of `plans`, under one of their splits."""
    profile = plans.profile
    source = TaskFacts(task).source(config, split.precision, profile.device)
    predictions = _predictions(source, profile, plans.space)
    time = predictions.time(split)
    return Ranked(split, time, predictions.memory(split), predictions.mfu(split, time.total))


def _predictions(source: FactsSource, profile: HardwareProfile, space: SearchSpace) -> FromFacts:
    """Predictions of the model of `source` on `profile`."""
    share = codec_share(space.codec_specs, [p.shape for p in source(Cut()).parameters if p.trained])
    timer = FactsTimer(source, profile, codec_share=share)
    return FromFacts(source, timer, HOST if profile.device == "cpu" else GPU)


def _global_batch(config: DistributedConfig, facts: Facts, devices: int) -> int:
    """Samples of a step: as set, else what the configuration makes of its batch on all devices."""
    if config.global_batch_size is not None:
        return config.global_batch_size
    size = facts.train_batch_size or config.batch_size
    slices = _slices(config, devices)
    each = size if isinstance(size, int) else DEFAULT_BATCH_SIZE
    return each * (config.gradient_accumulation_steps or 1) * slices


def _experts(model: nn.Module) -> int:
    """Experts of a block whose layers can be divided; 1 without a mixture."""
    return max((layer.num_experts for layer in expert_layers(model)), default=1)
