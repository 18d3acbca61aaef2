"""Builds what the user left to us: model from a factory, optimizer, schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from distributed.checkpoint.optimizer_state import parts_of
from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.framework import refuse_foreign
from distributed.training.loss_parameters import unwrapped


def build_model(model: Any, seed: int) -> nn.Module:
    """A module as it is, or what a factory builds under `seed`, so that all ranks build the same.

    Raises:
        UserError: neither a module nor a factory of one.
    """
    if isinstance(model, nn.Module):
        return _initialized(model)
    refuse_foreign(model, "model", "torch")
    if callable(model):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            built = model()
        if isinstance(built, nn.Module):
            return _initialized(built)
        refuse_foreign(built, "model", "torch")
        model = built
    raise UserError(
        "not something that can be trained",
        field="model",
        got=type(model).__name__,
        allowed="a torch.nn.Module, or a function without arguments that builds one",
    )


def _initialized(model: nn.Module) -> nn.Module:
    if "_parameters" not in vars(model):
        raise UserError(
            "the model's __init__ does not call that of torch.nn.Module, so it can hold no parameters",
            field="model",
            got=type(model).__name__,
            remedy="Call super().__init__() first in its __init__",
        )
    return model


def check_trainable(model: nn.Module) -> None:
    """Raise a UserError when no parameter of `model` can learn, or `model` is a parallel wrapper."""
    if isinstance(unwrapped(model), _WRAPPERS):
        raise UserError(
            "the model is already wrapped for several devices or processes",
            field="model",
            got=type(unwrapped(model)).__name__,
            allowed="the module itself",
            remedy="Give model.module; backend=pytorch-ddp wraps it",
        )
    if not any(p.requires_grad for p in model.parameters()):
        total = sum(1 for _ in model.parameters())
        raise UserError(
            "the model has no trainable parameters",
            field="model",
            got=f"{type(model).__name__} with {total} parameters, all frozen"
            if total
            else f"{type(model).__name__} without parameters",
            remedy="Set requires_grad=True on what should learn",
        )


def build_optimizer(
    optimizer: Any, model: nn.Module, config: DistributedConfig, learning_rate: float
) -> Optimizer:
    """The user's optimizer, or one built here.

    Args:
        optimizer: an optimizer; an optimizer class or `functools.partial` of one, called with
            (parameters, lr=learning_rate); a function from the model to an optimizer; or None.
        model: whose trainable parameters it gets.
        config: names the optimizer to build when none is given.
        learning_rate: after `lr_scaling`.

    Raises:
        UserError: it is no optimizer, or brings a learning rate that `lr_scaling` cannot rescale.
    """
    if optimizer is not None and config.optimizer_bits != 32:
        raise UserError(
            "it applies to the optimizer that the configuration builds, and one was passed to the trainer",
            field="optimizer_bits",
            got=config.optimizer_bits,
            allowed="32 with an optimizer of your own",
            remedy="Leave the optimizer out and set optimizer=adamw or adam, or pass one of torchao.optim",
        )
    if isinstance(optimizer, Optimizer):
        return optimizer
    trainable = [p for p in model.parameters() if p.requires_grad]
    if optimizer is None:
        optimizer = _named(config)
    inner = optimizer.func if isinstance(optimizer, partial) else optimizer
    if isinstance(inner, type) and issubclass(inner, Optimizer):
        own_rate = isinstance(optimizer, partial) and "lr" in optimizer.keywords
        built: Any = optimizer(trainable, **({} if own_rate else {"lr": learning_rate}))
    else:
        own_rate = True
        built = optimizer(model) if callable(optimizer) else optimizer
    if own_rate and config.lr_scaling.rule != "none":
        raise UserError(
            "the optimizer given sets its own learning rate, which is never rescaled",
            field="lr_scaling.rule",
            got=config.lr_scaling.rule,
            remedy="Give the optimizer's class (optimizer=torch.optim.SGD) and learning_rate",
        )
    if isinstance(built, Optimizer):
        return built
    raise UserError(
        "not an optimizer",
        field="optimizer",
        got=type(built).__name__,
        allowed="a torch optimizer, its class, or a function from the model to one",
    )


def _named(config: DistributedConfig) -> Callable[..., Optimizer]:
    if config.optimizer_bits != 32:
        from distributed.training.low_bit import low_bit_optimizer

        return low_bit_optimizer(config)
    if config.optimizer == "sgd":
        return partial(torch.optim.SGD, momentum=config.momentum, weight_decay=config.weight_decay)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return partial(kind, weight_decay=config.weight_decay)


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise a UserError when `optimizer` holds parameters that are not `model`'s."""
    _check_sparse(optimizer, model)
    known = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in held if id(p) not in known]
    if foreign:
        raise UserError(
            f"the optimizer was built over other parameters: {len(foreign)} of its {len(held)} are not"
            " the model's",
            field="optimizer",
            got=type(optimizer).__name__,
            remedy="Build it from this model's parameters, after any copy of the model, or give its class",
        )


