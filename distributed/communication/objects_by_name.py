"""Objects of libraries that are pickled by their names: pickle can take neither them nor their contents."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket, _OpNamespace

__all__ = ["reduce_by_name"]


def reduce_by_name(obj: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Return what makes `obj` in another process, as ``__reduce__`` does; None for objects of other kinds.

    These are modules of a class of their own, such as ``torch.backends.cudnn``,
    ``torch.backends.cuda.matmul``, and operators with their namespaces.
    """
    if isinstance(obj, _OpNamespace):
        return attrgetter(f"ops.{obj.name}"), (torch,)
    if isinstance(obj, (OpOverload, OpOverloadPacket)):
        return attrgetter(f"ops.{obj}"), (torch,)
    if obj is torch.backends.cuda.matmul:
        return attrgetter("backends.cuda.matmul"), (torch,)
    if isinstance(obj, ModuleType) and sys.modules.get(obj.__name__) is obj:
        return import_module, (obj.__name__,)
    return None
