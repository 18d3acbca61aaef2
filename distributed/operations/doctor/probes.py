"""Probes that `doctor` runs in separate processes: ``python -m distributed.operations.doctor.probes NAME``.

Each probe prints one line of JSON, or fails with a traceback whose last line is the cause.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

__all__ = ["allreduce", "devices", "main", "rendezvous"]

_TIMEOUT = timedelta(seconds=30)


def devices() -> dict[str, Any]:
    """GPUs by name, and the CUDA release torch was built for (None for a CPU build)."""
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    for index in range(len(names)):
        torch.ones(1, device=f"cuda:{index}").sum().item()
    return {"gpus": names, "cuda": torch.version.cuda}


def rendezvous() -> dict[str, Any]:
    """Write and read back through a TCPStore; the system picks the port."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=_TIMEOUT)
    store.set("key", "value")
    if store.get("key") != b"value":
        raise RuntimeError("the store gave back another value")
    return {"port": store.port}


def allreduce(backend: str, store: str) -> dict[str, Any]:
    """Start rank 1 beside this process as rank 0, and reduce between them.

    Args:
        backend: ``gloo`` or ``nccl``.
        store: path for the file through which the two meet: no port to race for.

    Raises:
        RuntimeError: a rank failed, or the sum is wrong.
    """
    other = subprocess.Popen(
        [sys.executable, "-m", "distributed.operations.doctor.probes", "reduce", backend, store, "1"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        reduce(backend, store, "0")
        _, err = other.communicate(timeout=_TIMEOUT.total_seconds())
    finally:
        other.kill()
    if other.returncode:
        raise RuntimeError((err.strip().splitlines() or ["rank 1 failed"])[-1])
    return {"backend": backend}


def reduce(backend: str, store: str, rank: str) -> dict[str, Any]:
    """One rank of `allreduce`."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", int(rank)) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=int(rank), world_size=2, timeout=_TIMEOUT
    )
    values = torch.arange(4.0, device=device) + float(rank)
    dist.all_reduce(values)
    expected = [2.0 * index + 1.0 for index in range(4)]
    if values.tolist() != expected:
        raise RuntimeError(f"the sum over two ranks is {values.tolist()}, not {expected}")
    dist.destroy_process_group()
    return {}


def main(words: list[str]) -> None:
    """Run the probe that `words` name and print its answer."""
    probes: dict[str, Callable[..., dict[str, Any]]] = {
        "allreduce": allreduce,
        "devices": devices,
        "reduce": reduce,
        "rendezvous": rendezvous,
    }
    print(json.dumps(probes[words[0]](*words[1:])))


if __name__ == "__main__":
    main(sys.argv[1:])
