"""BackendSpec: what a plugin registers of a backend, and what the plan checks before it is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed.config import DistributedConfig

__all__ = ["EXCHANGES", "LEVERS", "LOW_COMMUNICATION", "SCHEDULES", "BackendSpec", "Capabilities"]

EXCHANGES = frozenset({"sum", "gather", "scatter"})
"""Collectives of gradient codecs that `distributed.communication.wire.Wire` has."""

LEVERS = frozenset(
    {"activation_checkpointing", "compile", "optimizer_offload", "optimizer_bits", "tf32", "fp8"}
)
"""Settings of memory and speed that `distributed.training.torch_backend.TorchBackend` applies: names of
configuration fields, and values of `matmul_precision`."""

LOW_COMMUNICATION = frozenset({"local-sgd", "diloco", "streaming-diloco", "async-sgd"})
"""Modes of `distributed.training.low_communication.backend.LowCommunicationBackend`."""

SCHEDULES = frozenset(
    {"gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev"}
)
"""Orders of forward and backward that `distributed.parallel.pipeline.Pipeline` has."""


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do. A config that needs more fails in the plan, before any process.

    Attributes:
        multi_process: more than one rank.
        precisions: of ``fp32``, ``bf16``, ``fp16``.
        accumulation: more than one micro-batch per optimizer step.
        clipping: gradient clipping by global norm.
        sync_batchnorm: BatchNorm statistics over all ranks.
        find_unused_parameters: parameters that take no part in some forward passes.
        gradient_buckets: `bucket_cap_mb` and `gradient_as_bucket_view` have a meaning.
        checkpoint: can write and read the portable checkpoint format.
        zero_stages: the ZeRO stages it implements; empty for none.
        axes: axes of the mesh (`distributed.interfaces.parallel_dims`) along which it can have several ranks.
            The first takes the ranks that ``parallel`` leaves.
        schedules: orders of a pipeline that it implements; empty for none.
        levers: of `LEVERS`: the settings of memory and speed that it applies.
        exchanges: of ``sum``, ``gather`` and ``scatter``: the collectives with which gradient codecs
            (`distributed.interfaces.codec`) may replace its own reduction; empty if it has no codecs.
        auto_batch: refuses models and losses whose training depends on the size of a micro-batch, and has
            `Backend.take_batch`, so that ``batch_size=auto`` may choose that size.
        low_communication: values of ``low_communication.mode`` besides ``none``; needs
            `BackendSpec.low_communication`.
        threads: its ranks may be threads of one process, which take turns: they change no settings of the
            process beyond those in `distributed.launch.thread_state`, and have no threads of their own that
            wait for other ranks.
    """

    multi_process: bool = True
    precisions: frozenset[str] = frozenset({"fp32"})
    accumulation: bool = True
    clipping: bool = True
    sync_batchnorm: bool = False
    find_unused_parameters: bool = False
    gradient_buckets: bool = False
    checkpoint: bool = False
    zero_stages: frozenset[int] = frozenset()
    axes: tuple[str, ...] = ("data",)
    schedules: frozenset[str] = frozenset()
    levers: frozenset[str] = frozenset()
    exchanges: frozenset[str] = frozenset()
    auto_batch: bool = False
    low_communication: frozenset[str] = frozenset()
    threads: bool = False


