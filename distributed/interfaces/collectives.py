"""Collectives without a backend: those of a `Backend`, and those that one backend offers to another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from distributed.interfaces.placement import World

if TYPE_CHECKING:
    from distributed.interfaces.plan import RunPlan

__all__ = ["Collectives", "OneRank", "Ranks"]


class Ranks(Protocol):
    """Ranks that exchange values; every rank calls.

    Attributes:
        world: this rank's place.
    """

    world: World

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """Sum float64 `values` element by element over all ranks."""

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Rank `root`'s `value`, on every rank."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank."""


class OneRank:
    """`Ranks` of a single process: every collective is the identity."""

    world: World = World()

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """The values."""
        return list(values)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """The value."""
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        """A list of the value."""
        return [value]

    def barrier(self) -> None:
        """Return at once."""


class Collectives(ABC):
    """Ranks of one backend on which another backend trains models of its own framework.

    `BackendSpec.collectives` names such a class, and the backend at `BackendSpec.over_collectives` uses it.

    Attributes:
        world: this rank's place, after `join`.
        store: rendezvous store, after `join`; None on a single rank.
    """

    world: World
    store: Any = None

    @abstractmethod
    def join(self, plan: RunPlan, device: str) -> World:
        """Meet the other ranks and return this rank's place among them. Collective.

        Args:
            device: name of this rank's device, for the `World`.

        Raises:
            UserError: the rendezvous or the transport cannot be had.
        """

    @abstractmethod
    def sum_arrays(self, arrays: Sequence[Any]) -> list[Any]:
        """Sums over all ranks, element by element; the arguments are left unchanged. Collective.

        Args:
            arrays: arrays in host memory, which other libraries can read (``__dlpack__``): the same number,
                shapes and dtypes on all ranks.

        Returns:
            As many of the same shapes and dtypes, which other libraries can read, too.
        """

    @abstractmethod
    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """Sum float64 `values` element by element over all ranks."""

    @abstractmethod
    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Rank `root`'s `value`, on every rank."""

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called."""

    @abstractmethod
    def leave(self) -> None:
        """Leave the other ranks. Undoes only what `join` did."""
