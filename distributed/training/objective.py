"""Objective: from a model and a batch to (sum of losses, how many there were).

The loop divides by the count of the whole global batch (C2), so a loss is needed as a sum
with its count. How it is counted:

- cross-entropy and NLL with class indices: unmasked targets (`ignore_index`, -100 unless
  set), weighed as torch weighs them when class weights are given;
- any other loss module that returns a mean: the samples of the micro-batch;
- a `loss_fn`, `training_step` or model that returns ``(sum, count)``: that count;
- one that returns a mean: what torch has averaged over, if a loss of `torch.nn.functional` computed it
  (see `mean_losses`); the divisor of a sum, or the number of selected elements (see `loss_graph`);
  otherwise the samples.

A batch that is a mapping is passed to the model by name, which then computes its own loss.

The default cross-entropy is for class indices; `task_checks` refuses what it cannot train.
"""

from __future__ import annotations

import copy
import logging
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed.checkpoint.dtensor import is_sharded
from distributed.errors import UserError
from distributed.training.error_notes import notes_batch
from distributed.training.loss_graph import average_of, has_constant_divisor, is_sum, other_divisor
from distributed.training.mean_losses import MeanLosses, class_weight, mixes_samples
from distributed.training.model_outputs import call_by_name, check_output, logits_of, read_loss
from distributed.training.task_checks import (
    check_by_name,
    check_class_axis,
    check_default_target,
    check_loss,
    check_rows,
    read_measured,
    read_pair,
    refuse_chosen_batch,
    refuse_pairs,
)

__all__ = ["Objective", "accuracy", "align_classes", "split_batch"]

logger = logging.getLogger("distributed")

Terms = tuple[Tensor, "Tensor | int"]

_MEANS = ("mean", "batchmean")
_CHOSEN = ". batch_size=auto chooses the micro-batches by the memory of the machine"
_SHORT = 256
"""Targets that are read faster as a list than with an operation of torch."""
_ELEMENTWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss, nn.SoftMarginLoss)
"""Losses whose arguments torch broadcasts."""


