"""ParallelDims: how many ranks each axis of the mesh has, and where a rank lies in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

__all__ = ["AXES", "DATA_AXES", "EXPERT_AXES", "MODEL_AXES", "ParallelDims"]

AXES = ("pipeline", "data", "shard", "context", "tensor")
"""Axes of the mesh, outermost first: ranks that are neighbours along ``tensor`` have consecutive numbers."""

DATA_AXES = ("data", "shard")
"""Axes along which ranks have different samples."""

MODEL_AXES = tuple(axis for axis in AXES if axis not in DATA_AXES)
"""Axes along which ranks have the same samples."""

EXPERT_AXES = ("pipeline", "expert_data", "expert", "context", "tensor")
"""Axes of the mesh for experts: the ranks with different samples are ``expert_data`` groups, in each of which
every expert is held by one of the ``expert`` ranks."""


@dataclass(frozen=True)
class ParallelDims:
    """Number of ranks along each axis of the mesh.

    Attributes:
        data: ranks with different samples, which hold the same part of the model.
        shard: ranks with different samples, which hold different shards of it.
        tensor: ranks that cut its layers between them.
        pipeline: ranks that hold different layers.
        context: ranks that hold slices of each sequence.
        expert: consecutive ranks, of those with different samples, that hold different experts.
    """

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    @property
    def expert_data(self) -> int:
        """Number of ranks with different samples that hold the same experts."""
        return self.data_parallel_size // self.expert

    @property
    def copies_of_experts(self) -> int:
        """Number of ranks with different samples, or slices of them, that hold the same experts."""
        return self.size("expert_data", "context")

    def size(self, *axes: str) -> int:
        """Number of ranks along `axes` together; 1 without any."""
        return prod(int(getattr(self, axis)) for axis in axes)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.size(*AXES)

    @property
    def data_parallel_size(self) -> int:
        """Number of slices of a global batch."""
        return self.size(*DATA_AXES)

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that have the same samples."""
        return self.size(*MODEL_AXES)

    @property
    def model_axes(self) -> str:
        """``pipeline 2 x tensor 4``: the axes along which ranks have the same samples; empty without one."""
        return self._named(MODEL_AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> index of `rank` along it."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.size(axis))
        place = found["data"] * self.shard + found["shard"]
        found["expert_data"], found["expert"] = divmod(place, self.expert)
        return {axis: found[axis] for axis in (*AXES, "expert_data", "expert")}

    def index(self, rank: int, *axes: str) -> int:
        """Index of `rank` among the ranks that differ from it along `axes` alone, in their order."""
        place, number = self.coordinates(rank), 0
        for axis in axes:
            number = number * self.size(axis) + place[axis]
        return number

    def moved(self, rank: int, axis: str, index: int) -> int:
        """The rank that differs from `rank` along `axis` alone, where it has `index`."""
        place, number = {**self.coordinates(rank), axis: index}, 0
        for name in AXES:
            number = number * self.size(name) + place[name]
        return number

    def __str__(self) -> str:
        """``data 2 x tensor 4, expert 2``: the axes with several ranks."""
        experts = f", expert {self.expert}" if self.expert > 1 else ""
        return (self._named(AXES) or "1 rank") + experts

    def _named(self, axes: Iterable[str]) -> str:
        return " x ".join(f"{axis} {self.size(axis)}" for axis in axes if self.size(axis) > 1)
