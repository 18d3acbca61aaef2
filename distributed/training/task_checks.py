"""Refuse losses, metrics and schedulers that would train something else, or nothing, in silence."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor
from torch.utils.data import TensorDataset

from distributed.errors import UserError
from distributed.interfaces.task import Task

__all__ = [
    "check_by_name",
    "check_class_axis",
    "check_default_target",
    "check_loss",
    "check_rows",
    "check_task",
    "read_measured",
    "read_pair",
    "refuse_chosen_batch",
    "refuse_pairs",
]


def check_task(task: Task) -> None:
    """Check what the caller's process can see of a task, before ranks start.

    Raises:
        UserError: about `model`, `loss_fn`, `scheduler` or `metrics`.
    """
    _check_factory(task.model)
    check_loss(task.loss_fn)
    for field, given in _FUNCTIONS.items():
        _check_arguments(field, getattr(task, field), given)
    _check_scheduler(task.scheduler)
    _check_metrics(task.metrics)
    if task.loss_fn is None and task.training_step is None:
        for source in (task.train_data, *(() if task.validation_step else task.val_data.values())):
            dataset = getattr(source, "dataset", None)
            if type(dataset) is TensorDataset and len(dataset.tensors) > 1:
                check_default_target(dataset.tensors[-1])


def check_loss(loss_fn: Any) -> None:
    """Raise a UserError unless `loss_fn` is None or a function: a class or a name is neither."""
    if isinstance(loss_fn, type):
        raise UserError(
            "a loss class was given instead of a loss",
            field="loss_fn",
            got=loss_fn.__name__,
            allowed="a torch loss module, a function (output, target), or None for cross-entropy",
            remedy=f"Create the loss: loss_fn={loss_fn.__name__}()",
        )
    if loss_fn is not None and not callable(loss_fn):
        raise UserError(
            "not a loss",
            field="loss_fn",
            got=loss_fn if isinstance(loss_fn, str) else type(loss_fn).__name__,
            allowed="a torch loss module, a function (output, target), or None for cross-entropy",
            remedy="Give the loss itself, e.g. loss_fn=nn.MSELoss()",
        )


def check_default_target(target: Any) -> None:
    """Raise a UserError for targets that the default loss would read as class probabilities."""
    if isinstance(target, Tensor) and target.is_floating_point():
        raise UserError(
            "the targets are floating-point numbers, and the default cross-entropy is for class indices",
            field="loss_fn",
            got=f"None, with targets of {target.dtype} and shape {tuple(target.shape)}",
            allowed="an explicit loss",
            remedy="For regression set loss_fn=nn.MSELoss(), with an output of the targets' shape; for class"
            " probabilities set loss_fn=nn.CrossEntropyLoss(); for class indices convert the targets with"
            " .long()",
        )


def check_class_axis(output: Tensor) -> None:
    """Raise a UserError for logits of which a cross-entropy has nothing to learn.

    Args:
        output: with the classes on its second axis.
    """
    if output.dim() > 1 and output.shape[1] != 1:
        return
    one = output.dim() > 1
    raise UserError(
        "the cross-entropy of a single class is always 0, so nothing would be learned"
        if one
        else "the output has no class axis, so the samples of a batch would be read as classes",
        field="loss_fn",
        got=f"output of shape {tuple(output.shape)}",
        allowed="an output of shape (samples, classes) with two or more classes",
        remedy="For one logit per sample set loss_fn=nn.BCEWithLogitsLoss(), for regression nn.MSELoss()",
    )


def refuse_chosen_batch(what: str) -> NoReturn:
    """Raise a UserError for a loss on whose micro-batches the training depends.

    Args:
        what: a clause on how it does.
    """
    raise UserError(
        f"{what}, so that the size chosen by batch_size=auto would change the training",
        field="batch_size",
        got="auto",
        allowed="a number, or auto for a loss that is a mean over samples",
        remedy="Set batch_size and gradient_accumulation_steps to numbers",
    )


def refuse_pairs(output: Any = None, target: Any = None, field: str = "loss_fn") -> NoReturn:
    """Raise a UserError for an elementwise loss over shapes that torch broadcasts to all pairs of samples.

    Args:
        output: shape of the output, if known.
        target: shape of the target.
        field: the argument that the loss came from.
    """
    shapes = None if output is None else f"output {tuple(output)}, target {tuple(target)}"
    raise UserError(
        "output and target have different numbers of dimensions, so that the loss would compare each sample"
        " with the targets of all others",
        field=field,
        got=shapes,
        allowed="an output of the target's shape",
        remedy="Squeeze the output, e.g. loss_fn=lambda o, t: F.mse_loss(o.squeeze(-1), t), or unsqueeze the"
        " targets in the dataset",
    )


def check_rows(target: Any, num_samples: int, loss_fn: Any) -> None:
    """Raise a UserError for targets of which no dimension has a row per sample: the loss is a mean over other
    things than samples.

    Args:
        num_samples: of the micro-batch; 0 for a stand-in, which is not checked.
    """
    if not num_samples or not isinstance(target, Tensor) or not target.dim() or num_samples in target.shape:
        return
    raise UserError(
        f"a micro-batch of {num_samples} samples has other numbers of targets, and a loss module is weighted"
        " by samples: a collate_fn may have dropped or joined some",
        field="loss_fn",
        got=f"{type(loss_fn).__name__} with targets of shape {tuple(target.shape)}",
        allowed=f"targets with a dimension of {num_samples}",
        remedy="Give a function that calls the loss by torch.nn.functional, which is weighted by the elements"
        " that it averages, e.g. loss_fn=F.mse_loss, or return (sum, count)",
    )


def check_by_name(batch: Mapping[str, Any], given: str | None) -> None:
    """Raise a UserError for a mapping as a batch beside what reads (output, target).

    Args:
        given: the argument that does, None without.
    """
    if given is not None:
        raise UserError(
            "a batch that is a mapping is passed to the model by name, which computes its own loss, so this"
            " would be ignored",
            field=given,
            got=f"{given} and a batch of {', '.join(map(str, batch))}",
            allowed="training_step and validation_step for batches that are mappings",
            remedy="Give training_step=lambda model, batch: ..., and metrics in validation_step",
        )


def read_pair(name: str, result: Any, field: str) -> Any:
    """`result` of a metric, which has to be (sum, count).

    Args:
        name: of the metric.
        field: the argument that it came from.

    Raises:
        UserError: it is anything else.
    """
    paired = tuple(result.shape) == (2,) if isinstance(result, Tensor) else isinstance(result, (tuple, list))
    if paired and len(result) == 2:
        wide = next((part for part in result if isinstance(part, Tensor) and part.numel() != 1), None)
        if wide is None:
            return result
        raise UserError(
            f"sum and count of metric '{name}' have to be numbers",
            field=field,
            got=f"tensor of shape {tuple(wide.shape)}",
            allowed="(sum over the samples, number of samples)",
            remedy="Return the sum, e.g. (hits.sum(), len(target))",
        )
    raise UserError(
        f"metric '{name}' is not a pair (sum, count), so it cannot be summed over batches and ranks",
        field=field,
        got=f"tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__,
        allowed="(sum over the samples, number of samples)",
        remedy="Return the sum and the count, e.g. (hits.sum(), len(target)), instead of their quotient",
    )


def read_measured(result: Any) -> dict[str, Any]:
    """What a validation_step returned, as {name: (sum, count)}.

    Raises:
        UserError: it is anything else.
    """
    if not isinstance(result, Mapping):
        raise UserError(
            "the function did not return the sums and counts of metrics",
            field="validation_step",
            got=type(result).__name__,
            allowed="a mapping {name: (sum, count)}",
            remedy="Return e.g. {'loss': (losses.sum(), len(losses))}",
        )
    return {name: read_pair(name, pair, "validation_step") for name, pair in result.items()}


def _check_factory(model: Any) -> None:
    """Raise a UserError for a class or function that cannot build a model without arguments."""
    needed = _required(model) if inspect.isclass(model) or inspect.isfunction(model) else []
    if needed:
        arguments = ", ".join(f"{name}=..." for name in needed)
        raise UserError(
            "the model is built by calling this without arguments, and it requires some",
            field="model",
            got=model.__name__,
            allowed="a model, or a function without arguments that builds one",
            remedy=f"Give the model, or model=lambda: {model.__name__}({arguments})",
        )


_FUNCTIONS = {
    "loss_fn": "output, target",
    "training_step": "model, batch",
    "validation_step": "model, batch",
}
"""Field -> the arguments that its function is called with."""


def _check_arguments(field: str, function: Any, given: str, name: str | None = None) -> None:
    """Raise a UserError for a function that cannot be called with the arguments `given`.

    Args:
        name: of one of several functions of the field.
    """
    if function is None or _takes(function, given.count(",") + 1):
        return
    signature = f"{getattr(function, '__name__', type(function).__name__)}{inspect.signature(function)}"
    subject = f"metric '{name}'" if name else "the function"
    raise UserError(
        f"{subject} is called with ({given}), and it takes other arguments",
        field=field,
        got=signature,
        allowed=f"a function ({given})",
        remedy=f"Change its arguments, or bind the others, e.g. {field}=functools.partial(...)",
    )


def _check_scheduler(scheduler: Any) -> None:
    """Raise a UserError unless `scheduler` is None, a scheduler, or callable with the optimizer alone."""
    if scheduler is None or (hasattr(scheduler, "step") and not isinstance(scheduler, type)):
        return
    inner = getattr(scheduler, "func", scheduler)
    name = getattr(inner, "__name__", type(inner).__name__)
    if not callable(scheduler):
        raise UserError(
            "not a learning-rate scheduler",
            field="scheduler",
            got=name,
            allowed="a scheduler, a function from the optimizer to one, or a name",
            remedy="Give scheduler=lambda optimizer: ...",
        )
    if not _takes(scheduler, 1):
        arguments = "".join(f", {argument}=..." for argument in _required(scheduler)[1:])
        raise UserError(
            "the scheduler is built by calling this with the optimizer alone, and it takes other arguments",
            field="scheduler",
            got=name,
            allowed="a scheduler, or a function from the optimizer to one",
            remedy=f"Give scheduler=lambda optimizer: {name}(optimizer{arguments})",
        )


def _takes(function: Any, number: int) -> bool:
    """Whether `function` can be called with `number` arguments, as far as its signature is known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # functions of C may have none
        return True
    try:
        signature.bind(*[None] * number)
    except TypeError:
        return False
    return True


def _required(function: Any) -> list[str]:
    """Names of the arguments without a default value."""
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in any_number]


def _check_metrics(metrics: Any) -> None:
    """Raise a UserError unless `metrics` is None or maps names to functions."""
    if metrics is None:
        return
    if not isinstance(metrics, Mapping):
        raise UserError(
            "not a mapping from names to metrics",
            field="metrics",
            got=type(metrics).__name__,
            allowed="{name: function (output, target) -> (sum, count)}",
            remedy="Name each metric, e.g. metrics={'accuracy': accuracy}",
        )
    if "loss" in metrics:
        raise UserError(
            "the validation loss has this name, and the metric would take its place",
            field="metrics",
            got="loss",
            allowed="any other name",
            remedy="Rename the metric; val_loss is reported without one",
        )
    for name, metric in metrics.items():
        if isinstance(metric, type) or not callable(metric):
            raise UserError(
                f"metric '{name}' is not a function",
                field="metrics",
                got=metric if isinstance(metric, str) else getattr(metric, "__name__", type(metric).__name__),
                allowed="a function (output, target) -> (sum, count)",
                remedy="Give the function itself",
            )
        _check_arguments("metrics", metric, "output, target", name)
