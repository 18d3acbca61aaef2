"""The neutral form of training state: named tensors cut into chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from operator import add
from typing import Any

from distributed.system.boxes import first_element, is_one_range

__all__ = ["BackendState", "Chunk", "StateReader"]


@dataclass(frozen=True)
class Chunk:
    """A piece of one named tensor that one rank owns.

    Attributes:
        name: the parameter's or buffer's name, without ``module.`` or ``_orig_mod.``.
        key: ``model`` for the tensor itself, ``optimizer.<slot>`` for optimizer state.
        shape: of the whole tensor.
        start: first element of the piece in the flattened tensor.
        data: the piece: a 1-dimensional CPU torch tensor that aliases nothing live.
        offsets: where the piece starts along each dimension, if it is a box and not a range of the flattened
            tensor; otherwise empty.
        lengths: the box's extent along each dimension; `data` is its elements in row-major order.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    start: int
    data: Any
    offsets: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()


@dataclass
class BackendState:
    """One rank's share of the training state, ready to be written.

    Attributes:
        chunks: the pieces that this rank owns; over all ranks they tile every tensor.
        groups: the optimizer's hyper-parameter groups, each a JSON-able dict with its
            parameters' names under ``names``. The same on all ranks, `scalar_dtypes` apart,
            which like `scalars` covers the part of this rank.
        scalars: per-parameter optimizer state that is not a tensor of the parameter's
            shape: ``{name: {slot: number}}``. Over all ranks they cover every parameter; a rank
            may leave out those that it does not hold, or that a lower rank gives.
        aliases: tied names -> the name that holds the tensor.
        scaler: gradient scaler state, or None.
    """

    chunks: list[Chunk] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    scaler: dict[str, Any] | None = None


class StateReader(ABC):
    """A saved state, read piece by piece, so that a rank fetches only what it owns.

    Attributes:
        omitted: names of frozen parameters that were not saved -> digest of their values.
    """

    omitted: Mapping[str, str] = {}
    groups: list[dict[str, Any]]
    scalars: Mapping[str, Mapping[str, Any]]
    aliases: Mapping[str, str]
    scaler: dict[str, Any] | None

    @abstractmethod
    def tensors(self) -> Mapping[tuple[str, str], tuple[int, ...]]:
        """``(key, name) -> shape`` of every tensor in the saved state."""

    def dtype(self, key: str, name: str) -> str:
        """Torch's name of a tensor's dtype, e.g. ``bfloat16``."""
        return str(self.read(key, name, 0, 0).dtype).removeprefix("torch.")

    @abstractmethod
    def read(self, key: str, name: str, start: int = 0, length: int | None = None) -> Any:
        """Elements ``start .. start + length`` of the flattened tensor, as a CPU torch tensor.

        Raises:
            KeyError: no such tensor.
            UserError: the stored bytes are damaged (checksum).
        """

    def read_box(self, key: str, name: str, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> Any:
        """A box of the tensor, as a CPU torch tensor of shape `lengths`.

        Args:
            offsets: index of its first element along each dimension.

        Raises:
            KeyError: no such tensor.
            UserError: the stored bytes are damaged (checksum).
        """
        shape = self.tensors()[key, name]
        if is_one_range(shape, lengths):
            return self.read(key, name, first_element(shape, offsets), prod(lengths)).reshape(lengths)
        return self.read(key, name).reshape(shape)[tuple(map(slice, offsets, map(add, offsets, lengths)))]
