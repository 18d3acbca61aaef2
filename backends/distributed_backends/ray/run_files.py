"""A run's private folder on nodes that do not share the caller's: its files are sent as bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from distributed.system.private_files import write_private
from distributed_backends.ray.cluster import is_local

_WAIT = 10.0
"""Time limit for the nodes' cleanup, in seconds."""


def names_in(folder: Path) -> list[str]:
    """Paths of the files in `folder`, within it. Hidden ones are for this node alone."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [str(path.relative_to(folder)) for path in files if not path.name.startswith(".")]


def pack(folder: Path, without: tuple[str, ...] = ()) -> dict[str, bytes]:
    """The files in `folder`, by their path within it."""
    return {name: (folder / name).read_bytes() for name in names_in(folder) if name not in without}


def unpack(files: Mapping[str, bytes], folder: Path) -> None:
    """Write what `pack` read, readable by this user only."""
    for name, data in files.items():
        target = folder / name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(target, data)


def folder_on(node: str, name: str) -> Path:
    """Path of the folder called `name` on the node with this id."""
    return Path(tempfile.gettempdir(), f"{name}-{node[:16]}")


def files_of(order: Mapping[str, Any]) -> Any:
    """A reference to the files that were in the caller's folder when `fit` began, for a node that joined
    later.

    Args:
        order: the caller's ``node`` and ``folder``, and the files' ``names``.
    """

    def read(folder: str, names: list[str]) -> dict[str, bytes]:
        # Pickled by value: the process that runs it may not find our code.
        import pathlib

        return {name: pathlib.Path(folder, name).read_bytes() for name in names}

    place = NodeAffinitySchedulingStrategy(order["node"], soft=False)
    return (
        ray.remote(num_cpus=0)(read)
        .options(scheduling_strategy=place)
        .remote(order["folder"], order["names"])
    )


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

    # If the cluster is gone, so are the files, and the run's own error is the one to report.
    with suppress(Exception):
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        if len(nodes) == 1 and is_local():
            return
        task = ray.remote(num_cpus=0)(remove)
        places = [NodeAffinitySchedulingStrategy(node, soft=True) for node in nodes]
        sent = [task.options(scheduling_strategy=place).remote() for place in places]
        ray.wait(sent, num_returns=len(sent), timeout=_WAIT)
