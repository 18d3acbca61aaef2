"""The collectives of a `Backend`, for code that needs nothing else of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from distributed.interfaces.placement import World

__all__ = ["Ranks"]


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