class Objective:
    """The loss and metrics of a task.

    Args:
        warns: whether to warn of a loss whose weight is not known, which matters if a global batch consists
            of several micro-batches.
        is_chosen: whether ``batch_size=auto`` chooses the size of a micro-batch: a loss whose value depends
            on it is refused.
        compares_samples: whether the loss was seen to do so at several sizes; None where that is not known,
            and the targets of the first micro-batch decide.

    Attributes:
        counted: whether the count is only known after the forward pass, so that it has to be
            reduced beside the gradients. Otherwise it is the number of samples.
        metrics: name -> ``(output, target) -> (sum, count)``.
        averaged_over: what the losses of the last window are means of; None before its first micro-batch.
        averages: digest of these over all micro-batches of the run, which is equal on all ranks.
        pieces: into how many pieces a micro-batch is cut before the loss sees it.
        other_count: with `warns`, targets of a loss that is weighted by samples instead; None without one.

    Raises:
        UserError: `loss_fn` is not a function or module that returns a mean.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any] | None = None,
        training_step: Callable[..., Any] | None = None,
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        validation_step: Callable[..., Any] | None = None,
        device: str = "cpu",
        warns: bool = False,
        is_chosen: bool = False,
        compares_samples: bool | None = None,
    ) -> None:
        check_loss(loss_fn)
        loss_fn = _placed(loss_fn, device)
        self._sum_loss, self._ignore_index, self._class_weights = _as_sum(loss_fn)
        self._loss_fn, self._training_step = loss_fn, training_step
        self._mean_loss: Callable[..., Any] = loss_fn or F.cross_entropy
        self._form: tuple[Any, ...] | None = None
        self._validation_step = validation_step
        classifies = self._sum_loss is not None and training_step is None
        self._logits = classifies and _is_cross_entropy(loss_fn)
        self._reads_pairs = "loss_fn" if loss_fn is not None else "metrics" if metrics else None
        if metrics is None and classifies:
            metrics = {"accuracy": partial(accuracy, ignore_index=self._ignore_index)}
        self.metrics = dict(metrics or {})
        self._means, self._warns, self._is_chosen = MeanLosses(), warns, is_chosen
        self._compares_samples = compares_samples
        self.averaged_over: str | None = None
        self.averages = 0
        self._last_average, self._num_missed = "", 0
        self.pieces = 1
        self.other_count: int | None = None
        mean_module = isinstance(loss_fn, nn.Module) and getattr(loss_fn, "reduction", None) in _MEANS
        self.counted = training_step is not None or classifies or not mean_module
        self._elementwise = isinstance(loss_fn, _ELEMENTWISE)

    def declare_unmasked(self, targets: Tensor) -> None:
        """Look through all `targets` once; without a masked one the count is arithmetic.

        Raises:
            UserError: they are floating-point numbers and no loss was given.
        """
        if self._training_step is None and self._loss_fn is None:
            check_default_target(targets)
        plain = self._class_weights is None and self._training_step is None
        if self._sum_loss is not None and plain and not targets.is_floating_point():
            per_sample = targets.dim() == 1
            self.counted = not per_sample or bool((targets == self._ignore_index).any())

    @property
    def functions(self) -> dict[str, Any]:
        """The loss and the step that were given, by name."""
        return {"loss_fn": self._loss_fn, "training_step": self._training_step}

    @property
    def takes_parts_of_classes(self) -> bool:
        """Whether the loss can be computed from logits (DTensors) of which each rank has some classes."""
        smoothing = getattr(self._sum_loss, "label_smoothing", 0.0)
        if isinstance(self._sum_loss, partial):
            smoothing = self._sum_loss.keywords.get("label_smoothing", 0.0)
        return self._logits and self._class_weights is None and not smoothing

    def weighs_means(self, batch: Any) -> bool:
        """Whether the loss of `batch` is a mean over something that only the forward pass shows."""
        return self._training_step is not None or self._sum_loss is None or isinstance(batch, Mapping)

    def begin_window(self) -> None:
        """The next micro-batch is the first of a global batch."""
        self.averaged_over = None

    @notes_batch
    def __call__(self, model: Callable[..., Any], batch: Any, num_samples: int) -> Terms:
        """(sum of losses, count) of a micro-batch with `num_samples` samples.

        Raises:
            UserError: there is no loss, or micro-batches of the window have means of different kinds.
        """
        if self._training_step is not None:
            return self._computed(self._training_step, model, batch, num_samples)
        if isinstance(batch, Mapping):
            check_by_name(batch, self._reads_pairs)
            return self._computed(call_by_name, model, batch, num_samples)
        inputs, target = split_batch(batch)
        return self._terms(logits_of(model(*inputs)), target, num_samples)

    def known_count(self, batch: Any) -> float | None:
        """The count of a batch still on the host, if its targets determine it; else None.

        Looking at host memory costs no synchronisation with a device.
        """
        if self._sum_loss is None or self._training_step is not None or isinstance(batch, Mapping):
            return None
        target = batch[-1]
        if not isinstance(target, Tensor) or target.is_floating_point() or target.device.type != "cpu":
            return None
        if self._class_weights is None and target.numel() <= _SHORT:
            return target.numel() - target.flatten().tolist().count(self._ignore_index)
        if self._class_weights is None and self._ignore_index < 0 and int(target.min()) >= 0:
            return target.numel()
        kept = target != self._ignore_index
        if self._class_weights is None:
            return int(torch.count_nonzero(kept))
        return float(class_weight(self._class_weights, target, kept))

    @notes_batch
    def mean(self, model: Callable[..., Any], batch: Any, num_samples: int) -> Tensor:
        """Mean loss of a micro-batch whose count is known before.

        Raises:
            UserError: it is a mean over something else than the `num_samples` samples.
        """
        inputs, target = split_batch(batch)
        output = model(*inputs)
        if type(output) is not Tensor or type(target) is not Tensor:
            return self._checked_mean(logits_of(output), target, num_samples)
        # What is checked depends on these alone, and they are mostly those of the micro-batch before.
        form = output.shape, target.shape, target.dtype, num_samples
        if form == self._form:
            fast: Tensor = self._mean_loss(output, target)
            return fast
        mean = self._checked_mean(output, target, num_samples)
        self._form = form if output.dim() <= 2 else None
        return mean

    def _checked_mean(self, output: Any, target: Any, num_samples: int) -> Tensor:
        if self._sum_loss is not None:
            output, target = self._aligned(output, target)
        else:
            if self._elementwise and mixes_samples(output, target):
                refuse_pairs(output.shape, target.shape)
            check_rows(target, num_samples, self._loss_fn)
        result: Tensor = self._mean_loss(output, target)
        return _plain(result)

    @notes_batch
    def evaluate(self, model: Callable[..., Any], batch: Any, num_samples: int) -> dict[str, Any]:
        """``{name: (sum, count)}`` of the loss and every metric."""
        if self._validation_step is not None:
            measured = self._validation_step(model, batch)
            return read_measured(measured)
        if self._training_step is not None or isinstance(batch, Mapping):
            return {"loss": self(model, batch, num_samples)}
        inputs, target = split_batch(batch, "val_loader")
        output = logits_of(model(*inputs))
        found: dict[str, Any] = {"loss": self._terms(output, target, num_samples)}
        for name, metric in self.metrics.items():
            found[name] = read_pair(name, metric(output, target), "metrics")
        return found

    def _terms(self, output: Any, target: Any, num_samples: int) -> Terms:
        if self._sum_loss is None:
            assert self._loss_fn is not None
            return self._computed(self._loss_fn, output, target, num_samples)
        output, target = self._aligned(output, target)
        total = _plain(self._sum_loss(output, target))
        if target.is_floating_point():
            return total, target.numel() // target.shape[1]
        if self._class_weights is not None:
            return total, class_weight(self._class_weights, target, target != self._ignore_index)
        return total, (target != self._ignore_index).sum()

    def _aligned(self, output: Any, target: Any) -> tuple[Any, Any]:
        """Output and target as a cross-entropy needs them, after checking what it would train in silence."""
        check_output(output)
        if self._loss_fn is None:
            check_default_target(target)
        if is_sharded(output) and isinstance(target, Tensor) and target.is_floating_point():
            output = output.full_tensor()
        output, target = align_classes(output, target)
        if self._logits:
            check_class_axis(output)
        return output, target

    def _computed(self, function: Callable[..., Any], first: Any, second: Any, num_samples: int) -> Terms:
        """What `function` returns as (sum, count)."""
        is_first = self._means.is_first
        with self._means.recording():
            result = function(first, second)
        field = "training_step" if self._training_step else "loss_fn" if self._loss_fn else "model"
        self._warn_of_pairs(field)
        loss, count = read_loss(result, field)
        if count is not None:
            kind = "a count"
        elif (mean := self._means.of(loss)) is not None:
            if mean.pairs:
                refuse_pairs(field=field)
            kind, (loss, count) = mean.kind, _sum_of(loss, mean.count)
        elif (average := average_of(loss)) is not None:
            if is_first and has_constant_divisor(loss, num_samples):
                _refuse_loss(f"a sum over the {num_samples} samples of a micro-batch", field)
            kind, (loss, count) = average[0], _sum_of(loss, average[1])
        else:
            kind = "samples"
            self._check_weight(loss, second, num_samples, field)
            loss, count = loss * num_samples, num_samples
        if torch.is_grad_enabled():
            self._note_average(kind, field)
        self._means.forget()
        return loss, count

    def _note_average(self, kind: str, field: str) -> None:
        """Refuse means of different kinds in one window: their counts cannot be added."""
        if self.averaged_over not in (None, kind):
            raise UserError(
                "micro-batches of one global batch have losses that are means over different things, which"
                " cannot be weighed against each other",
                field=field,
                got=f"{self.averaged_over}, then {kind}",
                allowed="one kind of mean in a global batch",
                remedy="Return (sum of losses, count) in all cases",
            )
        for _ in range(1 + self._num_missed):
            self.averages = zlib.crc32(kind.encode(), self.averages)
        self.averaged_over = self._last_average = kind
        self._num_missed = 0

    def skip(self, batch: Any) -> None:
        """Note a micro-batch without samples, of which only other ranks see the loss, as one whose loss is a
        mean over the same as the last."""
        if self.weighs_means(batch) and self._last_average:
            self._note_average(self._last_average, "")
        else:
            self._num_missed += self.weighs_means(batch)

    @property
    def knows_averages(self) -> bool:
        """True if `averages` is known: this rank has seen a loss where others have."""
        return not self._num_missed

    def _warn_of_pairs(self, field: str) -> None:
        num_pairs = self._means.take_pairs()
        if self._compares_samples is False:
            return  # a classifier into as many classes as samples, whose first labels are 0, 1, ...
        if num_pairs and self.pieces > 1:
            raise UserError(
                f"the loss compares the samples of a micro-batch with each other ({num_pairs} x {num_pairs}"
                f" scores), and a pipeline has {self.pieces} pieces of it at a time",
                field="parallel.num_microbatches",
                got=self.pieces,
                allowed="1",
                remedy="Set parallel.num_microbatches=1 and raise gradient_accumulation_steps",
            )
        if self._is_chosen and num_pairs:
            refuse_chosen_batch(
                f"the loss of {field} compares the samples of a micro-batch with each other ({num_pairs} x"
                f" {num_pairs} scores)"
            )
        if self._warns and num_pairs > 1:
            logger.warning(
                "the loss of %s compares the samples of a micro-batch with each other (%d x %d scores whose"
                " targets are the diagonal): its value depends on batch_size. Another number of ranks or"
                " accumulation steps trains the same only if batch_size stays the same and is not derived",
                *(field, num_pairs, num_pairs),
            )

    def _check_weight(self, loss: Tensor, batch: Any, num_samples: int, field: str) -> None:
        """Refuse a sum, and warn of a loss that may have to be weighted by something else than samples."""
        if is_sum(loss, num_samples):
            _refuse_loss(f"a sum over the {num_samples} samples of a micro-batch", field)
        counted: Any = self._means.counts_other_than(num_samples) if self._warns else None
        if self._warns and counted is None:
            counted = other_divisor(loss, num_samples)
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if self._warns and counted is None and isinstance(labels, Tensor) and not labels.is_floating_point():
            counted = labels.numel() if labels.numel() != num_samples else None
        if counted is not None:
            self._warns, self.other_count = False, counted
            logger.warning(
                "the loss that %s returned is weighted by its %d samples, and it is computed from %d targets:"
                " if that number varies, the mean of a global batch depends on its micro-batches. Return"
                " (sum of losses, number of targets) to weight it by targets%s",
                *(field, num_samples, counted, _CHOSEN if self._is_chosen else ""),
            )


def _plain(loss: Any) -> Tensor:
    """A loss of DTensors, which is equal on all ranks, as a tensor."""
    # A copy, because FSDP warns of views that leave a module.
    plain: Tensor = loss.full_tensor().clone() if is_sharded(loss) else loss
    return plain


def _sum_of(loss: Tensor, number: Tensor | int) -> Terms:
    if isinstance(number, int) and number:
        return loss * number, number
    count = torch.as_tensor(number, device=loss.device)
    return torch.where(count > 0, loss * count, 0.0), count  # the mean over nothing is not a number


def _placed(loss_fn: Any, device: str) -> Any:
    """`loss_fn` with its own tensors, such as class weights, on `device`."""
    if isinstance(loss_fn, nn.Module):
        return loss_fn.to(device)
    if isinstance(loss_fn, partial):
        options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in loss_fn.keywords.items()}
        return partial(loss_fn.func, *loss_fn.args, **options)
    return loss_fn


def _as_sum(loss_fn: Callable[..., Any] | None) -> tuple[Callable[..., Tensor] | None, int, Tensor | None]:
    """A cross-entropy as its sum, its ignore_index and its class weights; else (None, ...)."""
    options: dict[str, Any] = {}
    inner = loss_fn
    if isinstance(loss_fn, partial) and not loss_fn.args:
        inner, options = loss_fn.func, dict(loss_fn.keywords)
    if inner is None:
        inner = F.cross_entropy
    if inner in (F.cross_entropy, F.nll_loss):
        _refuse_reduction(options.get("reduction", "mean"))
        options["reduction"] = "sum"
        return partial(inner, **options), options.get("ignore_index", -100), options.get("weight")
    reduction = getattr(loss_fn, "reduction", "mean")
    if isinstance(loss_fn, nn.modules.loss._Loss) and reduction not in _MEANS:
        _refuse_reduction(reduction)
    for kind in (nn.CrossEntropyLoss, nn.NLLLoss):
        # A subclass with a forward of its own may not honour `reduction`.
        if isinstance(loss_fn, kind) and type(loss_fn).forward is kind.forward:
            summed = copy.copy(loss_fn)
            summed.reduction = "sum"
            return summed, loss_fn.ignore_index, loss_fn.weight
    return None, -100, None


def _is_cross_entropy(loss_fn: Any) -> bool:
    """Whether a loss that `_as_sum` knows reads logits; NLL reads log-probabilities."""
    inner = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    return inner in (None, F.cross_entropy) or isinstance(inner, nn.CrossEntropyLoss)


def _refuse_reduction(reduction: str) -> None:
    if reduction != "mean":
        _refuse_loss(f"reduction={reduction!r}", "loss_fn")


def _refuse_loss(got: str, field: str) -> NoReturn:
    raise UserError(
        "the loss must return the micro-batch mean so that it can be reweighted by sample count",
        field=field,
        got=got,
        allowed="reduction='mean', or a sum divided by the number of its terms",
        remedy="Or give a function that returns (sum, count)",
    )


def split_batch(batch: Any, argument: str = "train_loader") -> tuple[tuple[Any, ...], Any]:
    """``(inputs..., target)`` -> ``((inputs...), target)``.

    Args:
        argument: what the data was given as.

    Raises:
        UserError: the batch is not a tuple or list of two or more parts.
    """
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        return tuple(batch[:-1]), batch[-1]
    raise UserError(
        "cannot separate inputs and target of a batch",
        field=argument,
        got=f"a batch of type {type(batch).__name__}",
        allowed="(input, ..., target)",
        remedy="Give training_step=lambda model, batch: ... for batches of another form, and for those of"
        " validation validation_step",
    )


def align_classes(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Bring the class axis where cross-entropy wants it.

    Accepts torch's own layout ``(N, C, ...)`` with target ``(N, ...)``, and the layout of
    language models, ``(..., C)`` with target ``(...)``, which is flattened.

    Raises:
        UserError: both layouts fit (as with 256 classes over 256 positions).
    """
    if output.dim() <= 2 or target.is_floating_point():
        return output, target
    torch_layout = output.shape[:1] + output.shape[2:] == target.shape
    class_last = output.shape[:-1] == target.shape
    if torch_layout and class_last:
        raise UserError(
            "the class axis of the output could be the second or the last",
            field="loss_fn",
            got=f"output {tuple(output.shape)}, target {tuple(target.shape)}",
            remedy="Flatten them: loss_fn=lambda o, t: F.cross_entropy(o.flatten(0, -2), t.flatten())",
        )
    return (output.flatten(0, -2), target.flatten()) if class_last else (output, target)


def accuracy(output: Tensor, target: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """(correct, counted) over unmasked targets; `output` as for cross-entropy."""
    output, target = align_classes(output, target)
    if target.is_floating_point():
        target = target.argmax(dim=1)
    kept = target != ignore_index
    return ((output.argmax(dim=1) == target) & kept).sum(), kept.sum()
