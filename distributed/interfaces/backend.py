"""Backend: how ranks cooperate. It is not nccl, gloo or mpi: that is `communication_backend`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from distributed.config import DistributedConfig
    from distributed.interfaces.state import BackendState, StateReader
    from distributed.interfaces.task import Task
    from distributed.planner.resolve import RunPlan

__all__ = ["Backend", "BackendSpec", "Capabilities", "MicroBatch", "StepResult", "Window", "World"]


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
            parallelism); it raises UserError for a number that cannot be. None: one slice a rank.
        inner: for a backend that only starts ranks: the dotted config field that names the
            backend which they run. Target, capabilities and the like are then that one's.
        remote: the launcher decides where ranks run, a single one too: never in the caller's
            process, and this host's GPUs and the caller's place among nodes say nothing.
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
    """

    name: str
    target: str
    framework: str = "torch"
    summary: str = ""
    requires: tuple[str, ...] = ()
    install_hint: str = ""
    launcher: str = "distributed.launch.run:LocalLauncher"
    capabilities: Capabilities = field(default_factory=Capabilities)
    data_parallel_size: Callable[[DistributedConfig, int], int] | None = None
    inner: str | None = None
    remote: bool = False
    runs: str | None = None
    num_replicas: Callable[[DistributedConfig, int], int] | None = None
    objects: str = "distributed.training.torch_framework:TorchFramework"
    transports: tuple[str, str] = ("gloo", "nccl")
    deploy_form: str = "torchrun"
    search: str | None = None

    @property
    def label(self) -> str:
        """The name, and what its ranks run where that is another backend."""
        return f"{self.name} ({self.runs})" if self.runs else self.name


@dataclass(frozen=True)
class World:
    """Where one rank stands.

    Attributes:
        rank: of this process, 0 to ``size - 1``.
        size: number of ranks.
        local_rank: rank within this host.
        local_size: number of ranks on this host.
        node_rank: index of this host.
        num_nodes: number of hosts.
        host: this host's name.
        device: where this rank computes, e.g. ``cpu`` or ``cuda:1``.
        data_parallel_rank: which slice of each global batch this rank takes.
        data_parallel_size: into how many slices each global batch is cut. Equal to `size`
            unless ranks share a model between them (pipeline, tensor parallelism); these have
            the same `data_parallel_rank` and are given the same windows.
        num_replicas: devices that this rank drives, each with a copy of the model. Its micro-batches
            hold `batch_size` samples for each of them.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    host: str = "localhost"
    device: str = "cpu"
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    num_replicas: int = 1

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one model, and with it one slice of each global batch."""
        return self.size // self.data_parallel_size


class MicroBatch(NamedTuple):
    """One forward's input.

    Attributes:
        batch: what the collate function returned, still on the host.
        num_samples: how many of its samples count. 0 marks a stand-in: run it for its
            collectives, with weight zero.
    """

    batch: Any
    num_samples: int


class Window(NamedTuple):
    """What one optimizer step consumes: this rank's micro-batches of one global batch.

    Attributes:
        micro_batches: the same number on every rank; ranks with less data hold stand-ins.
        num_samples: samples in the whole global batch, over all ranks.
    """

    micro_batches: Sequence[MicroBatch]
    num_samples: int


class StepResult(NamedTuple):
    """What became of one optimizer step.

    Attributes:
        norm: global L2 norm of the unscaled gradient before clipping, as a number or a
            0-dimensional tensor on the device; None when nobody asked for it.
        skipped: the step was not taken (non-finite gradients). The same on all ranks.
    """

    norm: Any
    skipped: bool


class Backend(ABC):
    """How ranks cooperate. The loop calls these in this order, on every rank alike.

    ``setup -> prepare -> (run_window -> optimizer_step)* -> export_state -> release -> teardown``

    Attributes:
        spec: what it was registered as.
        world: after `setup`.
        module: after `prepare`: the user's module, unwrapped.
        optimizer: after `prepare`: the optimizer in use.
        timers: where forward, backward and optimizer seconds go (`mixins.timing`).
    """

    spec: BackendSpec
    world: World
    module: Any
    optimizer: Any
    timers: Any

    @abstractmethod
    def setup(self, plan: RunPlan) -> World:
        """Join the other ranks and return this rank's place among them.

        Raises:
            UserError: the rendezvous or the device cannot be had.
        """

    @abstractmethod
    def prepare(self, task: Task) -> None:
        """Take the task's model and optimizer, place and wrap them. Collective."""

    def warm_up(self, windows: Iterator[Window]) -> None:  # noqa: B027 - most engines have no such state
        """Bring the engine to where it stands after a run's first step, if its later steps are
        computed in another way than its first. Collective.

        Called under ``deterministic`` after `prepare` and before a saved state is loaded, which then
        goes on with the same bits as if it had never been interrupted. Gradients, buffers and
        optimizer have to be on return as they were; the caller sees to random numbers.

        Args:
            windows: the run's first ones; read as many as needed, on all ranks alike.
        """

    @abstractmethod
    def run_window(self, window: Window) -> tuple[Any, Any]:
        """Forward and backward of one accumulation window.

        Returns:
            (loss_sum, count) of this rank, on the device, without synchronising: the sum of
            the losses of its samples (or unmasked tokens) and how many there were. Each sample
            is reported by one rank: of ranks that share a model, those that do not see the loss
            return (0.0, 0).

        Afterwards the gradients belong to the mean over the whole global batch (C2), up to
        a factor that `optimizer_step` folds in.
        """

    @abstractmethod
    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        """Unscale, clip to `max_norm` by the global norm, check, step, clear gradients (C6).

        The norm is the whole model's, over all the ranks that hold a part of it.
        """

    @abstractmethod
    def evaluate_window(self, window: Window) -> dict[str, tuple[Any, Any]]:
        """Forward of `window` without gradients: ``{name: (sum, count)}`` of this rank, for
        the loss and each metric. Stand-ins run and count nothing; a rank that does not see the
        model's output returns ``{}``."""

    @abstractmethod
    def set_training(self, training: bool) -> None:
        """Switch the model between training and evaluation."""

    def communication_seconds(self) -> float:
        """Seconds this rank waited for gradients of others, per step, as far as known."""
        return 0.0

    def replicated(self) -> Mapping[str, Any] | None:
        """Trained parameters of which every rank holds a copy, by name, detached; None when there
        are none, or it is not known. Compared now and then, to notice a replica that went astray."""
        return None

    @abstractmethod
    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """Sum float64 `values` element by element over all ranks. One collective."""

    @abstractmethod
    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Rank `root`'s `value`, on every rank."""

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called."""

    @abstractmethod
    def export_state(self) -> BackendState:
        """This rank's share of model, optimizer and scaler, by parameter name, cloned.

        Without collectives: it may fail on one rank alone.
        """

    @abstractmethod
    def import_state(self, reader: StateReader) -> None:
        """Load what any backend on any number of ranks exported."""

    def scaler_state(self) -> dict[str, Any] | None:
        """State of the gradient scaler, None without one."""
        return None

    def release(self) -> None:  # noqa: B027 - most backends replace nothing
        """Give the caller's own model and optimizer back as they came: whole, on every rank.

        Collective. Called once, after a run in the caller's own process; a backend that put
        pieces in their place undoes that here, so that the next `fit` can begin with them. Also
        before ranks on several nodes leave the result, which each node writes whole.
        """

    @abstractmethod
    def teardown(self) -> None:
        """Leave the other ranks. Undoes only what `setup` did."""
