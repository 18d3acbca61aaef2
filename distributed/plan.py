"""RunPlan: every configuration and capability error, before a process starts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from distributed.batch import BatchPlan, rescale_batch, resolve_batch
from distributed.choice import check_accumulation, check_capabilities, chosen_backend, move_to_zero
from distributed.errors import UserError
from distributed.joined import Joined
from distributed.places import as_host, check_nodes, meeting_notes, place_of

if TYPE_CHECKING:
    from distributed.config import DistributedConfig
    from distributed.interfaces.backend import BackendSpec
    from distributed.plugin_manager import Catalog

__all__ = ["Facts", "Resources", "RunPlan", "rescale", "resolve"]


@dataclass(frozen=True)
class Resources:
    """What this host offers: the number of visible CUDA devices."""

    num_gpus: int = 0


@dataclass(frozen=True)
class Facts:
    """What the plan has to know of the user's objects.

    Attributes:
        train_batch_size: the training loader's own batch size, None without.
        val_batch_size: the validation loader's.
        num_samples: training samples in an epoch, None when unknown.
        has_optimizer: an optimizer object was given.
    """

    train_batch_size: int | None = None
    val_batch_size: int | None = None
    num_samples: int | None = None
    has_optimizer: bool = False


@dataclass(frozen=True)
class RunPlan:
    """A run that can start.

    Attributes:
        config: what was asked.
        spec: the backend.
        mode: ``in-process`` (one rank, here), ``spawn`` (start ranks) or ``join`` (be one).
        world_size: ranks (processes) over all nodes.
        local_size: ranks on this node.
        node_rank: index of this node.
        num_nodes: nodes.
        device: ``cpu`` or ``cuda``.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        communication_backend: transport of the collectives, as torch names it.
        batch: the batch identity.
        val_batch_size: samples per rank in validation.
        learning_rate: after `lr_scaling`.
        num_replicas: devices that each rank drives.
        counts: numbers of ranks that an elastic run may go on with, largest first.
        joined: this process's place when it joins.
        notes: what the user should know, one sentence each.
    """

    config: DistributedConfig
    spec: BackendSpec
    mode: str
    world_size: int
    local_size: int
    node_rank: int
    num_nodes: int
    device: str
    precision: str
    communication_backend: str
    batch: BatchPlan
    val_batch_size: int
    learning_rate: float
    num_replicas: int = 1
    counts: tuple[int, ...] = ()
    joined: Joined | None = None
    notes: list[str] = field(default_factory=list)

    def device_of(self, local_rank: int) -> str:
        """The device of a rank on its host."""
        return "cpu" if self.device == "cpu" else f"cuda:{local_rank}"

    def summary(self) -> str:
        """The first lines of a run."""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        if self.num_replicas > 1:
            ranks += f" of {self.num_replicas} replicas"
        nodes = f" on {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        where = "CPU" if self.device == "cpu" else "CUDA"
        over = f" over {self.communication_backend}" if self.world_size > 1 else ""
        first = f"{self.spec.label}: {ranks}{nodes} on {where}{over}, {self.precision}; {self.batch}"
        notes = [*self.notes, *([self._elastic()] if self.counts else [])]
        return "\n".join([first, *(f"note: {note}" for note in notes)])

    def _elastic(self) -> str:
        fewer = f", and go on with as few as {self.counts[-1]}" if len(self.counts) > 1 else ""
        return f"ranks that fail are started again {self.config.max_restarts} times{fewer}"


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
    device = _device(config, spec, resources, joined, notes)
    num_devices, local_size = _ranks(config, spec, resources, device, joined)
    num_replicas = _num_replicas(config, spec, num_devices, joined)
    world_size, local_size = num_devices // num_replicas, max(1, local_size // num_replicas)
    precision = _precision(config, device, notes)
    check_capabilities(config, spec, catalog, num_devices, precision, device)
    batch = resolve_batch(
        batch_size=config.batch_size,
        accumulation=config.gradient_accumulation_steps,
        global_batch_size=config.global_batch_size,
        data_parallel_size=_data_parallel_size(config, spec, num_devices),
        loader_batch_size=facts.train_batch_size,
    )
    check_accumulation(batch.gradient_accumulation_steps, spec, catalog)
    plan = RunPlan(
        config=config,
        spec=spec,
        mode=_mode(config, spec, num_devices, joined),
        world_size=world_size,
        local_size=local_size,
        node_rank=joined.node_rank if joined else config.node_rank or 0,
        num_nodes=joined.num_nodes if joined else config.num_nodes,
        device=device,
        precision=precision,
        communication_backend=_transport(config, spec, device),
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
    size = _data_parallel_size(plan.config, plan.spec, world_size * plan.num_replicas)
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


def _device(
    config: DistributedConfig,
    spec: BackendSpec,
    resources: Resources,
    joined: Joined | None,
    notes: list[str],
) -> str:
    here = joined.local_size if joined else (config.num_ranks or 1) // config.num_nodes
    if spec.remote and joined is None:
        here = config.num_ranks or 1
    if config.device == "cpu":
        return "cpu"
    if config.device == "auto" and resources.num_gpus == 0:
        if config.num_gpus or config.gpus_per_node:
            notes.append("no GPU found: the ranks run as CPU processes over gloo")
        return "cpu"
    where, per = ("on this host", "per host") if joined or not spec.remote else ("there",) * 2
    if resources.num_gpus < here and not _one_visible_each(resources, joined):
        if _may_share(config, spec, resources):
            notes.append(f"{here} ranks share {resources.num_gpus} GPU(s) over gloo")
            return "cuda"
        raise UserError(
            f"{here} ranks {where} need {here} GPUs and {resources.num_gpus} are visible",
            field="num_gpus",
            got=config.num_ranks,
            allowed=f"at most {resources.num_gpus} {per}",
            remedy="Use fewer ranks, or say device=cpu to run them as CPU processes;"
            " CUDA_VISIBLE_DEVICES may hide some; device=cuda with communication_backend=gloo lets ranks"
            " share a GPU",
        )
    return "cuda"


def _one_visible_each(resources: Resources, joined: Joined | None) -> bool:
    # Slurm and others may show every task a single device of its own.
    return joined is not None and resources.num_gpus == 1


def _may_share(config: DistributedConfig, spec: BackendSpec, resources: Resources) -> bool:
    """Whether several ranks may compute on one GPU: NCCL refuses that, gloo does not. Both fields have to
    be explicit, so that a mistaken number of ranks stays an error."""
    asked = config.device == "cuda" and config.communication_backend == "gloo"
    return asked and resources.num_gpus > 0 and not spec.remote


def _ranks(
    config: DistributedConfig, spec: BackendSpec, resources: Resources, device: str, joined: Joined | None
) -> tuple[int, int]:
    if joined is not None:
        return joined.size, joined.local_size
    if config.num_ranks is not None:
        return config.num_ranks, config.num_ranks // config.num_nodes
    several = device == "cuda" and spec.capabilities.multi_process
    here = resources.num_gpus // (config.num_nodes if spec.remote else 1) if several else 1
    return here * config.num_nodes, here


def _num_replicas(
    config: DistributedConfig, spec: BackendSpec, num_devices: int, joined: Joined | None
) -> int:
    if spec.num_replicas is None or joined is not None:
        return 1
    number = spec.num_replicas(config, num_devices)
    if number < 1 or num_devices % number:
        raise ValueError(f"backend '{spec.name}' gives a rank {number} of {num_devices} devices")
    return number


def _data_parallel_size(config: DistributedConfig, spec: BackendSpec, world_size: int) -> int:
    if spec.data_parallel_size is None:
        return world_size
    size = spec.data_parallel_size(config, world_size)
    if size < 1 or world_size % size:
        raise ValueError(
            f"backend '{spec.name}' cuts a global batch into {size} slices for {world_size} ranks"
        )
    return size


def _precision(config: DistributedConfig, device: str, notes: list[str]) -> str:
    asked = config.mixed_precision
    if asked is False:
        return "fp32"
    if asked is True:
        if device == "cpu":
            notes.append("mixed_precision=True means bf16 on CPU; say 'fp16' for fp16 with a scaler")
            return "bf16"
        return "fp16"
    return asked


def _transport(config: DistributedConfig, spec: BackendSpec, device: str) -> str:
    asked = config.communication_backend
    if asked == "nccl" and device == "cpu":
        raise UserError(
            "nccl moves data between GPUs and the ranks run on CPU",
            field="communication_backend",
            got="nccl",
            allowed="auto, gloo, mpi",
        )
    if asked == "auto":
        return spec.transports[0 if device == "cpu" else 1]
    return asked


def _mode(config: DistributedConfig, spec: BackendSpec, num_devices: int, joined: Joined | None) -> str:
    if joined is not None:
        return "join"
    if spec.remote:
        return "spawn"
    # Several devices in one process have to be set up before the framework has started there.
    alone = num_devices == 1 and config.num_nodes == 1 and config.launch != "spawn" and not config.is_elastic
    return "in-process" if alone or not spec.capabilities.multi_process else "spawn"


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


def visible_gpus() -> int:
    """CUDA devices this process may use, without creating a context."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 0
    import torch

    return torch.cuda.device_count()
