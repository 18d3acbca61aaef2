"""Framework: what the caller's process has to know of a framework's models, optimizers and data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from distributed.errors import UserError

if TYPE_CHECKING:
    from distributed.config import DistributedConfig
    from distributed.interfaces.plan import RunPlan
    from distributed.interfaces.state import BackendState, StateReader
    from distributed.interfaces.task import Task

__all__ = ["Framework", "framework_of", "refuse_foreign"]

_NAMES = {"torch": "torch", "keras": "tensorflow", "tensorflow": "tensorflow", "tf_keras": "tensorflow"}
_SAID = {"torch": "a torch", "tensorflow": "a Keras"}


class Framework(ABC):
    """The caller's side of a framework. Ranks need the backend alone."""

    @abstractmethod
    def is_model(self, model: Any) -> bool:
        """Whether `model` is a model already, as against a factory of one."""

    @abstractmethod
    def check(self, model: Any, optimizer: Any) -> None:
        """Refuse early what no rank could train.

        Raises:
            UserError: not this framework's model, nothing in it that learns, or an optimizer
                that is not this model's.
        """

    def check_split(self, model: Any, plan: RunPlan) -> None:  # noqa: B027 - most models are not split
        """Refuse early a model that the ranks of `plan` cannot divide between them.

        Raises:
            UserError: they cannot; names the values that can.
        """

    @abstractmethod
    def carries_rate(self, model: Any, optimizer: Any) -> bool:
        """Whether an optimizer object was given, which has a learning rate of its own."""

    @abstractmethod
    def num_gpus(self) -> int:
        """GPUs that this process may use."""

    @abstractmethod
    def build(self, model: Any, seed: int, task: Task) -> Any:
        """The model of a factory, with all its weights; `task` holds data from which to infer shapes.

        Raises:
            UserError: it builds something else.
        """

    @abstractmethod
    def load_weights(self, reader: StateReader, model: Any) -> None:
        """Put the saved model, not the optimizer, into `model`, in place.

        Raises:
            UserError: names or shapes differ, or stored bytes are damaged.
        """

    @abstractmethod
    def optimizer_of(self, model: Any, optimizer: Any) -> Any:
        """The optimizer object that the caller holds, given or compiled; None if ranks build it."""

    def build_optimizer(self, task: Task, plan: RunPlan) -> Any:
        """The optimizer of `task`, built here if a class or function was given."""
        return task.optimizer

    # `optimizer` is what `optimizer_of` returned, in all that follow.

    @abstractmethod
    def load_state(self, reader: StateReader, model: Any, optimizer: Any) -> None:
        """Put the saved model into `model`, and the state of its optimizer into `optimizer` unless None.

        Raises:
            UserError: as `load_weights`; or the optimizer has other groups. Nothing has changed then.
        """

    @abstractmethod
    def digest(self, value: Any) -> str:
        """Text that differs when a value that `value` holds does, which is a model or an optimizer."""

    @abstractmethod
    def state_of(self, model: Any, optimizer: Any) -> BackendState:
        """The whole state of `model`, and of `optimizer` unless None."""

    @abstractmethod
    def has_history(self, optimizer: Any) -> bool:
        """True if `optimizer` has state of earlier steps that `pack` does not take to the ranks."""

    def without_history(self, optimizer: Any) -> AbstractContextManager[None]:
        """A context in which `optimizer` has no state of earlier steps."""
        return nullcontext()

    def num_bytes(self, model: Any) -> int | None:
        """Bytes of the model's parameters and buffers; None if they are not known in advance."""
        return None

    def read(self, data: Any, argument: str, config: DistributedConfig) -> Any:
        """`data` in a form that `Source.of` reads: this framework's own kinds are translated.

        Raises:
            UserError: data whose samples cannot be split over ranks.
        """
        return data

    def complete(self, task: Task) -> Task:
        """Fill in the training settings of the model itself (a compiled Keras model has some)."""
        return task

    def pack(self, task: Task) -> Task:
        """`task` in a form that can be pickled for started ranks.

        Raises:
            UserError: something in it cannot be pickled.
        """
        return task


def framework_of(value: Any) -> str | None:
    """``torch`` or ``tensorflow`` for an object or class of theirs, without importing either."""
    kind = value if isinstance(value, type) else type(value)
    for base in kind.__mro__:
        name = _NAMES.get(base.__module__.partition(".")[0])
        if name:
            return name
    return None


def refuse_foreign(value: Any, field: str, framework: str) -> None:
    """Raise a UserError when `value` belongs to another framework than `framework`."""
    found = framework_of(value)
    if found is not None and found != framework:
        other = "tensorflow" if found == "tensorflow" else "pytorch-ddp"
        raise UserError(
            f"{_SAID[found]} {field} was given to a backend that trains {framework} models",
            field=field,
            got=value.__name__ if isinstance(value, type) else type(value).__name__,
            allowed=f"{_SAID[framework]} {field}",
            remedy=f"Use a {found} backend, such as backend='{other}', or give {_SAID[framework]} {field}",
        )
