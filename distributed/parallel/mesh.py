"""Mesh: the device mesh of a run, its process groups, and how many ranks hold the same elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distributed.checkpoint.dtensor import is_sharded
from distributed.checkpoint.rank_local import Replica
from distributed.interfaces.parallel_dims import AXES, DATA_AXES, EXPERT_AXES, ParallelDims
from distributed.training.compression import Held

__all__ = ["Mesh", "forget_mesh", "shared_mesh"]

_DIFFER = {*DATA_AXES, "expert_data", "context"}
"""Axes along which ranks have different samples, or slices of them."""


class Mesh:
    """The ranks as a grid with an axis for each way of dividing a training. Collective.

    Args:
        dims: number of ranks along each axis.
        rank: this rank.
        device: its device, e.g. ``cpu`` or ``cuda:1``.
        timeout: of a collective, in seconds.

    Attributes:
        device_mesh: torch's mesh, with the axes that have several ranks.
        coordinates: axis -> index of this rank along it.
        experts: the ranks that hold different experts and differ in nothing else; None without such an axis.
        same_experts: process group of the ranks with different samples, or slices of them, that hold the same
            experts; None if that is this rank only.
        key: what meshes of the same ranks are equal by.
        world: process group of all ranks.
    """

    def __init__(self, dims: ParallelDims, rank: int, device: str, timeout: float) -> None:
        self.dims, self.rank, self._timeout = dims, rank, timedelta(seconds=timeout)
        self.key, self.world = (dims, device, timeout), dist.group.WORLD
        self.coordinates = dims.coordinates(rank)
        self._axes = tuple(axis for axis in AXES if dims.size(axis) > 1)
        sizes = tuple(dims.size(axis) for axis in self._axes)
        self.device_mesh = init_device_mesh(device.partition(":")[0], sizes, mesh_dim_names=self._axes)
        self._groups: dict[tuple[str, ...], Any] = {}
        self._parts: dict[tuple[Any, ...], Any] = {}
        self.experts: DeviceMesh | None = None
        self.same_experts: Any = None
        if dims.expert > 1:
            kind = self.device_mesh.device_type
            self.experts = DeviceMesh.from_group(self._new_group("expert"), kind, mesh_dim_names=("expert",))
            if dims.copies_of_experts > 1:
                self.same_experts = self._new_group("expert_data", "context")

    def _new_group(self, *axes: str) -> Any:
        """The ranks that differ along some of `EXPERT_AXES`. A mesh would use the group of all where these
        are all, whose collectives of gradients run at the same time."""
        ranks = torch.arange(self.dims.world_size).view([self.dims.size(name) for name in EXPERT_AXES])
        last = ranks.movedim([EXPERT_AXES.index(axis) for axis in axes], list(range(-len(axes), 0)))
        sets = last.reshape(-1, self.dims.size(*axes)).tolist()
        return dist.new_subgroups_by_enumeration(sets, timeout=self._timeout)[0]

    def submesh(self, *axes: str) -> DeviceMesh:
        """The mesh along those of `axes` that have several ranks."""
        found = tuple(axis for axis in self._axes if axis in axes)
        return self.device_mesh if found == self._axes else self.device_mesh[found]

    def group(self, *axes: str) -> Any:
        """Process group of the ranks that differ from this one along `axes` alone; None if that is this rank
        only. Collective when first called for these axes."""
        found = tuple(axis for axis in self._axes if axis in axes)
        if not found:
            return None
        if found not in self._groups:
            mesh = self.submesh(*found)
            flat = mesh if mesh.ndim == 1 else mesh._flatten("_".join(found))
            group = flat.get_group()
            self._groups[found] = group
            self.set_timeouts()
        return self._groups[found]

    def set_timeouts(self) -> None:
        """Limit collectives: a group may be that of all ranks, which other meshes share."""
        for group in self._groups.values():
            dist.distributed_c10d._set_pg_timeout(self._timeout, group)

    def part_of_group(self, axis: str, indices: Sequence[int]) -> Any:
        """Process group of those of the ranks along `axis` that have one of `indices` there; None on ranks
        that have another. Collective over all ranks when first called for these indices."""
        key = (axis, *indices)
        if key not in self._parts:
            self._parts[key] = self._new_part(axis, indices)
        return self._parts[key]

    def _new_part(self, axis: str, indices: Sequence[int]) -> Any:
        found = None
        for rank in range(self.dims.world_size):
            if self.dims.coordinates(rank)[axis]:
                continue  # each line of ranks once: from its first
            line = [self.dims.moved(rank, axis, index) for index in indices]
            group = dist.new_group(line, timeout=self._timeout)
            found = group if self.rank in line else found
        return found

    def copies(self, tensor: Tensor) -> tuple[int, int]:
        """Index of this rank among those of its stage that hold the same elements of `tensor`, and their
        number."""
        cut = {"pipeline", *self.axes_of(tensor)}
        rest = [axis for axis in (EXPERT_AXES if "expert" in cut else AXES) if axis not in cut]
        return self.dims.index(self.rank, *rest), self.dims.size(*rest)

    def place_of(self, parameter: Tensor) -> Held:
        """Where this rank is among those of its stage that hold a parameter: each rank with other samples, or
        other slices of them, holds a replica."""
        cut = {"pipeline", *self.axes_of(parameter)}
        axes = [axis for axis in (EXPERT_AXES if "expert" in cut else AXES) if axis != "pipeline"]
        parts = [axis for axis in axes if axis in cut]
        replicas = [axis for axis in axes if axis not in cut and axis in _DIFFER]
        copies = [axis for axis in axes if axis not in cut and axis not in _DIFFER]
        index, size = partial(self.dims.index, self.rank), self.dims.size
        replica = Replica(index(*replicas), size(*replicas), index(*copies), size(*copies))
        return Held(parameter, replica, index(*parts), size(*parts))

    def axes_of(self, tensor: Any) -> set[str]:
        """Axes along which a tensor is cut."""
        if not is_sharded(tensor):
            return set()
        names = tensor.device_mesh.mesh_dim_names or ()
        return {
            name
            for name, placement in zip(names, tensor.placements, strict=True)
            if hasattr(placement, "dim")
        }


_meshes: dict[Any, Mesh] = {}
"""Meshes of this process, by `Mesh.key`. Threads of a gloo group wake up a hundred times a second, so that a
process that makes groups for each of many runs becomes slow."""


def shared_mesh(
    dims: ParallelDims, rank: int, device: str, timeout: float, add: Callable[[list[float]], list[float]]
) -> Mesh:
    """The mesh of an earlier run, if all ranks have it, or a new one. Collective.

    Args:
        dims, rank, device, timeout: as of `Mesh`.
        add: sums numbers over all ranks.
    """
    key = dims, device, timeout
    found = _meshes.get(key)
    usable = found is not None and found.world is dist.group.WORLD
    everywhere = add([float(usable)])[0] == dims.world_size
    if found is None or not everywhere:
        _meshes.pop(key, None)  # also where what follows fails
        found = _meshes[key] = Mesh(dims, rank, device, timeout)
    found.set_timeouts()
    return found


def forget_mesh(mesh: Mesh) -> None:
    """Let no other run have `mesh`, whose groups may hold unfinished collectives."""
    if _meshes.get(mesh.key) is mesh:
        del _meshes[mesh.key]
