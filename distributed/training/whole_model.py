"""The model as in one process, for callbacks that sample from it, average or export it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from distributed.errors import UserError
from distributed.training.seeding import isolated_rng

__all__ = ["copy_with", "read_only"]


@contextmanager
def read_only(opened: AbstractContextManager[nn.Module]) -> Iterator[nn.Module]:
    """A model in evaluation mode without gradients; its modes and random numbers are restored afterwards.

    Args:
        opened: the model, whole.

    Raises:
        UserError: the block has changed a parameter or buffer. Under a sharded backend it would be lost.
    """
    with opened as model:
        modes = {module: module.training for module in model.modules()}
        before = _versions(model)
        try:
            with isolated_rng(), torch.no_grad():
                yield model.eval()
        finally:
            for module, mode in modes.items():
                module.training = mode
        after = _versions(model)
        changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
        if changed:
            raise UserError(
                f"a callback changed '{min(changed)}' inside context.whole_model(), which is for reading: a"
                " sharded backend would not train with it",
                field="callbacks",
                got=f"{len(changed)} changed parameters or buffers",
                remedy="Change a copy (copy.deepcopy(model)), or change context.model on a backend that does"
                " not shard it",
            )


def copy_with(model: nn.Module, values: Mapping[Any, Tensor]) -> nn.Module:
    """A deep copy of `model` whose parameters and buffers hold `values`; attributes of parameters are
    copied."""
    memo: dict[int, Any] = {}
    for tensor, value in values.items():
        device = value.device if tensor.is_meta else tensor.device  # another rank holds it
        made = value.detach().to(device, tensor.dtype, copy=True)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
            vars(made).update(copy.deepcopy(vars(tensor)))
        memo[id(tensor)] = made
    return copy.deepcopy(model, memo)


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Identity of each tensor's memory, and how often it was changed in place."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tensor.data_ptr(), tensor._version) for name, tensor in tensors}
