"""A loss with parameters of its own, trained beside those of the model."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["WithLoss", "has_parameters", "unwrapped", "with_loss"]


class WithLoss(nn.Module):
    """A model and its loss as one module, whose forward pass and attributes are those of the model.

    The model is `module`, a name that checkpoints leave out, so that its parameters keep their names; those
    of the loss begin with ``loss_fn.``.
    """

    def __init__(self, model: nn.Module, loss_fn: nn.Module) -> None:
        super().__init__()
        self.module, self.loss_fn = model, loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def has_parameters(loss_fn: Any, model: Any) -> bool:
    """True if a loss has trainable parameters that are not those of `model`."""
    if not isinstance(loss_fn, nn.Module) or not isinstance(model, nn.Module):
        return False
    known = {id(p) for p in model.parameters()}
    return any(p.requires_grad and id(p) not in known for p in loss_fn.parameters())


def with_loss(model: Any, loss_fn: Any) -> Any:
    """`model`, with the parameters of its loss if that has some."""
    return WithLoss(model, loss_fn) if has_parameters(loss_fn, model) else model


def unwrapped(model: Any) -> Any:
    """The user's model of what `with_loss` returned."""
    return model.module if isinstance(model, WithLoss) else model
