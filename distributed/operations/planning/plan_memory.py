"""PlanMemory: predict the memory of a rank for plans of one task, from facts of the task's own objects."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from distributed.errors import UserError
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.task import Task
from distributed.operations.planning.collect_facts import collect_facts
from distributed.parallel.deferred_build import build_without_data
from distributed.parallel.sample_batch import first_samples
from distributed.planner.estimates.device_memory import CUDA, DeviceMemory
from distributed.planner.estimates.ledger import MemoryParts
from distributed.planner.estimates.memory import predict_memory
from distributed.planner.estimates.model_facts import ModelFacts
from distributed.planner.estimates.split_of_plan import split_of
from distributed.training.seeding import isolated_rng

__all__ = ["PlanMemory", "in_units"]

_NAMES: dict[Any, str] = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.SGD: "sgd"}
_HOST = DeviceMemory(copies_in_collectives=True)
_SAMPLES = 2
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


class PlanMemory:
    """Predicts from the task's model, its loss and its first samples. Facts are collected once for each
    precision and optimizer. Nothing is computed and no memory of a device is used.

    Args:
        task: the objects of the run.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._facts: dict[tuple[Any, ...], ModelFacts] = {}
        self._model: nn.Module | None = None
        self._batch: Any = None

    def parts(self, plan: RunPlan) -> MemoryParts:
        """Memory of the rank that needs most, at the peak of a step.

        Raises:
            UserError: it is not predicted; the message says why.
        """
        split = split_of(plan)
        name, momentum = self._optimizer(plan)
        split = replace(split, optimizer=name)
        device = "cpu" if plan.device == "cpu" else "cuda"
        key = (split.precision, name, momentum, plan.config.block_classes, device)
        if key not in self._facts:
            self._facts[key] = self._collect(plan, *key)
        return predict_memory(self._facts[key], split, _HOST if device == "cpu" else CUDA)

    def _collect(
        self, plan: RunPlan, precision: str, name: str, momentum: float, blocks: Any, device: str
    ) -> ModelFacts:
        task = self._task
        try:
            with isolated_rng():
                return collect_facts(
                    self._built(plan),
                    self._samples(),
                    loss_fn=task.loss_fn,
                    training_step=task.training_step,
                    precision=precision,
                    optimizer=name,
                    momentum=momentum,
                    block_classes=blocks,
                    device=device,
                )
        except UserError:
            raise
        except Exception as error:
            # The user's own code may raise anything where tensors have no values.
            raise UserError(
                f"the model does not run without values ({type(error).__name__}: {error})",
                field="model",
                got=type(self._model).__name__,
                allowed="operations on tensors that are not read in Python",
                remedy="Set batch_size to a number, or let batch_size=auto find it by running steps",
            ) from error

    def _built(self, plan: RunPlan) -> nn.Module:
        if self._model is None:
            given = self._task.model
            is_built = isinstance(given, nn.Module)
            self._model = given if is_built else build_without_data(given, plan.config.seed)
        return self._model

    def _samples(self) -> Any:
        source = self._task.train_data
        if source is None or not source.is_map:
            raise UserError(
                "facts are read from the first samples, and the data is a stream, of which they would be"
                " missing afterwards",
                field="train_loader",
                got="an iterable dataset" if source is not None else "nothing",
                allowed="datasets with __getitem__ and __len__",
                remedy="Give such a dataset, or set batch_size to a number",
            )
        if self._batch is None:
            self._batch = first_samples(source, _SAMPLES)
        return self._batch

    def _optimizer(self, plan: RunPlan) -> tuple[str, float]:
        """Name and momentum of the optimizer of the task."""
        given: Any = self._task.optimizer
        if given is None:
            return plan.config.optimizer, plan.config.momentum
        settings: Any = {}
        if isinstance(given, partial):
            given, settings = given.func, given.keywords
        if isinstance(given, torch.optim.Optimizer):
            given, settings = type(given), given.defaults
        if given not in _NAMES or settings.get("amsgrad"):
            raise UserError(
                "the memory of this optimizer is not predicted",
                field="optimizer",
                got=getattr(given, "__name__", type(given).__name__),
                allowed="AdamW, Adam, SGD",
                remedy="Choose one of these, or measure a run",
            )
        return _NAMES[given], float(settings.get("momentum", 0.0))


def in_units(nbytes: int) -> str:
    """``1.4 GiB``: three digits."""
    for unit, name in _UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}" if nbytes < 1000 * unit else f"{nbytes / unit:,.0f} {name}"
    return f"{nbytes} B"
