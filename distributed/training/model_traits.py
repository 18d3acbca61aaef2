"""Traits of models that some backends cannot train, each with its refusal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.plan import BatchPlan

__all__ = [
    "COMPLEX",
    "EMPTY",
    "HOOKED",
    "META",
    "SPARSE",
    "Trait",
    "check_chosen_batch",
    "check_materialized",
    "check_micro_batches",
    "check_slices_of_one",
    "check_still_trainable",
    "check_whole",
    "micro_batch_field",
    "refuse",
    "sparse_parameters",
    "with_statistics",
    "written_weights",
]


@dataclass(frozen=True)
class Trait:
    """A trait of a parameter.

    Attributes:
        find: names of the parameters of a model that have it.
        text: what such a parameter has or is.
        allowed: backends that train it.
        remedy: another way out than these backends.
    """

    find: Callable[[nn.Module], Iterator[str]]
    text: str
    allowed: str
    remedy: str


def refuse(model: nn.Module, backend: str, traits: dict[Trait, str]) -> None:
    """Raise a UserError for the first parameter with one of `traits`.

    Args:
        backend: the name of the backend that cannot train them.
        traits: why it cannot.
    """
    for trait, reason in traits.items():
        for name in trait.find(model):
            raise UserError(
                f"cannot train the parameter '{name}', which {trait.text}: {reason}",
                field="backend",
                got=backend,
                allowed=trait.allowed,
                remedy=f"Choose one of these, or {trait.remedy}",
            )


def check_micro_batches(
    model: nn.Module,
    backend: str,
    ranks: int,
    batch: BatchPlan,
    parts: tuple[int, int] = (1, 1),
    is_chosen: bool = False,
) -> None:
    """Raise a UserError for layers whose training depends on which samples are in one micro-batch.

    Args:
        backend: name of the backend.
        ranks: of which each has micro-batches of its own.
        batch: of a step.
        parts: numbers of pieces of a micro-batch and of slices of a sequence that are computed by themselves.
        is_chosen: whether ``batch_size=auto`` chooses the size; `batch` is the most divided one then.
    """
    if ranks > 1:
        reason = "each rank would do so with the rows of its own samples, so that the ranks would differ"
        refuse(model, backend, {_RENORMALIZED: reason})
    for name in _by_frequency(model) if batch.global_batch_size * math.prod(parts) > batch.batch_size else ():
        raise UserError(
            f"gradients of '{name}' are divided by how often a row occurs in a micro-batch"
            " (scale_grad_by_freq), which several micro-batches per step change",
            **micro_batch_field(batch, parts, is_chosen),
            remedy="Or build the embedding with scale_grad_by_freq=False",
        )


def with_statistics(model: nn.Module) -> str | None:
    """The first layer that computes statistics over a micro-batch in training, by name and class; None
    without."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            trains = True
        else:
            trains = isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
        if trains and (module.training or not model.training):  # a model in evaluation is trained as a whole
            return f"'{name}' ({type(module).__name__})"
    return None


def check_chosen_batch(model: nn.Module) -> None:
    """Raise a UserError for layers whose training depends on the size of a micro-batch, which
    ``batch_size=auto`` chooses by the memory of a machine."""
    layer = with_statistics(model)
    if layer is not None:
        raise UserError(
            f"{layer} computes statistics over a micro-batch, so that the size chosen by batch_size=auto"
            " would change the training",
            field="batch_size",
            got="auto",
            allowed="a number, or auto for a model without such layers",
            remedy="Set batch_size and gradient_accumulation_steps to numbers, or use GroupNorm or"
            " LayerNorm, or put the layer into evaluation mode to train with fixed statistics",
        )


def micro_batch_field(batch: BatchPlan, parts: tuple[int, int], is_chosen: bool) -> dict[str, Any]:
    """Field, value and allowed values for an error of what several micro-batches per step change.

    Args:
        batch, parts, is_chosen: as of `check_micro_batches`.
    """
    size = batch.global_batch_size if is_chosen else batch.batch_size
    return {
        "field": "batch_size" if is_chosen else "global_batch_size",
        "got": "auto" if is_chosen else batch.global_batch_size,
        "allowed": f"{size}, one micro-batch on one rank{undivided(parts)}",
    }


def undivided(parts: tuple[int, int]) -> str:
    """What else is needed for a forward pass over a whole micro-batch, in words.

    Args:
        parts: as of `check_micro_batches`.
    """
    return ", with parallel.num_microbatches=1 and parallel.context=1" if math.prod(parts) > 1 else ""


def check_materialized(model: nn.Module, backend: str, ranks: int) -> None:
    """Raise a UserError for parameters whose first forward pass gives them a shape.

    Args:
        backend: name of the backend.
        ranks: of which each would draw its own values.
    """
    if ranks > 1:
        refuse(model, backend, {_LAZY: "each rank would initialize it by itself"})


