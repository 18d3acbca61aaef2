"""TaskFacts: facts of the model that a task trains, of whole and of divided ones."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.task import Task
from distributed.operations.planning.codec_trace import ExchangeOptions, with_exchanges
from distributed.operations.planning.collect_facts import collect_facts
from distributed.operations.planning.cut_model import CutOptions
from distributed.operations.planning.optimizer_facts import OPTIMIZERS, settings_of
from distributed.parallel.deferred_build import build_without_data
from distributed.parallel.sample_batch import first_samples
from distributed.planner.estimates.model_facts import Cut, FactsSource, ModelFacts
from distributed.planner.stage_order import FOLDED, LOOPED, ONE_STAGE
from distributed.training.seeding import isolated_rng

__all__ = ["SAMPLES", "TaskFacts"]

_NAMES: dict[Any, str] = {built: name for name, built in OPTIMIZERS.items()}
_PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_SETTINGS = ("momentum", "weight_decay", "amsgrad", "nesterov", "maximize", "foreach", "fused")
"""Settings of an optimizer that change its state or its temporary memory."""
SAMPLES = 2
"""Number of samples from which facts are read."""


def _sharing(source: FactsSource) -> FactsSource:
    """A source that records a stage once for all schedules that place and compute stages in the same way."""

    @cache
    def shared(cut: Cut) -> ModelFacts:
        kinds = (kind for kind in (ONE_STAGE, LOOPED, FOLDED) if cut.schedule in kind)
        first = next(kinds, (cut.schedule,))[0]
        return replace(source(cut._replace(schedule=first)), cut=cut)

    return shared


class TaskFacts:
    """Collects facts from the task's model, its loss and its first samples, under fake tensors. Nothing is
    computed and no memory of a device is used.

    Args:
        task: the objects of the run.
        remedy: what the caller's user can do where there are no facts, as a sentence.
    """

    def __init__(
        self, task: Task, remedy: str = "Give the numbers of the model in place of the model and its data"
    ) -> None:
        self._task, self._remedy = task, remedy
        self._sources: dict[tuple[Any, ...], FactsSource] = {}
        self._model: nn.Module | None = None
        self._batch: Any = None

    def source(self, config: DistributedConfig, precision: str, device: str) -> FactsSource:
        """Facts of each part of the model, collected once.

        Args:
            config: optimizer, blocks and ways to divide the model are its own.
            precision: ``fp32``, ``bf16`` or ``fp16``.
            device: ``cpu`` or ``cuda``.
        """
        name, settings = self.optimizer(config)
        options = CutOptions(
            tensor_plan=config.parallel.tensor_plan,
            context_attention=config.parallel.context_attention,
            stages=config.parallel.stages,
        )
        exchange = ExchangeOptions(
            config.compression, config.on_nan == "skip", not config.find_unused_parameters
        )
        cap = config.bucket_cap_mb
        key = (name, str(settings), precision, device, config.block_classes, str(options), str(exchange), cap)
        if key not in self._sources:
            given = {
                "optimizer": name,
                "optimizer_settings": settings,
                "precision": precision,
                "device": device,
                "block_classes": config.block_classes,
                "options": options,
                "bucket_cap_mb": cap,
                "targets": self._targets(),
            }
            source = _sharing(cache(partial(self._collect, config.seed, given)))
            self._sources[key] = with_exchanges(source, exchange)
        return self._sources[key]

    def model(self, config: DistributedConfig) -> nn.Module:
        """The model of the task; that of a factory is built without data."""
        return self._built(config.seed)

    def weights(self, config: DistributedConfig) -> str:
        """Precision of the parameters, such as ``fp64`` or ``bf16 and fp32``; empty if all are ``fp32``."""
        dtypes = {p.dtype for p in self.model(config).parameters() if p.is_floating_point()}
        names = sorted(_PRECISIONS.get(dtype, str(dtype).removeprefix("torch.")) for dtype in dtypes)
        return "" if names == ["fp32"] else " and ".join(names)

    def optimizer(self, config: DistributedConfig) -> tuple[str, dict[str, Any]]:
        """Name of the optimizer of the task, and those of its settings that change its memory.

        Raises:
            UserError: predictions do not know it.
        """
        given: Any = self._task.optimizer
        if given is None:
            names = ("momentum", "weight_decay") if config.optimizer == "sgd" else ("weight_decay",)
            return config.optimizer, {name: getattr(config, name) for name in names}
        settings: Any = {}
        if isinstance(given, partial):
            given, settings = given.func, given.keywords
        if isinstance(given, torch.optim.Optimizer):
            given, settings = type(given), settings_of(given)
        if given not in _NAMES or settings.get("differentiable"):
            raise UserError(
                "the memory of this optimizer is not predicted",
                field="optimizer",
                got=getattr(given, "__name__", type(given).__name__),
                allowed="AdamW, Adam, SGD, without differentiable",
                remedy="Choose one of these, or measure a run",
            )
        return _NAMES[given], {name: settings[name] for name in _SETTINGS if settings.get(name) is not None}

    def _collect(self, seed: int, given: dict[str, Any], cut: Cut) -> ModelFacts:
        task = self._task
        try:
            with isolated_rng():
                return collect_facts(
                    self._built(seed),
                    self.samples(),
                    loss_fn=task.loss_fn,
                    training_step=task.training_step,
                    cut=cut,
                    **given,
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
                remedy=self._remedy,
            ) from error

    def _targets(self) -> Tensor | None:
        """All targets, where the data is one tensor of them: ranks look through it before training."""
        tensors = getattr(self._task.train_data, "tensors", None)
        return tensors[-1] if tensors is not None and len(tensors) > 1 else None

    def _built(self, seed: int) -> nn.Module:
        if self._model is None:
            given = self._task.model
            is_built = isinstance(given, nn.Module)
            self._model = given if is_built else build_without_data(given, seed)
        return self._model

    def samples(self) -> Any:
        """The first samples, as the data loader yields them.

        Raises:
            UserError: the data is a stream.
        """
        source = self._task.train_data
        if source is None or not source.is_map:
            raise UserError(
                "facts are read from the first samples, and the data is a stream, of which they would be"
                " missing afterwards",
                field="train_loader",
                got="an iterable dataset" if source is not None else "nothing",
                allowed="datasets with __getitem__ and __len__",
                remedy=self._remedy,
            )
        if self._batch is None:
            self._batch = first_samples(source, SAMPLES)
        return self._batch
