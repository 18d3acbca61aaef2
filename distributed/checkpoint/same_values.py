"""Compare a model and an optimizer of this process with a saved state, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distributed.checkpoint.optimizer_state import parameter_slots
from distributed.checkpoint.schema import EXTRA_STATE
from distributed.checkpoint.torch_state import MODEL, named_tensors, packed_extra_states, stored_names
from distributed.errors import UserError
from distributed.interfaces.state import StateReader

__all__ = ["holds_values"]


def holds_values(reader: StateReader, model: nn.Module, optimizer: Optimizer | None) -> bool:
    """True if all tensors of `model` and of the state of `optimizer` have the saved values, bit by bit."""
    tensors, aliases = named_tensors(model)
    try:
        stored = stored_names(reader, tensors, aliases)
    except UserError:  # another model by now
        return False
    scalars: dict[str, dict[str, Any]] = {}
    own: dict[tuple[str, str], Tensor] = {}

    def found() -> Iterator[tuple[str, str, Tensor]]:
        yield from ((MODEL, stored[name], tensor) for name, tensor in tensors.items())
        yield from ((EXTRA_STATE, name, packed) for name, packed in packed_extra_states(model))
        if optimizer is not None:
            names = {id(tensor): stored[name] for name, tensor in tensors.items()}
            for name, slot, tensor in parameter_slots(optimizer, names, scalars):
                yield f"optimizer.{slot}", name, tensor

    shapes = reader.tensors()
    for key, name, tensor in found():
        own[key, name] = tensor
        if shapes.get((key, name)) != tuple(tensor.shape):
            return False
        saved = reader.read(key, name).reshape(tensor.shape).to(tensor.dtype)
        if not torch.equal(_bits(saved), _bits(tensor)):
            return False
    ours = ("optimizer.", MODEL, EXTRA_STATE) if optimizer is not None else (MODEL, EXTRA_STATE)
    same_keys = own.keys() == {tensor for tensor in shapes if tensor[0].startswith(ours)}
    return same_keys and (optimizer is None or scalars == dict(reader.scalars))


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in which NaN equals itself."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
