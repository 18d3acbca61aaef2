"""A run's private folder on nodes that do not share the caller's: its files travel as bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from distributed.transport import write_private
from distributed_backends.ray_cluster import is_local

__all__ = ["folder_on", "pack", "remove_everywhere", "unpack"]

_WAIT = 10.0
"""Seconds that the nodes may take to clear up."""


def pack(folder: Path, without: tuple[str, ...] = ()) -> dict[str, bytes]:
    """The files in `folder`, by their path within it."""
    names = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for name, path in names.items() if name not in without}


def unpack(files: Mapping[str, bytes], folder: Path) -> None:
    """Write what `pack` read, readable by this user only."""
    for name, data in files.items():
        target = folder / name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(target, data)


def folder_on(node: str, name: str) -> Path:
    """Where the node with this id keeps the folder called `name`."""
    return Path(tempfile.gettempdir(), f"{name}-{node[:16]}")


def remove_everywhere(name: str) -> None:
    """Remove what `folder_on` named from the other nodes, as far as they answer."""

    def remove() -> None:
        # Pickled by value: a node may not find our code outside of a run.
        import pathlib
        import shutil
        import tempfile

        import ray

        node = ray.get_runtime_context().get_node_id()
        shutil.rmtree(pathlib.Path(tempfile.gettempdir(), f"{name}-{node[:16]}"), ignore_errors=True)

    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    if len(nodes) == 1 and is_local():
        return
    task = ray.remote(num_cpus=0)(remove)
    places = [NodeAffinitySchedulingStrategy(node, soft=True) for node in nodes]
    sent = [task.options(scheduling_strategy=place).remote() for place in places]
    ray.wait(sent, num_returns=len(sent), timeout=_WAIT)
