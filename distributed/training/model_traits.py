"""Traits of models that some backends cannot train, each with its refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from distributed.errors import UserError

__all__ = ["COMPLEX", "EMPTY", "HOOKED", "SPARSE", "Trait", "refuse"]


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


def _sparse(model: nn.Module) -> Iterator[str]:
    for prefix, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            yield f"{prefix}.weight".lstrip(".")


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
