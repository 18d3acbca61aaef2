"""Workbench: everything in the conformance kit that depends on a framework.

The kit compares every backend with plain torch (`oracle`, `problem`). A workbench builds the
same model, optimizers and losses in another framework, and reads its weights back as torch's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distributed.errors import UserError
from distributed.interfaces.state import StateReader
from distributed.registry.catalog import load_target
from distributed.testing.reference_problem import Deep

__all__ = ["WORKBENCHES", "Workbench", "find_workbench"]

WORKBENCHES = {
    "torch": "distributed.testing.torch_workbench:TorchWorkbench",
    "tensorflow": "distributed.testing.tensorflow_workbench:TensorFlowWorkbench",
}
"""`BackendSpec.framework` -> module of its workbench, imported when a test needs it."""


class Workbench(ABC):
    """One framework's twins of what `distributed.testing.reference_problem` has in torch.

    What is handed to a `Trainer` travels to other processes, so functions have to be those of a
    module.
    """

    @abstractmethod
    def model(self, dtype: torch.dtype) -> Any:
        """The twin of `problem.small_model(dtype)`: 6 -> 8 -> tanh -> 3 with the very same weights."""

    def deep_model(self, dropout: float) -> Any:
        """A torch model in float64 with ``blocks`` that count their calls: `problem.Deep`, unless overridden
        where the backend's options need other layers."""
        return Deep(dropout)

    def noisy_model(self) -> Any:
        """A model in float32 with the shapes of `model` whose training draws random numbers (dropout);
        the same weights every time. Without an override nothing is drawn."""
        return self.model(torch.float32)

    @abstractmethod
    def weights(self, model: Any) -> list[Tensor]:
        """`model`'s trainable weights as new float64 torch tensors on the CPU, in the order and
        layout of the torch twin's ``parameters()``: a dense layer's is (outputs, inputs)."""

    @abstractmethod
    def memory_model(self, length: int) -> Any:
        """A model whose only weight, float64 of shape (length,), is zero; called with indices of
        shape (batch,) it returns the weights there."""

    @abstractmethod
    def memory_step(self) -> Callable[[Any, Any], Any]:
        """The training step of `memory_model`: ``(model, batch) ->`` mean of the weights at the
        indices in ``batch[0]``."""

    def memory_task(self) -> dict[str, Any]:
        """Arguments of `Trainer` that train `memory_model`: `memory_step`, unless overridden where the
        backend's options do not allow a training step."""
        return {"training_step": self.memory_step()}

    @abstractmethod
    def optimizer(self, kind: str) -> Any:
        """The twin of `problem.OPTIMIZERS[kind]` as `Trainer` takes it: the config's
        `learning_rate` completes it. Kinds: ``sgd``, ``momentum``, ``adamw``."""

    @abstractmethod
    def weighted_loss(self) -> Callable[[Any, Any], Any]:
        """The twin of `problem.weighted_mean` as ``(output, target) -> (sum, count)``."""

    @abstractmethod
    def validation_step(self) -> Callable[[Any, Any], dict[str, Any]]:
        """``(model, batch) -> {"id": (sum of the targets, how many)}``, after a forward pass."""

    def validation_task(self) -> dict[str, Any]:
        """Arguments of `Trainer` that report the same mean as metric ``id``: `validation_step`, unless
        overridden where the backend's options do not allow one."""
        return {"validation_step": self.validation_step()}

    @abstractmethod
    def halving_schedule(self) -> Any:
        """A scheduler as users of the framework write it, as `Trainer` takes it: halves the
        learning rate at each of its steps."""

    def saved_weights(self, reader: StateReader) -> list[Tensor] | None:
        """As `weights`, of a portable checkpoint of `model`. None, unless overridden: the framework
        names its parameters in its own way."""
        return None

    def data(self, *columns: Tensor) -> Any:
        """Data for `Trainer.fit` with these tensors, batch first."""
        return columns if len(columns) > 1 else columns[0]


def find_workbench(framework: str) -> Workbench:
    """The workbench of `framework`.

    Raises:
        UserError: the kit has none; a test class may bring its own.
    """
    if framework not in WORKBENCHES:
        raise UserError(
            "the conformance kit has no workbench for this framework",
            field="framework",
            got=framework,
            allowed=", ".join(sorted(WORKBENCHES)),
            remedy="Subclass distributed.testing.workbench.Workbench and name it in the test class:"
            " workbench = MyWorkbench",
        )
    bench: Workbench = load_target(WORKBENCHES[framework])()
    return bench
