"""Task: what the user gave, as it travels to the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

__all__ = ["Progress", "Task"]


@dataclass
class Progress:
    """The cursor (C4) and the counters beside it.

    Attributes:
        epoch: index of the epoch under way.
        samples: samples of this epoch already trained on.
        step: optimizer steps taken over the whole run, skipped ones included.
        total_samples: samples trained on over the whole run.
        best_metric: best value so far of the metric that chooses checkpoints.
        best_accuracy: best validation accuracy so far.
        stop_reason: why a callback ended the run here; None while the run may continue.
        stop_epochs: number of epochs at which the run would otherwise have ended; None without a stop or
            a limit.
        stop_steps: the same in optimizer steps.
    """

    epoch: int = 0
    samples: int = 0
    step: int = 0
    total_samples: int = 0
    best_metric: float | None = None
    best_accuracy: float | None = None
    stop_reason: str | None = None
    stop_epochs: int | None = None
    stop_steps: int | None = None


@dataclass
class Task:
    """Everything a rank needs that is not configuration. Pickled in one graph, so that an
    optimizer still points at its model's parameters on arrival.

    Attributes:
        model: a module, or a factory without arguments that builds one.
        optimizer: an optimizer, an optimizer class or partial, or a factory from the model.
        scheduler: a scheduler, or a factory from the optimizer; None for the config's.
        loss_fn: ``(output, target) -> mean`` or ``(sum, count)``; None for cross-entropy.
        training_step: ``(model, batch) -> mean`` or ``(sum, count)``, instead of `loss_fn`.
        validation_step: ``(model, batch) -> {name: (sum, count)}``, instead of loss and metrics.
        metrics: ``{name: (output, target) -> (sum, count)}``.
        train_data: a `distributed.data.Source` for training.
        val_data: name -> the same for validation; a single set is called "".
        callbacks: the user's callbacks.
        progress: position from which to resume; None at the start.
        state_dir: a portable checkpoint to load before the first step, or None.
        given_dir: a portable checkpoint of what the caller's objects hold, where that is not what `state_dir`
            has, or None.
        held: digests of the caller's objects as an earlier `fit` left them; not for ranks.
        run_state: what an earlier `fit` in the same process left behind (scaler, RNG).
        training: identifies the training from its first step on, if it does not continue another.
    """

    model: Any
    optimizer: Any = None
    scheduler: Any = None
    loss_fn: Callable[..., Any] | None = None
    training_step: Callable[..., Any] | None = None
    validation_step: Callable[..., Any] | None = None
    metrics: Mapping[str, Callable[..., Any]] | None = None
    train_data: Any = None
    val_data: Mapping[str, Any] = field(default_factory=dict)
    callbacks: list[Any] = field(default_factory=list)
    progress: Progress | None = None
    state_dir: str | None = None
    given_dir: str | None = None
    held: dict[str, Any] | None = None
    run_state: dict[str, Any] | None = None
    training: str = field(default_factory=lambda: token_hex(16))
