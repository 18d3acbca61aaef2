"""One rank, in a worker of Ray Train."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.collective
import torch.distributed as dist

from distributed.network import loopback_interface
from distributed.plugin_manager import load_target
from distributed.rendezvous import Rendezvous
from distributed.transport import write_private
from distributed_backends.ray_files import folder_on, pack, unpack
from distributed_backends.ray_launcher import REPORT
from distributed_backends.ray_output import Voice, hear

__all__ = ["run_rank"]

_TIMEOUT = timedelta(seconds=300)
_served: list[Rendezvous] = []
"""Stores that this process serves until it ends: other ranks may still need them then."""


def run_rank(order: Mapping[str, Any]) -> dict[str, bytes] | None:
    """Run the task of `order` as this worker's rank.

    Returns:
        Rank 0's result, when the caller cannot read it from the folder.

    Raises:
        RuntimeError: the rank failed; its report follows `REPORT`.
    """
    rank = ray.train.get_context().get_world_rank()
    if os.path.isdir(order["cwd"]):
        os.chdir(order["cwd"])
    if rank == 0 and order["orders"] is not None:
        hear(order["orders"])
    with Voice(rank, order["queue"]):
        folder, shared = _folder(order)
        os.environ.update({**order["env"], **_meeting_variables(), "DISTRIBUTED_RUN_DIR": str(folder)})
        status = load_target(order["target"])(folder)
    if status:
        report = (folder / f"error_{rank}.json").read_text(encoding="utf-8")
        raise RuntimeError(f"{REPORT}{report}")
    return None if shared or rank else pack(folder, without=("task.bin", "sys_path.json"))


def _folder(order: Mapping[str, Any]) -> tuple[Path, bool]:
    """The run's folder as this node has it, and whether that is the caller's own. Collective."""
    context, node = ray.train.get_context(), ray.get_runtime_context().get_node_id()
    folder = Path(order["folder"])
    shared = node == order["node"] and os.access(folder, os.W_OK)
    if not shared:
        folder = folder_on(node, folder.name)
        if context.get_local_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
            folder.mkdir(mode=0o700)
            unpack(ray.get(order["files"][0]), folder)
            _extend_path(folder)
    if order["files"]:
        ray.train.collective.barrier()
    return folder, shared


def _extend_path(folder: Path) -> None:
    """The caller's places to import from, then this node's own: its layout may be another."""
    listed = folder / "sys_path.json"
    if listed.exists():
        path = dict.fromkeys([*json.loads(listed.read_text(encoding="utf-8")), *sys.path])
        write_private(listed, json.dumps(list(path)).encode())


def _meeting_variables() -> dict[str, str]:
    """What torchrun would tell this rank, with a store that rank 0 serves. Collective."""
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    local_size = context.get_local_world_size()
    host, port = "127.0.0.1", 0
    if rank == 0:
        host = host if local_size == size else ray.util.get_node_ip_address()
        _served.append(Rendezvous(host, 0, size))
        _served[-1].__enter__()
        port = _served[-1].port
    if size > 1:
        host, port = ray.train.collective.broadcast_from_rank_zero((host, port))
    variables = {"GLOO_SOCKET_IFNAME": loopback_interface()} if local_size == size else {}
    return {
        **variables,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(context.get_node_rank()),
        "GROUP_WORLD_SIZE": str(1 if local_size == size else _count_nodes(host, port, rank, size)),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _count_nodes(host: str, port: int, rank: int, size: int) -> int:
    store = dist.TCPStore(host, port, size, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)
    store.set(f"node/{rank}", str(ray.train.get_context().get_node_rank()))
    return len({store.get(f"node/{other}") for other in range(size)})
