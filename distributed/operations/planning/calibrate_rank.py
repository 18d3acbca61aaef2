"""One rank of ``calibrate``: computes and communicates while the other ranks of the node do the same."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from distributed.launch.own_loop import cleanup_distributed, setup_distributed
from distributed.launch.rank_process import leave, report_error, watch_parent
from distributed.operations.planning.measure_collectives import measure_collectives, measure_overlap
from distributed.operations.planning.measure_host import HostTimes, measure_host
from distributed.operations.planning.measure_operations import (
    Clock,
    Curves,
    matmul_rate,
    measure_kinds,
    memory_bandwidth,
    reference_operation,
)
from distributed.operations.planning.measure_sharding import measure_waits
from distributed.planner.estimates.measured_node import seconds_of
from distributed.system.private_files import write_private

__all__ = ["RESULT", "main", "measure"]

RESULT = "calibration.json"
_LIMIT = 8.0
"""Seconds after which each operation is timed once only."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def measure(duration: float, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that this rank measures beside the others. Collective.

    Args:
        duration: seconds for each point of a curve.
        fields: of the configuration, for `setup_distributed`.

    Returns:
        JSON. Curves and times of the host are means over the ranks, and collectives take as long as on the
        slowest one; what DDP and FSDP2 take, and the rates of the device, are those of this rank.
    """
    device = setup_distributed(**fields).device
    try:
        shared = device == "cpu" and dist.get_world_size() > len(os.sched_getaffinity(0))
        clock = Clock(duration, device, shared=shared, limit=_LIMIT)
        dist.barrier()
        curves = _mean_over_ranks(measure_kinds(clock))
        host = _mean_times(measure_host(clock, curves))
        ranks: dict[str, Any] = {
            "threads": torch.get_num_threads(),
            "operations": curves,
            **host._asdict(),
        }
        if dist.get_world_size() > 1:
            ranks |= _together(clock, curves, host)
        dist.barrier()
        rates = {name: matmul_rate(clock, dtype) for name, dtype in _rated(device).items()}
        return {
            "ranks": ranks,
            "peak_flops": rates,
            "memory_bandwidth": memory_bandwidth(clock),
            "host_link": _host_link(clock),
            "device": torch.cuda.get_device_name(device) if device != "cpu" else "cpu",
        }
    finally:
        cleanup_distributed()


def _together(clock: Clock, curves: Curves, host: HostTimes) -> dict[str, Any]:
    """What depends on other ranks. Collective."""
    size, operation = dist.get_world_size(), reference_operation(clock)
    collectives = measure_collectives(clock.duration, clock.device, operation)

    def seconds(name: str, nbytes: float) -> float:
        return seconds_of(collectives[name][size], nbytes) if name in collectives else 0.0

    return {
        "collectives": collectives,
        "overlap": measure_overlap(operation, clock.seconds(operation), clock.device),
        **measure_waits(
            curves,
            seconds,
            clock.device,
            update_seconds=host.update_seconds,
            slower=max(1.0, size / len(os.sched_getaffinity(0))) if clock.device == "cpu" else 1.0,
        )._asdict(),
    }


def _mean_times(times: HostTimes) -> HostTimes:
    """The mean on all ranks. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, times)
    return HostTimes(*map(fmean, zip(*found, strict=True)))


def _mean_over_ranks(curves: Curves) -> Curves:
    """The curves with the mean of the seconds on all ranks. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, curves)
    return {
        kind: tuple(
            (size, fmean(each[kind][index][1] for each in found)) for index, (size, _) in enumerate(points)
        )
        for kind, points in curves.items()
    }


def _rated(device: str) -> dict[str, torch.dtype]:
    """Dtypes of matrix products; CPUs compute in 16-bit floats without a rate of their own."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16} if device == "cpu" else _DTYPES


def _host_link(clock: Clock) -> float:
    """Bytes per second of a copy from host memory to the device."""
    source = torch.ones(2**22, pin_memory=clock.device != "cpu")
    target = torch.empty_like(source, device=clock.device)
    return source.nbytes / clock.seconds(lambda: target.copy_(source, non_blocking=True))


def main(text: str) -> int:
    """Leave rank 0's result, or the error, in the folder of the run.

    Args:
        text: JSON: duration, and fields for `setup_distributed`.
    """
    watch_parent()
    warnings.simplefilter("ignore", FutureWarning)  # of names of collectives that torch has renamed
    folder, task = Path(os.environ["DISTRIBUTED_RUN_DIR"]), json.loads(text)
    try:
        found = measure(task["duration"], task["fields"])
        if os.environ.get("RANK", "0") == "0":
            write_private(folder / RESULT, json.dumps(found).encode())
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank has to be reported
        report_error(error, folder)
        return 1
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1]))
