"""Assignments to ``.data`` of DTensors, which torch ignores without a word (torch 2.13)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["AssignedData", "follow_data"]


class AssignedData:
    """``DTensor.data``: an assignment gives the tensor the local part of another, as it does without ranks.

    Attributes:
        count: assignments so far.
    """

    count = 0

    def __get__(self, tensor: Any, kind: Any = None) -> Any:
        return self if tensor is None else Tensor.data.__get__(tensor)  # type: ignore[attr-defined]

    def __set__(self, tensor: Any, value: Any) -> None:
        if not isinstance(value, DTensor):
            Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
            return
        if value.shape != tensor.shape or value.placements != tensor.placements:
            raise ValueError(f"a tensor of {value._spec} cannot become the data of one of {tensor._spec}")
        tensor._local_tensor = value._local_tensor.detach()
        AssignedData.count += 1


def follow_data() -> None:
    """Let assignments take effect in this process from now on."""
    if not isinstance(vars(DTensor).get("data"), AssignedData):
        DTensor.data = AssignedData()  # type: ignore[assignment]
