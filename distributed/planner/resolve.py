"""Resolve a configuration into a `RunPlan`; every configuration and capability error is raised here.

A pipeline of four values, each made once: ``choose_backend`` -> ``place_ranks`` -> ``resolve_batch`` ->
checks -> ``RunPlan``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from distributed.config import DistributedConfig
from distributed.config.load import native_names
from distributed.errors import UserError
from distributed.interfaces.backend_spec import BackendSpec
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.interfaces.placement import LauncherEnvironment
from distributed.interfaces.plan import BatchPlan, Facts, Resources, RunPlan
from distributed.planner.auto_batch import auto_sizes, check_auto
from distributed.planner.backend_choice import (
    BackendChoice,
    check_accumulation,
    check_capabilities,
    choose_backend,
)
from distributed.planner.batch import check_batches, rescale_batch, resolve_batch
from distributed.planner.compression import check_codec, choose_codec, codec_notes
from distributed.planner.hosts import as_host, check_nodes, meeting_notes
from distributed.planner.low_communication import (
    check_low_communication,
    low_communication_notes,
    ranks_of,
)
from distributed.planner.mesh import check_axes, check_exchanges, data_parallel_size, resolve_dims
from distributed.planner.pipeline import pipeline_shape
from distributed.planner.placement import place_ranks
from distributed.planner.planned import with_own_predictions
from distributed.planner.thread_ranks import as_threads
from distributed.planner.warnings import core_notes, lever_notes, sample_notes
from distributed.registry.catalog import Catalog


def resolve(
    config: DistributedConfig,
    catalog: Catalog,
    facts: Facts,
    resources: Resources,
    joined: LauncherEnvironment | None = None,
    choice: BackendChoice | None = None,
) -> RunPlan:
    """Decide everything that can be decided before a process starts.

    Args:
        joined: this process's position, if a launcher started it.
        choice: the backend, if `choose_backend` was called before.

    Raises:
        UserError: the configuration cannot be met: unknown backend, missing package,
            lacking capability, too few GPUs, an impossible batch.
    """
    choice = choice or choose_backend(config, catalog)
    spec = as_threads(choice.config, choice.spec, catalog)
    config, joined = as_host(choice.config, joined)
    check_axes(config, spec, catalog)
    placement = place_ranks(config, spec, resources, joined)
    num_devices = placement.world_size * placement.num_replicas
    dims = resolve_dims(config, spec, placement.world_size)
    check_exchanges(dims, placement.device, placement.communication_backend)
    num_slices = data_parallel_size(config, spec, dims) * placement.num_replicas
    batch, sizes = _resolve_batch(config, spec, facts, dims, num_slices)
    if dims.pipeline > 1:
        pipeline_shape(config, dims, batch)
    check_low_communication(config, spec, dims, placement.precision, catalog)
    check_capabilities(config, spec, catalog, num_devices, placement.precision, placement.device)
    check_accumulation(batch.gradient_accumulation_steps, spec, catalog)
    check_nodes(config, spec, placement)
    codec = choose_codec(config, spec, catalog)
    check_codec(codec, config, spec, dims, placement.precision, catalog)
    plan = RunPlan(
        **vars(replace(placement, notes=())),
        config=config,
        spec=ranks_of(config, spec),
        batch=batch,
        val_batch_size=facts.val_batch_size or batch.batch_size,
        learning_rate=_learning_rate(config, batch, facts),
        dims=dims,
        codec=codec,
        micro_batches=sizes,
    )
    ours = [*meeting_notes(config, spec, placement), *core_notes(spec, placement)]
    ours += [*lever_notes(config, placement), *low_communication_notes(config, placement.world_size)]
    if not config.low_communication.is_active:
        ours += codec_notes(codec, config, _copies(spec, dims))
    notes = (*choice.notes, *placement.notes, *ours, *sample_notes(config, batch, facts))
    found = catalog.manager.hook.check_plan(plan=plan)
    counts = _counts(plan, catalog) if config.is_elastic else ()
    return with_own_predictions(replace(plan, notes=(*notes, *chain.from_iterable(found)), counts=counts))


def _resolve_batch(
    config: DistributedConfig, spec: BackendSpec, facts: Facts, dims: ParallelDims, num_slices: int
) -> tuple[BatchPlan, tuple[int, ...]]:
    """The batch, and under ``batch_size=auto`` the sizes of a micro-batch, of which it has the largest."""
    given = config.batch_size
    if given is None or isinstance(given, int):
        check_batches(config, facts)
        batch = resolve_batch(
            batch_size=given,
            accumulation=config.gradient_accumulation_steps,
            global_batch_size=config.global_batch_size,
            data_parallel_size=num_slices,
            loader_batch_size=facts.train_batch_size,
            has_batches=facts.has_batches,
        )
        return batch, ()
    if not spec.capabilities.auto_batch:
        return BatchPlan(1, 1, num_slices), ()  # `check_capabilities` refuses it
    check_auto(config, facts)
    sizes = auto_sizes(config, spec, dims, num_slices)
    assert config.global_batch_size is not None
    return BatchPlan(sizes[0], config.global_batch_size // num_slices // sizes[0], num_slices), sizes


def _copies(spec: BackendSpec, dims: ParallelDims) -> int:
    """Number of ranks among which a codec sends a gradient: shards are reduced by the backend itself."""
    return dims.size("data", "context") * (1 if "shard" in spec.capabilities.axes else dims.shard)


def rescale(plan: RunPlan, num_nodes: int, local_size: int, node_rank: int = 0) -> RunPlan:
    """`plan` on another number of ranks, with the same global batch and the same split of the model.

    Raises:
        UserError: it cannot be cut into equal shares.
    """
    world_size = num_nodes * local_size
    if world_size == plan.world_size:
        return replace(plan, num_nodes=num_nodes, local_size=local_size, node_rank=node_rank)
    dims = resolve_dims(plan.config, plan.spec, world_size)
    size = data_parallel_size(plan.config, plan.spec, dims) * plan.num_replicas
    rescaled = replace(
        plan,
        world_size=world_size,
        num_nodes=num_nodes,
        local_size=local_size,
        node_rank=node_rank,
        batch=rescale_batch(plan.batch, size),
        micro_batches=auto_sizes(plan.config, plan.spec, dims, size) if plan.config.chooses_batch else (),
        dims=dims,
    )
    return with_own_predictions(rescaled)


def _counts(plan: RunPlan, catalog: Catalog) -> tuple[int, ...]:
    """Numbers of ranks that keep the global batch and suit the backend, from most to fewest.

    Raises:
        UserError: the fewest asked for do not (under Ray, which takes what there is room for: any of
            them); a launcher started the ranks, or the backend cannot have its ranks started.
    """
    section, size = plan.config.elastic, plan.world_size
    if plan.mode != "spawn":
        whose = plan.joined.launcher if plan.joined else f"backend '{plan.spec.name}'"
        raise UserError(
            "only the launcher that started the ranks can restart them",
            field="elastic",
            got=f"{whose}: {plan.mode}",
            remedy="Under torchrun use its own --max-restarts with resume_from_checkpoint=True; otherwise"
            " let `fit` start the ranks (launch=spawn, backend=pytorch-ddp)",
        )
    if plan.num_nodes > 1 and not plan.spec.remote and not plan.config.checkpoint.on_signal:
        raise UserError(
            "adding a host requires that ranks save a checkpoint when they receive a signal",
            field="checkpoint.on_signal",
            got=False,
            allowed="true for an elastic run over several hosts",
        )
    step = 1 if plan.num_nodes == 1 or plan.spec.remote else plan.local_size
    fewest = section.min_ranks or (section.min_nodes or 0) * plan.local_size or size
    found, refused = [], dict[int, UserError]()
    for count in range(size, fewest - 1, -step):
        try:
            nodes = count // step if plan.num_nodes > 1 and not plan.spec.remote else 1
            other = rescale(plan, nodes, count // nodes)
            check_accumulation(other.batch.gradient_accumulation_steps, plan.spec, catalog)
            catalog.manager.hook.check_plan(plan=other)
            found.append(count)
        except UserError as error:
            refused[count] = error
    if found[-1] != fewest or (plan.spec.remote and refused):
        why = min(refused.items()) if refused else (fewest, f"each host has {step} of them")
        raise UserError(
            f"the run cannot continue with {why[0]} ranks: {getattr(why[1], 'message', why[1])}",
            field="elastic.min_ranks",
            got=fewest,
            allowed=", ".join(map(str, sorted(found))),
            remedy="Choose a global_batch_size that every number of ranks divides",
        )
    return tuple(found)


def _learning_rate(config: DistributedConfig, batch: BatchPlan, facts: Facts) -> float:
    if facts.has_optimizer and config.is_explicit("learning_rate"):
        origin = config.origin("learning_rate")
        raise UserError(
            "an optimizer object carries its own learning rate",
            field="learning_rate",
            got=config.learning_rate,
            remedy=f"Leave out the optimizer object, or the optimizer of {origin}"
            if origin in native_names()
            else "Leave it out, or give the optimizer's class instead (optimizer=torch.optim.SGD)",
        )
    scaling = config.lr_scaling
    if scaling.rule == "none" or scaling.base_batch_size is None:
        return config.learning_rate
    if facts.has_optimizer:
        raise UserError(
            "an optimizer object carries its own learning rate, which is never rescaled",
            field="lr_scaling.rule",
            got=scaling.rule,
            remedy="Give the optimizer's class instead (optimizer=torch.optim.SGD)",
        )
    factor = batch.global_batch_size / scaling.base_batch_size
    return config.learning_rate * (factor if scaling.rule == "linear" else factor**0.5)
