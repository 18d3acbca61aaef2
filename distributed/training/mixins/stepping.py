"""SteppingMixin: what an optimizer holds and how it is stepped: modes, closures, groups that are added."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from distributed.checkpoint.dtensor import local_part
from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.backend import Window
from distributed.training.mixins.precision import PrecisionMixin
from distributed.training.model_traits import check_still_trainable

__all__ = ["SteppingMixin", "has_modes", "requires_closure"]


class SteppingMixin(PrecisionMixin):
    """Steps an optimizer as a loop in plain PyTorch does, which calls ``optimizer.train()``,
    ``optimizer.eval()`` and ``optimizer.step(closure)`` where the optimizer needs it.

    Attributes:
        follows_requires_grad: trains a parameter whose ``requires_grad`` changes after `prepare` as plain
            PyTorch does; False calls `follow_trainable` at such a change.
        repeats_windows: forward and backward of a window can be repeated inside a step.
    """

    config: DistributedConfig
    optimizer: torch.optim.Optimizer
    compression: Any
    module: nn.Module
    follows_requires_grad = True
    repeats_windows = True
    run_window: Callable[[Window], tuple[Any, Any]]
    clear_gradients: Callable[[], None]
    all_reduce: Callable[[Sequence[float]], list[float]]
    _window: Window | None = None
    _window_loss: tuple[Any, Any] = (0.0, 0)
    _by_closure: bool | None = None
    _optimizer_trains = False
    _trainable: Mapping[str, tuple[nn.Parameter, bool]] = MappingProxyType({})
    _num_held = 0

    def switch_optimizer(self, training: bool) -> None:
        """Enter the training or evaluation mode of an optimizer that has them, as schedule-free ones."""
        if training != self._optimizer_trains and has_modes(self.optimizer):
            optimizer: Any = self.optimizer
            optimizer.train() if training else optimizer.eval()
            self._optimizer_trains = training

    @contextmanager
    def optimizer_in_evaluation(self) -> Iterator[None]:
        """Within the block, the weights are those that the optimizer evaluates."""
        before = self._optimizer_trains
        self.switch_optimizer(False)
        try:
            yield
        finally:
            self.switch_optimizer(before)

    @contextmanager
    def evaluated(self, shown: AbstractContextManager[Any]) -> Iterator[Any]:
        """The model that `shown` shows, with the weights that the optimizer evaluates."""
        with self.optimizer_in_evaluation(), shown as model:
            yield model

    def prepare_step(self) -> None:
        """Look how `optimizer` is stepped, as far as its signature tells.

        Raises:
            UserError: it needs a closure, and this run has none.
        """
        if requires_closure(self.optimizer):
            self._by_closure = True
            self._check_repeats()
        elif type(self.optimizer).__module__.startswith("torch.optim."):
            self._by_closure = False

    def take_step(self, settle: Callable[[], Any]) -> bool:
        """Step, by a closure where the optimizer needs one; True when the step was skipped.

        Args:
            settle: finishes the gradients of a window that was run.
        """
        if self._by_closure is False:
            return self.scaled_step(self.optimizer)
        before = self._marks()
        if self._by_closure:
            return self._step_by_closure(settle, before)
        try:
            skipped = self.scaled_step(self.optimizer)
        except Exception as error:
            if not lacks_closure(error) or self._marks() != before:
                raise
            self._check_repeats()
        else:
            self._by_closure = False
            return skipped
        self._by_closure = True
        return self._step_by_closure(settle, before)

    def _step_by_closure(self, settle: Callable[[], Any], before: list[float]) -> bool:
        computed = [self._window_loss]

        def closure() -> Tensor:
            if computed and self._marks() != before:
                computed.clear()  # the optimizer has used the first gradient, and moved the weights
            if not computed:
                with torch.enable_grad():
                    self.clear_gradients()
                    assert self._window is not None
                    computed.append(self.run_window(self._window))
                    settle()
            total, count = self.all_reduce([float(value) for value in computed.pop()])
            return torch.tensor(total / count if count else total, dtype=torch.float64)

        self.optimizer.step(closure)  # type: ignore[arg-type]  # torch expects a closure that returns a float
        return False

    def _marks(self) -> list[float]:
        """A number for the values of each parameter."""
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        return [float(torch.linalg.vector_norm(local_part(p.detach()))) for p in parameters if p.numel()]

    @property
    def _parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer holds now: groups may be added during training."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _note_trainable(self) -> None:
        if not self.follows_requires_grad:
            self._trainable = {name: (p, p.requires_grad) for name, p in self.module.named_parameters()}
            self._num_held = len(self._parameters)

    def _check_trainable(self) -> None:
        """Follow a change of what is trained since the last step, where it is not followed by itself."""
        changed = any(p.requires_grad != before for p, before in self._trainable.values())
        if self._trainable and (changed or len(self._parameters) != self._num_held):
            self.follow_trainable()
            self._note_trainable()

    def follow_trainable(self) -> None:
        """Reduce, from now on, the gradients of the parameters that are trained now.

        Raises:
            UserError: this backend cannot, under this plan.
        """
        check_still_trainable(self._trainable, self.config.backend)

    def _check_repeats(self) -> None:
        reasons = {
            "this backend, or a model that ranks divide, computes it once": not self.repeats_windows,
            "a gradient is scaled once under fp16": self.scaler is not None,
            "a codec keeps what it has not sent": self.compression is not None,
            "optimizer_offload moves weights for one gradient": self.config.optimizer_offload,
            "on_nan=skip looks at one gradient": self.config.on_nan == "skip",
        }
        for reason, applies in reasons.items():
            if applies:
                raise self._no_closure(reason)

    def _no_closure(self, reason: str) -> UserError:
        return UserError(
            "the optimizer computes the gradient several times in a step by a closure, and here that is not"
            f" possible: {reason}",
            field="optimizer",
            got=type(self.optimizer).__name__,
            allowed="optimizers whose step() needs no closure, such as SGD and AdamW; others under serial,"
            " pytorch-ddp, fsdp and horovod in fp32 or bf16, without a codec",
            remedy="Choose one of these",
        )


def has_modes(optimizer: Any) -> bool:
    """True if `optimizer` has the methods `train` and `eval`."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def requires_closure(optimizer: Any) -> bool:
    """True if `step` of `optimizer` cannot be called without a closure."""
    step = getattr(type(optimizer), "step", None)
    closure = signature(step).parameters.get("closure") if step is not None else None
    return closure is not None and closure.default is closure.empty


def lacks_closure(error: BaseException) -> bool:
    """True if `error` may come from an optimizer that was stepped without the closure that it needs."""
    return isinstance(error, (TypeError, AssertionError)) or "closure" in str(error)