def _check_sparse(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise a UserError for an embedding with sparse gradients that `optimizer` would fail on in its step."""
    embeddings = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse]
    held = {id(module.weight) for module in embeddings}
    for group in optimizer.param_groups if held else ():
        dense_only = isinstance(optimizer, _DENSE_ONLY) or group.get("weight_decay")
        if dense_only and any(id(p) in held for p in group["params"]):
            decay = f" with weight_decay={group['weight_decay']}" if group.get("weight_decay") else ""
            raise UserError(
                "an embedding has sparse gradients (sparse=True), which this optimizer cannot use",
                field="optimizer",
                got=f"{type(optimizer).__name__}{decay}",
                allowed="SGD, Adagrad or SparseAdam without weight decay",
                remedy="Choose one of these, or build the embedding with sparse=False",
            )


_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_DENSE_ONLY = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adadelta, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop),
)


def follow_parameters(optimizer: Optimizer, before: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """Point `optimizer` at the parameters that took the place of `before`'s in `model`, by name.

    Placing a model may replace its parameters (sharding, a meta device).
    """
    now = dict(model.named_parameters())
    replaced = {old: now[name] for name, old in before.items() if now.get(name, old) is not old}
    for part in parts_of(optimizer):
        for group in part.param_groups:
            group["params"] = [replaced.get(p, p) for p in group["params"]]
        for old, new in replaced.items():
            if old in part.state:
                part.state[new] = part.state.pop(old)


def build_scheduler(
    scheduler: Any, optimizer: Optimizer, config: DistributedConfig, total_steps: int | None
) -> tuple[Any, str]:
    """(scheduler or None, ``epoch`` | ``step`` | ``validation``): what steps it.

    Raises:
        UserError: it drives another optimizer, a decay has no known end, or the interval has no metric.
    """
    if scheduler is None:
        return _built_in(optimizer, config, total_steps), "step"
    if isinstance(scheduler, type) or (not hasattr(scheduler, "step") and callable(scheduler)):
        scheduler = scheduler(optimizer)
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise UserError(
            "the scheduler drives another optimizer than the one given",
            field="scheduler",
            got=type(scheduler).__name__,
            remedy="Build it over the same optimizer, or give scheduler=lambda optimizer: ...",
        )
    if hasattr(scheduler, "step_update"):
        return scheduler, "epoch"
    if arguments_of(scheduler)[:1] == ["metric"]:
        if config.scheduler_interval == "step":
            raise UserError(
                f"{type(scheduler).__name__} needs a metric, which an optimizer step does not have",
                field="scheduler_interval",
                got="step",
                allowed="epoch, for this scheduler",
                remedy="Leave scheduler_interval out",
            )
        return scheduler, "validation"
    return scheduler, config.scheduler_interval


def arguments_of(scheduler: Any) -> list[str]:
    """``number`` or ``metric`` for each argument that the `step` of `scheduler` is called with.

    Raises:
        UserError: it takes others.
    """
    found: list[str] = []
    for name, parameter in signature(scheduler.step).parameters.items():
        is_required = parameter.default is parameter.empty and parameter.kind not in _VARIADIC
        kind = next((kind for kind, words in _ARGUMENTS.items() if any(w in name for w in words)), None)
        if is_required and kind is None:
            raise UserError(
                f"its step() takes the argument '{name}', whose meaning is not known",
                field="scheduler",
                got=type(scheduler).__name__,
                allowed="step(), step(epoch), step(metric) or step(epoch, metric)",
                remedy="Name it epoch or metric, or give a scheduler whose step() takes no argument",
            )
        if kind is not None and (is_required or (kind == "metric" and found == ["number"])):
            found.append(kind)
    return found


_ARGUMENTS = {"number": ("epoch", "step", "updates"), "metric": ("metric", "loss", "score", "accuracy")}
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _built_in(optimizer: Optimizer, config: DistributedConfig, total_steps: int | None) -> LambdaLR | None:
    if config.scheduler == "constant" and not config.warmup_steps:
        return None
    if config.scheduler != "constant" and total_steps is None:
        raise UserError(
            f"a {config.scheduler} schedule needs an end, and this data has no known length",
            field="scheduler",
            got=config.scheduler,
            remedy="Set max_steps",
        )
    return LambdaLR(
        optimizer,
        partial(
            lr_factor,
            kind=config.scheduler,
            warmup=config.warmup_steps,
            total=total_steps or 0,
            floor=config.min_lr_ratio,
        ),
    )


def lr_factor(step: int, *, kind: str, warmup: int, total: int, floor: float) -> float:
    """Learning rate at optimizer step `step` (from 0) as a share of its peak (C7).

    Warm-up rises linearly and reaches the peak after `warmup` steps; then ``linear`` or
    ``cosine`` falls to `floor` at step `total`; ``constant`` stays.
    """
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    shape = 1.0 - done if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return floor + (1.0 - floor) * shape


def hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """Each parameter group's own values: learning rate, weight decay, momentum and the like."""
    return [{name: v for name, v in group.items() if name != "params"} for group in optimizer.param_groups]


def take_hyperparameters(optimizer: Any, scheduler: Any, given: list[dict[str, Any]]) -> None:
    """Put `given` in the place of what a checkpoint brought. A schedule continues at its step, from the
    given learning rate.

    Args:
        optimizer: its state was just loaded.
        given: the result of `hyperparameters` before, with the rates that no schedule has changed yet.
    """
    for group, values in zip(optimizer.param_groups, given, strict=True):
        base = group.get("initial_lr", group["lr"])
        share = group["lr"] / base if base else 1.0
        group.update(values)
        group["lr"] = values["lr"] * share
        if "initial_lr" in group:
            group["initial_lr"] = values["lr"]
    for part in [scheduler, *getattr(scheduler, "_schedulers", [])]:
        if hasattr(part, "base_lrs"):
            part.base_lrs = [values["lr"] for values in given]
