"""RunPlan: every configuration and capability error, before a process starts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distributed.errors import UserError
from distributed.interfaces.placement import Joined
from distributed.interfaces.plan import BatchPlan, Facts, Resources, RunPlan
from distributed.planner.backend_choice import (
    check_accumulation,
    check_capabilities,
    chosen_backend,
    move_to_zero,
)
from distributed.planner.batch import rescale_batch, resolve_batch
from distributed.planner.hosts import as_host, check_nodes, meeting_notes, place_of
from distributed.planner.placement import (
    choose_device,
    choose_mode,
    choose_precision,
    choose_transport,
    count_ranks,
    count_replicas,
    data_parallel_size,
)

if TYPE_CHECKING:
    from distributed.config import DistributedConfig
    from distributed.registry.catalog import Catalog

__all__ = ["rescale", "resolve"]


def resolve(
    config: DistributedConfig,
    catalog: Catalog,
    facts: Facts,
    resources: Resources,
    joined: Joined | None = None,
) -> RunPlan:
    """Decide everything that can be decided before a process starts.

    Raises:
        UserError: the config asks for what cannot be: unknown backend, missing package,
            lacking capability, too few GPUs, an impossible batch.
    """
    notes: list[str] = []
    config = move_to_zero(config, catalog, notes)
    config, joined = as_host(config, joined)
    spec = chosen_backend(config, catalog)
    joined = place_of(config, joined)
    device = choose_device(config, spec, resources, joined, notes)
    num_devices, local_size = count_ranks(config, spec, resources, device, joined)
    num_replicas = count_replicas(config, spec, num_devices, joined)
    world_size, local_size = num_devices // num_replicas, max(1, local_size // num_replicas)
    precision = choose_precision(config, device, notes)
    check_capabilities(config, spec, catalog, num_devices, precision, device)
    batch = resolve_batch(
        batch_size=config.batch_size,
        accumulation=config.gradient_accumulation_steps,
        global_batch_size=config.global_batch_size,
        data_parallel_size=data_parallel_size(config, spec, num_devices),
        loader_batch_size=facts.train_batch_size,
    )
    check_accumulation(batch.gradient_accumulation_steps, spec, catalog)
    plan = RunPlan(
        config=config,
        spec=spec,
        mode=choose_mode(config, spec, num_devices, joined),
        world_size=world_size,
        local_size=local_size,
        node_rank=joined.node_rank if joined else config.node_rank or 0,
        num_nodes=joined.num_nodes if joined else config.num_nodes,
        device=device,
        precision=precision,
        communication_backend=choose_transport(config, spec, device),
        batch=batch,
        val_batch_size=facts.val_batch_size or batch.batch_size,
        learning_rate=_learning_rate(config, batch, facts),
        num_replicas=num_replicas,
        joined=joined,
        notes=notes,
    )
    check_nodes(plan)
    notes += meeting_notes(plan)
    catalog.manager.hook.check_plan(plan=plan)
    return replace(plan, counts=_counts(plan, catalog)) if config.is_elastic else plan


def rescale(plan: RunPlan, num_nodes: int, local_size: int, node_rank: int = 0) -> RunPlan:
    """`plan` on another number of ranks, with the same global batch.

    Raises:
        UserError: it cannot be cut into equal shares.
    """
    world_size = num_nodes * local_size
    if world_size == plan.world_size:
        return replace(plan, num_nodes=num_nodes, local_size=local_size, node_rank=node_rank)
    size = data_parallel_size(plan.config, plan.spec, world_size * plan.num_replicas)
    return replace(
        plan,
        world_size=world_size,
        num_nodes=num_nodes,
        local_size=local_size,
        node_rank=node_rank,
        batch=rescale_batch(plan.batch, size),
    )


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
            "ranks can only be started again by who started them",
            field="elastic",
            got=f"{whose}: {plan.mode}",
            remedy="Under torchrun use its own --max-restarts with resume_from_checkpoint=True; otherwise"
            " let `fit` start the ranks (launch=spawn, backend=pytorch-ddp)",
        )
    if plan.num_nodes > 1 and not plan.spec.remote and not plan.config.checkpoint.on_signal:
        raise UserError(
            "ranks make room for another host by saving when they are sent a signal",
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
            f"the run cannot go on with {why[0]} ranks: {getattr(why[1], 'message', why[1])}",
            field="elastic.min_ranks",
            got=fewest,
            allowed=", ".join(map(str, sorted(found))),
            remedy="Choose a global_batch_size that every number of ranks divides",
        )
    return tuple(found)


def _learning_rate(config: DistributedConfig, batch: BatchPlan, facts: Facts) -> float:
    if facts.has_optimizer and config.is_explicit("learning_rate"):
        raise UserError(
            "an optimizer object carries its own learning rate",
            field="learning_rate",
            got=config.learning_rate,
            remedy="Leave it out, or give the optimizer's class instead (optimizer=torch.optim.SGD)",
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