@dataclass(frozen=True)
class BackendSpec:
    """What a plugin registers: enough to choose and check a backend without importing it.

    Attributes:
        name: the word in the config, e.g. ``pytorch-ddp``.
        target: ``package.module:Class``, imported only when the backend is chosen.
        framework: ``torch`` or ``tensorflow``: which loop drives it.
        summary: one line for ``backends``.
        requires: module names that must be importable for the backend to run.
        install_hint: the command that installs them.
        launcher: ``package.module:Class`` of the launcher that starts its ranks.
        capabilities: what it can do.
        data_parallel_size: ``(config, number of ranks) ->`` into how many slices a global batch
            is cut, for a backend whose ranks share a model between them (pipeline, tensor
            parallelism) in a way of its own; it raises UserError for a number that cannot be. None: as
            ``parallel`` states.
        axis_sizes: ``config ->`` axis -> (size, name of the field) of the axes that the backend's own section
            sets.
        codec: ``config ->`` (name of a gradient codec, name of the field) of the codec that the backend's own
            section sets; None if it sets none.
        zero_stage: ``config ->`` the stage of ZeRO with which it trains; None for a backend without stages.
        unpredicted: ``config ->`` (name, value) of the first field of the backend's own section that changes
            memory or time in a way that predictions do not know; None if there is no such field.
        inner: for a backend that only starts ranks: the dotted config field that names the
            backend which they run. Target, capabilities and the like are then that one's.
        remote: the launcher decides where ranks run, a single one too: never in the caller's
            process, and this host's GPUs and the caller's place among nodes do not matter.
        cluster_address: for a backend that connects to a cluster: the dotted config field that holds its
            address, which `deploy` leaves out of a job that starts a cluster of its own.
        runs: the inner backend's name, in the spec that a plan holds.
        num_replicas: ``(config, number of devices) ->`` how many devices one rank drives, for a
            framework that trains several from one process; it raises UserError for what cannot
            be. None: one. Ranks that a launcher started drive one device each.
        objects: ``package.module:Class`` of the `Framework` that knows the user's model, optimizer
            and data in the caller's process.
        transports: what carries collectives on CPU and on CUDA when `communication_backend` is auto.
        deploy_form: what starts its ranks on a cluster, for ``deploy``: ``torchrun``, whose ranks it
            joins; ``mpi``, where a target has a job of MPI's own, else torchrun; ``ray``, a Ray cluster.
        search: ``package.module:Class`` of a `SearchEngine` that comes with it; None without.
        blocking_modules: modules in which its ranks wait for each other; a package stands for all its
            modules. A rank whose innermost Python frame lies in one waits, others work: hang diagnosis
            finds from it the rank that blocks the others.
        context_attention: ``package.module:function`` that finds the attention of a model for ranks which
            hold slices of sequences (`distributed.parallel.context_axis.ContextAttention`); for a backend
            with the axis ``context``.
        low_communication: the `target` under a ``low_communication.mode``, whose ranks train on their own.
        memory: ``package.module:Class`` of the `distributed.planner.estimates.layout.Layout` that predicts
            the memory of its ranks, without a framework; empty if it is not predicted.
        collectives: ``package.module:Class`` of the `Collectives` of its ranks, through which a backend of
            another framework trains that framework's models on them; empty if it offers none.
        over_collectives: the `target` that trains this framework's models through the `Collectives` of
            another backend; empty if there is none.
        shares_devices: its ranks may have a device in common, over any of its `transports`.
        preload: modules that its ranks import while they run, besides `requires` and `target`: a fork
            server imports them before it forks.
    """

    name: str
    target: str
    framework: str = "torch"
    summary: str = ""
    requires: tuple[str, ...] = ()
    install_hint: str = ""
    launcher: str = "distributed.launch.local_launcher:LocalLauncher"
    capabilities: Capabilities = field(default_factory=Capabilities)
    data_parallel_size: Callable[[DistributedConfig, int], int] | None = None
    axis_sizes: Callable[[DistributedConfig], Mapping[str, tuple[int, str]]] | None = None
    codec: Callable[[DistributedConfig], tuple[str, str] | None] | None = None
    zero_stage: Callable[[DistributedConfig], int] | None = None
    unpredicted: Callable[[DistributedConfig], tuple[str, object] | None] | None = None
    inner: str | None = None
    remote: bool = False
    cluster_address: str | None = None
    runs: str | None = None
    num_replicas: Callable[[DistributedConfig, int], int] | None = None
    objects: str = "distributed.training.torch_framework:TorchFramework"
    transports: tuple[str, str] = ("gloo", "nccl")
    deploy_form: str = "torchrun"
    search: str | None = None
    blocking_modules: tuple[str, ...] = ("torch.distributed",)
    context_attention: str = ""
    low_communication: str = ""
    memory: str = ""
    collectives: str = ""
    over_collectives: str = ""
    shares_devices: bool = False
    preload: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name, and what its ranks run where that is another backend."""
        return f"{self.name} ({self.runs})" if self.runs else self.name
