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

from distributed.communication.environment import torchrun_variables
from distributed.communication.rendezvous import Rendezvous
from distributed.interfaces.placement import LauncherEnvironment
from distributed.registry.catalog import load_target
from distributed.resilience.elastic import forget_round
from distributed.resilience.failure_reports import FailureReport
from distributed.system.addresses import loopback_interface
from distributed.system.private_files import write_private
from distributed.system.private_folders import add_owner, start_sweep
from distributed_backends.ray.output import OutputSender, forward_requests
from distributed_backends.ray.run_files import files_of, folder_on, pack, unpack

REPORT = "distributed-report:"
"""Marks a rank's own report in the message of the exception that Ray carries."""

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
        forward_requests(order["orders"])
    with OutputSender(rank, order["queue"]):
        place = _place()
        folder, shared = _folder(order, first_here=place["LOCAL_RANK"] == "0")
        os.environ.update({**order["env"], **place, "DISTRIBUTED_RUN_DIR": str(folder)})
        status = load_target(order["target"])(folder)
    if status:
        report = FailureReport.read(folder, rank)
        assert report is not None
        raise RuntimeError(f"{REPORT}{report.to_json()}")
    return None if shared or rank else pack(folder, without=("task.bin", "sys_path.json"))


def _folder(order: Mapping[str, Any], *, first_here: bool) -> tuple[Path, bool]:
    """The run's folder as this node has it, and whether that is the caller's own. Collective."""
    node = ray.get_runtime_context().get_node_id()
    folder = Path(order["folder"])
    shared = node == order["node"] and os.access(folder, os.W_OK)
    if not shared:
        folder = folder_on(node, folder.name)
        if first_here:
            shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
            start_sweep()
            folder.mkdir(mode=0o700)
            add_owner(folder)
            unpack(ray.get(order["files"][0] if order["files"] else files_of(order)), folder)
            _extend_path(folder)
    elif first_here:
        forget_round(folder)
    ray.train.collective.barrier()
    return folder, shared


def _extend_path(folder: Path) -> None:
    """Extend sys.path by the caller's entries; this node's own stay, because its layout may differ."""
    listed = folder / "sys_path.json"
    if listed.exists():
        path = dict.fromkeys([*json.loads(listed.read_text(encoding="utf-8")), *sys.path])
        write_private(listed, json.dumps(list(path)).encode())


def _place() -> dict[str, str]:
    """torchrun's environment for this rank, with a store that rank 0 serves. Collective."""
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    same_address = context.get_local_world_size() == size
    host, port = "127.0.0.1", 0
    if rank == 0:
        host = host if same_address else ray.util.get_node_ip_address()
        _served.append(Rendezvous(host, 0, size))
        _served[-1].__enter__()
        port = _served[-1].port
    if size > 1:
        host, port = ray.train.collective.broadcast_from_rank_zero((host, port))
    nodes = _nodes_of_ranks(host, port, rank, size)
    local_rank, local_size = nodes[:rank].count(nodes[rank]), nodes.count(nodes[rank])
    unique = list(dict.fromkeys(nodes))
    place = LauncherEnvironment(
        "ray", rank, size, local_rank, local_size, unique.index(nodes[rank]), len(unique), host, port
    )
    variables = {"GLOO_SOCKET_IFNAME": loopback_interface()} if same_address else {}
    return {**variables, **torchrun_variables(place)}


def _nodes_of_ranks(host: str, port: int, rank: int, size: int) -> list[str]:
    """Each rank's node. Ray Train's own local ranks take nodes of one address for one node, where each
    has its own GPUs and, for us, its own folder. Collective."""
    here: str = ray.get_runtime_context().get_node_id()
    if size == 1:
        return [here]
    store = dist.TCPStore(host, port, size, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)
    store.set(f"node/{rank}", here)
    return [store.get(f"node/{other}").decode() for other in range(size)]
