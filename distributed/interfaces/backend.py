"""Backend: how ranks cooperate. It is not nccl, gloo or mpi: that is `communication_backend`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from distributed.errors import UserError
from distributed.interfaces.placement import World

if TYPE_CHECKING:
    from distributed.interfaces.backend_spec import BackendSpec
    from distributed.interfaces.plan import RunPlan
    from distributed.interfaces.state import BackendState, StateReader
    from distributed.interfaces.task import Task

__all__ = ["Backend", "CommunicationTimes", "MicroBatch", "SharedSettings", "StepResult", "Window"]


class MicroBatch(NamedTuple):
    """One forward's input.

    Attributes:
        batch: what the collate function returned, still on the host.
        num_samples: how many of its samples count. 0 marks a placeholder: run it for its
            collectives, with weight zero, where there are any.
    """

    batch: Any
    num_samples: int


class Window(NamedTuple):
    """What one optimizer step consumes: this rank's micro-batches of one global batch.

    Attributes:
        micro_batches: the same number on every rank; ranks with less data hold placeholders.
        num_samples: samples in the whole global batch, over all ranks.
    """

    micro_batches: Sequence[MicroBatch]
    num_samples: int


class StepResult(NamedTuple):
    """What became of one optimizer step.

    Attributes:
        norm: global L2 norm of the unscaled gradient before clipping, as a number or a
            0-dimensional tensor on the device; None when not requested.
        skipped: the step was not taken (non-finite gradients). The same on all ranks.
    """

    norm: Any
    skipped: bool


class CommunicationTimes(NamedTuple):
    """Seconds per optimizer step that gradients of other ranks take on this rank.

    Attributes:
        exposed: in which the rank waits for them and computes nothing; a slower rank is waited for, too.
        total: in which a reduction is under way, from launch to completion; None if that is not known.
        compute: in backward, during which reductions can be under way; None for all of backward without the
            exposed seconds.
    """

    exposed: float
    total: float | None = None
    compute: float | None = None

    def hidden_share(self, backward: float) -> float | None:
        """Share of what could be hidden that was, from 0 to 1: (T_comp + T_comm - T_step) /
        min(T_comp, T_comm), where T_step = T_comp + exposed. None if it is not known.

        Args:
            backward: seconds of a step's backward, with the exposed ones.
        """
        compute = max(0.0, backward - self.exposed) if self.compute is None else self.compute
        if self.total is None or min(compute, self.total) <= 0.0:
            return None
        return min(1.0, max(0.0, (self.total - self.exposed) / min(compute, self.total)))


class SharedSettings(ABC):
    """Values that must be equal on all ranks, such as hyperparameters.

    Attributes:
        is_written: a callback on all ranks may have changed weights, so that replicas have to be compared.
    """

    is_written = False

    @property
    def is_known(self) -> bool:
        """True if this rank knows its values: not what losses are means of, if it had no sample yet."""
        return True

    @abstractmethod
    def digest(self) -> float:
        """A whole number below 2**32 that tells different values apart."""

    @abstractmethod
    def check_equal(self, backend: Backend) -> None:
        """Compare the values of all ranks. Collective.

        Raises:
            UserError: they differ; names the first difference.
        """

    def watch(self, holders: Sequence[tuple[str, Any]]) -> None:  # noqa: B027 - optional
        """Let `unchanged_by` compare attributes of `holders`, too: (name in words, object)."""

    @abstractmethod
    def unchanged_by(self, callback: Any) -> AbstractContextManager[None]:
        """Refuse a change that an event of `callback` makes inside the block and that is not trained on all
        ranks: any on rank 0 alone, and one of weights where the backend trains copies.

        Raises:
            UserError: a value has changed.
        """


class Backend(ABC):
    """How ranks cooperate. The loop calls these in this order, on every rank.

    ``setup -> prepare -> (run_window -> optimizer_step)* -> export_state -> release -> teardown``

    Attributes:
        spec: what it was registered as.
        world: after `setup`.
        module: after `prepare`: the user's module, unwrapped.
        optimizer: after `prepare`: the optimizer in use.
        timers: where forward, backward and optimizer seconds go (`mixins.timing`).
        omitted: names of parameters that `export_state` leaves out.
        reads_own_parameters: `import_state` reads a state in which ranks have parameters of their own.
        copies_in_evaluation: its forward pass in evaluation has collectives, for which a rank without a
            sample calls the user's code with a copy of others.
        fewest_samples: after `prepare`: samples that a micro-batch of a smaller global batch has at least.
    """

    omitted: Collection[str] = ()
    reads_own_parameters = False
    copies_in_evaluation: Any = False
    fewest_samples = 1
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

    def take_batch(self, plan: RunPlan) -> None:
        """Take the batch of `plan` in place of that which `setup` was given. Between `setup` and `prepare`,
        where ranks have chosen a micro-batch; only with the capability ``auto_batch``."""
        raise NotImplementedError(f"{type(self).__name__} claims auto_batch and has no take_batch")

    @abstractmethod
    def prepare(self, task: Task) -> None:
        """Take the task's model and optimizer, place and wrap them. Collective."""

    def warm_up(self, windows: Iterator[Window]) -> None:  # noqa: B027 - most engines have no such state
        """Bring the engine to where it stands after a run's first step, if its later steps are
        computed in another way than its first. Collective.

        Called under ``deterministic`` after `prepare` and before a saved state is loaded, so that
        training continues with the same bits as without an interruption. Gradients, buffers and
        optimizer must be unchanged on return; the caller restores random numbers.

        Args:
            windows: the run's first ones; read as many as needed, the same number on all ranks.
        """

    @property
    def loads_ahead(self) -> bool:
        """Whether `load_ahead` copies what `run_window` will use."""
        return False

    def load_ahead(self, window: Window) -> None:  # noqa: B027 - on a CPU there is nothing to copy
        """Begin to copy a later window to the device. Only if `loads_ahead`."""

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

    def synchronize(self) -> None:  # noqa: B027 - most backends keep their ranks equal in every step
        """Give all ranks the same weights, if they have their own between steps. Collective.

        Called at the end of each epoch, before validation, and where training ends; without a step since the
        last time it changes nothing.
        """

    def undisturbed(self) -> AbstractContextManager[None]:
        """A context after which buffers that its forward passes have changed are as before."""
        return nullcontext()

    @abstractmethod
    def evaluate_window(self, window: Window) -> dict[str, tuple[Any, Any]]:
        """Forward of `window` without gradients: ``{name: (sum, count)}`` of this rank, for
        the loss and each metric. Stand-ins run and count nothing; a rank that does not see the
        model's output returns ``{}``."""

    @abstractmethod
    def set_training(self, training: bool) -> None:
        """Switch the model between training and evaluation."""

    def switch_optimizer(self, training: bool) -> None:  # noqa: B027 - optional
        """Switch an optimizer that has modes, so that the weights are those that it trains or evaluates."""

    def communication_seconds(self) -> float:
        """Seconds this rank waited for gradients of others, per step since the last call, if a backend knows
        no more than that. A backend that knows more has `communication_times`."""
        return 0.0

    def communication_times(self) -> CommunicationTimes | None:
        """Time of the communication of gradients per step since the last call; None if it is not known.

        It must not synchronise a device. Unless it is overridden, it is known to a backend that has its own
        `communication_seconds`, and on a single rank, where it is zero.
        """
        if self.world.size > 1 and type(self).communication_seconds is Backend.communication_seconds:
            return None
        return CommunicationTimes(self.communication_seconds())

    def interval_metrics(self) -> Mapping[str, float]:
        """Metrics of this rank since the last call, for the log record of an interval."""
        return {}

    def replicated(self) -> Mapping[str, Any] | None:
        """What every rank of `replica_set` holds a copy of, of the trained parameters, by name, detached;
        None when there is nothing, or it is not known. Compared now and then, to notice a replica that went
        astray."""
        return None

    @property
    def replica_set(self) -> tuple[int, int]:
        """Index of the set of ranks that hold the same copies as this rank, and number of such equal sets.
        Where ranks share a model, each part of it has copies of its own."""
        return 0, 1

    def leave_out(self, names: Collection[str]) -> None:
        """Set what the next `export_state` leaves out, if the backend has `weight_digests`."""
        self.omitted = frozenset(names)

    def weight_digests(self, names: Collection[str]) -> Mapping[str, int] | None:
        """This rank's share in the digests of parameters (`distributed.checkpoint.weight_digests`), None if
        the backend cannot leave parameters out of a checkpoint."""
        return None

    def whole_model(self) -> AbstractContextManager[Any]:
        """The model with all parameters on this rank, to read; see `Context.whole_model`. Collective."""
        return nullcontext(self.module)

    def settings(self) -> SharedSettings | None:
        """After `prepare`: what must be equal on all ranks besides weights. The ranks compare it when
        training begins and at log steps. None compares nothing."""
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

    def clear_gradients(self) -> None:  # noqa: B027 - frameworks without gradients on their variables
        """Drop gradients that were computed outside of a step."""

    def scaler_state(self) -> dict[str, Any] | None:
        """State of the gradient scaler, None without one."""
        return None

    def leftover_state(self) -> Any:
        """What a later `fit` in this process needs besides model, optimizer and scaler: `prepare` finds it in
        ``task.run_state["backend"]``."""
        return None

    def alone(self) -> Backend:
        """After `release`: this rank as the only one, which exports the whole state."""
        single = copy(self)
        single.world = World(host=self.world.host, device=self.world.device)
        return single

    def release(self) -> None:  # noqa: B027 - most backends replace nothing
        """Give the caller's own model and optimizer back as they came: whole, on every rank.

        Collective. Called once, after a run in the caller's own process; a backend that put
        pieces in their place undoes that here, so that the next `fit` can begin with them. Also
        before ranks on several nodes leave the result, which each node writes whole.
        """

    @abstractmethod
    def teardown(self) -> None:
        """Leave the other ranks. Undoes only what `setup` did."""

    def start_outside_fit(self, plan: RunPlan) -> World:
        """`setup` for a loop of the user's own, which uses the framework's collectives: a single rank gets
        what they need, too. Collective.

        Raises:
            UserError: as `setup`.
        """
        return self.setup(plan)

    def engine_outside_fit(
        self, plan: RunPlan, model: Any, optimizer: Any, scheduler: Any
    ) -> tuple[Any, Any, Any]:
        """The framework's own engine around `model`, for a loop of the user's own. Collective.

        Args:
            plan: of the ranks that a launcher started, or of this process alone.
            model: the user's.
            optimizer: as for `Trainer`; None builds the config's.
            scheduler: of the optimizer, or a function from the optimizer to one, or None.

        Returns:
            (engine, the optimizer that it steps, the scheduler).

        Raises:
            UserError: the backend has no such engine, or cannot train `model`.
        """
        raise UserError(
            f"backend '{plan.spec.name}' has no engine for a loop of your own",
            field="backend",
            got=plan.spec.name,
            remedy="Use Trainer.train_step, or setup_distributed",
        )

    def average_outside_fit(self, value: float, name: str) -> float:
        """The mean of `value` over the ranks that a launcher started, in code around `fit`. Collective;
        called without `setup`.

        Args:
            value: this rank's.
            name: of the metric, the same on all ranks.

        Raises:
            UserError: the backend cannot, or its ranks have not met.
        """
        raise UserError(
            "this backend averages metrics inside `fit` only",
            field="metric_average",
            remedy="Return the metric from validation, or use a callback",
        )