def check_whole(model: nn.Module) -> None:
    """Raise a UserError for parameters that are this rank's part of a larger one: Megatron-LM's layers, ours
    of the same names, and DTensors. Backends start from whole models, and give all ranks rank 0's values."""
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_part = getattr(module, "is_part", False) is True or hasattr(parameter, "placements")
            if is_part or getattr(parameter, "tensor_model_parallel", False):
                raise UserError(
                    f"'{f'{prefix}.{name}'.lstrip('.')}' is a part, held by this rank, of a larger parameter,"
                    " and backends cut whole models by themselves",
                    field="model",
                    got=type(module).__name__,
                    allowed="whole layers, such as torch.nn.Linear",
                    remedy="Set parallel.tensor (and parallel.tensor_plan) with the whole model, or train the"
                    " parts in a loop of your own without Trainer",
                )


def check_slices_of_one(model: nn.Module, config: DistributedConfig, ranks: int) -> None:
    """Raise a UserError for attention that takes the samples of several ranks for slices of one sequence.

    Args:
        model: with modules that have a method ``set_context_group``.
        config: of the run.
        ranks: number of ranks.
    """
    if ranks == 1 or config.parallel.context > 1:
        return
    for name, module in model.named_modules():
        if getattr(module, "sequence_parallel", False) is True and hasattr(module, "set_context_group"):
            raise UserError(
                f"'{name}' was built with sequence_parallel=True, and the ranks have different samples, not"
                " slices of one sequence",
                field="parallel.context",
                got=1,
                allowed="a number of ranks that hold slices of each sequence",
                remedy=f"Set parallel.context={ranks}, or leave sequence_parallel out",
            )


def _lazy(model: nn.Module) -> Iterator[str]:
    return (name for name, parameter in model.named_parameters() if is_lazy(parameter))


def _meta(model: nn.Module) -> Iterator[str]:
    return (name for name, parameter in model.named_parameters() if parameter.is_meta)


def _sparse(model: nn.Module) -> Iterator[str]:
    return (name for name, module in _embeddings(model) if module.sparse)


def check_still_trainable(trainable: Mapping[str, tuple[nn.Parameter, bool]], backend: str) -> None:
    """Raise a UserError if ``requires_grad`` of a parameter has changed where that is not followed.

    Args:
        trainable: name -> (parameter, its ``requires_grad`` before).
        backend: name of the backend.
    """
    for name, (parameter, before) in trainable.items():
        if parameter.requires_grad != before:
            raise UserError(
                f"requires_grad of '{name}' changed from {before} to {not before} during training, and"
                " this backend reduces the gradients of the parameters that were trainable at the start",
                field="backend",
                got=backend,
                allowed="a run in which ranks divide no model; under fsdp without a codec",
                remedy="Choose one of these, or train in two calls of fit with the change between them",
            )


def sparse_parameters(model: nn.Module) -> set[Tensor]:
    """The parameters whose gradients are sparse."""
    return {module.weight for _, module in _embeddings(model) if module.sparse}


def written_weights(what: str, backend: str) -> UserError:
    """The error for a parameter that a forward pass or a callback changed where that is discarded.

    Args:
        what: the parameter, such as ``the parameter '0.weight'``.
        backend: name of the backend.
    """
    return UserError(
        f"{what} was changed outside the optimizer, and {backend} would discard that,"
        " because the values that it trains are shards. The next step was not taken",
        field="backend",
        got=backend,
        allowed="serial, pytorch-ddp, horovod",
        remedy="Choose one of these, or compute the constrained value in forward without writing it"
        " (torch.nn.utils.parametrize)",
    )


def _embeddings(model: nn.Module) -> Iterator[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    for prefix, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            yield f"{prefix}.weight".lstrip("."), module


def _renormalized(model: nn.Module) -> Iterator[str]:
    return (name for name, module in _embeddings(model) if module.max_norm is not None)


def _by_frequency(model: nn.Module) -> Iterator[str]:
    return (name for name, module in _embeddings(model) if module.scale_grad_by_freq)


def _empty(model: nn.Module) -> Iterator[str]:
    return (name for name, parameter in model.named_parameters() if not parameter.numel())


def _complex(model: nn.Module) -> Iterator[str]:
    return (name for name, parameter in model.named_parameters() if parameter.is_complex())


def _hooked(model: nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield name


SPARSE = Trait(
    _sparse, "has sparse gradients", "serial, pytorch-ddp", "build the embedding with sparse=False"
)
EMPTY = Trait(
    _empty,
    "has no elements",
    "serial, pytorch-ddp, fsdp, horovod, deepspeed up to zero_stage 2",
    "leave it out of the model",
)
COMPLEX = Trait(
    _complex, "is complex", "serial, pytorch-ddp", "store real and imaginary part (torch.view_as_real)"
)
HOOKED = Trait(
    _hooked,
    "has a hook",
    "serial, pytorch-ddp, horovod, deepspeed with zero_stage 0",
    "change the gradient in training_step or in the optimizer",
)
META = Trait(
    _meta,
    "is on the meta device",
    "fsdp, if the model is a function that builds it",
    "build it on the CPU, or give it values with to_empty() and load_state_dict()",
)
_LAZY = Trait(
    _lazy,
    "has no shape yet (a lazy module)",
    "serial",
    "pass one batch through the model before the run",
)
_RENORMALIZED = Trait(
    _renormalized,
    "is renormalized in the forward pass (max_norm)",
    "serial",
    "build the embedding without max_norm and normalize what it returns",
)
