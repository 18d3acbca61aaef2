"""Collect `ModelFacts` from a model and a sample batch, under fake tensors: nothing is computed.

`recorder` runs the micro-batches, `cut_model` divides the model before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from distributed.errors import UserError
from distributed.interfaces.task import Task
from distributed.operations.planning.codec_trace import ExchangeOptions, with_exchanges
from distributed.operations.planning.cut_model import CutOptions, rank_of_cut
from distributed.operations.planning.optimizer_facts import optimizer_facts, optimizer_work
from distributed.operations.planning.private_copies import empty_as, private_copies, unchanged_modules
from distributed.operations.planning.recorder import Recorder, explained, resized_batch
from distributed.planner.estimates.model_facts import BUCKET, WHOLE, Cut, FactsSource, ModelFacts, Timeline
from distributed.planner.estimates.work_facts import WorkFacts
from distributed.training.activation_checkpointing import recompute
from distributed.training.module_modes import ModuleModes
from distributed.training.objective import Objective

__all__ = ["collect_facts", "facts_source"]

_DEFAULTS = CutOptions()
_NO_OPTIONS = ExchangeOptions()
_NO_SETTINGS: Mapping[str, Any] = {}


def collect_facts(
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    training_step: Callable[..., Any] | None = None,
    precision: str = "fp32",
    optimizer: str = "adamw",
    optimizer_settings: Mapping[str, Any] = _NO_SETTINGS,
    block_classes: Sequence[str] = (),
    device: str = "cpu",
    cut: Cut = WHOLE,
    options: CutOptions = _DEFAULTS,
    targets: Tensor | None = None,
    bucket_cap_mb: float = BUCKET / 2**20,
) -> ModelFacts:
    """Facts about training `model`, or what one rank of a cut has of it.

    Args:
        model: on any device, the meta device included. It is not changed.
        batch: one micro-batch as the data loader yields it, of any number of samples; only shapes and dtypes
            are read. The first dimension of each tensor is that of samples.
        loss_fn: as the `Trainer` takes it. A copy of it is recorded.
        training_step: as the `Trainer` takes it. A copy of it is recorded.
        precision: ``fp32``, ``bf16`` or ``fp16``: autocast as in training.
        optimizer: name of the optimizer that the configuration builds.
        optimizer_settings: arguments of torch's class of this name, such as ``momentum``.
        block_classes: class names of the blocks, as the configuration has them.
        device: of the rank.
        cut: the ranks that divide the model, which is cut as the backends of a mesh cut it.
        options: how they do so.
        targets: all targets of the data, where they are one tensor: whether some are masked is known before.
        bucket_cap_mb: size of a bucket of gradients in MiB.

    Raises:
        UserError: the model's control flow depends on values, which fake tensors do not have; or what it
            allocates does not grow in proportion to the samples; or the model cannot be cut so; or the loss
            or the training step cannot be copied.
    """
    settings = {"foreach": device != "cpu", **optimizer_settings}
    device = _recorded_on(device)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with rank_of_cut(cut, options) as part, unchanged_modules(), fake:
        memo = _fake_tensors(model, device)
        copied = copy.deepcopy(model, memo)
        ModuleModes().set_training(copied, True)
        with unset_fake_temporarily():
            loss_fn, training_step = private_copies(
                (loss_fn, training_step), memo, partial(_fake, fake, device)
            )
        objective = Objective(loss_fn, training_step, device=device)
        if targets is not None:
            with unset_fake_temporarily():
                objective.declare_unmasked(targets)
        with explained():
            resize = partial(resized_batch, batch, device=device)
            task = Task(copied, loss_fn=loss_fn, training_step=training_step)
            part.cut(task, objective, resize, partial(_call_model, training_step))
        recorder = Recorder(copied, block_classes, objective, batch, precision, device, part)
        plain = recorder.pair()
        halves = recorder.pair(in_halves=True) if part.splits_backward else (None, None)
        again, refused = (None, "") if part.splits_backward else _recomputed(recorder)
        received = recorder.received()
        parameters = recorder.parameter_facts()
    return ModelFacts(
        name=type(model).__name__,
        parameters=parameters,
        blocks=recorder.block_facts(),
        buffers=tuple(b.numel() * b.element_size() for b in copied.buffers() if not b.is_meta),
        first=plain[0],
        later=plain[1],
        first_recomputed=again[0] if again else None,
        later_recomputed=again[1] if again else None,
        first_halves=halves[0],
        later_halves=halves[1],
        optimizer=optimizer_facts(optimizer, **settings),
        precision=precision,
        optimizer_name=optimizer,
        work=WorkFacts(recorder.work(), optimizer_work(optimizer, **settings)),
        cut=cut,
        received=received,
        cannot_recompute=refused,
        counts_targets=objective.counted,
        bucket_bytes=bucket_cap_mb * 2**20,
    )


def facts_source(
    model: nn.Module, batch: Any, exchange: ExchangeOptions = _NO_OPTIONS, **given: Any
) -> FactsSource:
    """What collects facts of each cut of `model`, each once.

    Args:
        model, batch, given: as `collect_facts` takes them, without `cut`.
        exchange: how gradients are exchanged where a cut has a codec.
    """
    return with_exchanges(cache(partial(_facts_of, model, batch, given)), exchange)


def _facts_of(model: nn.Module, batch: Any, given: Mapping[str, Any], cut: Cut) -> ModelFacts:
    return collect_facts(model, batch, cut=cut, **given)


def _recorded_on(device: str) -> str:
    """The device of the fake tensors. Autograd asks a GPU for its streams, even for fake tensors; where there
    is none, the operations of CPUs are recorded, which differ in what autocast and fused kernels allocate."""
    return device if device == "cpu" or torch.cuda.is_available() else "cpu"


def _fake(mode: FakeTensorMode, device: str, tensor: Tensor) -> Tensor:
    device = device if tensor.is_meta else str(tensor.device)
    with mode:
        return empty_as(tensor, device)


def _fake_tensors(model: nn.Module, device: str) -> dict[int, Any]:
    """A memo of `copy.deepcopy` by which parameters and buffers of `model` become fake tensors on `device`;
    no data is copied."""

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)

    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(fake(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = fake(buffer)
    return memo


def _recomputed(recorder: Recorder) -> tuple[tuple[Timeline, Timeline] | None, str]:
    """The same with activation checkpointing; None where a model cannot be trained so, and why."""
    try:
        lever = recompute(recorder.model, recorder.blocks[1:], "full")
    except UserError as error:
        return None, error.message
    try:
        return recorder.pair(), ""
    except Exception as error:  # noqa: BLE001 - layers with a state fail in ways of their own
        return None, str(getattr(error, "message", error)).partition("\n")[0]
    finally:
        lever.undo()


def _call_model(training_step: Callable[..., Any] | None, model: nn.Module, batch: Any) -> Any:
    """The output of the model for a batch, called as a training step calls it."""
    if training_step is not None:
        return training_step(model, batch)
    return model(**batch) if isinstance(batch, Mapping) else model(*batch[:-1])
