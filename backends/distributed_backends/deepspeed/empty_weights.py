"""Refuse writes to weights that stage 3 has divided, for which the module holds empty tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distributed.training.model_traits import written_weights


class RefusesEmptyWrites(TorchDispatchMode):
    """Inside, an operation that would change a divided weight of `module`, or a view of it, is an error."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        named = module.named_parameters()
        self._names = {_storage(parameter): name for name, parameter in named if parameter.numel() == 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            for value in tree_leaves(args[:1]):
                if isinstance(value, Tensor) and value.numel() == 0 and _storage(value) in self._names:
                    name = self._names[_storage(value)]
                    raise written_weights(f"the parameter '{name}'", "deepspeed")
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
