"""One rank of ``bench comm``: joins the others, and measures each collective with them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from socket import gethostname
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from distributed.errors import UserError, WorkerError
from distributed.interfaces.placement import World
from distributed.launch.own_loop import cleanup_distributed, setup_distributed
from distributed.launch.rank_process import leave, report_error, watch_parent
from distributed.operations.bench.collectives import Collective, formula_bytes, num_elements
from distributed.operations.bench.comm import Plan, Report, Row

__all__ = ["main", "measure", "print_progress"]


def measure(
    plan: Plan, fields: Mapping[str, Any] = MappingProxyType({}), report: Callable[[str], object] = str
) -> Report | None:
    """Join the other ranks and measure with them. Collective.

    Args:
        fields: of the configuration, for `setup_distributed`. Unused if the ranks have met already; they stay
            together then.
        report: called on rank 0 before each operation, with a line of text.

    Returns:
        The report on rank 0, None on the others.

    Raises:
        UserError: the transport cannot do what was asked for.
        WorkerError: a result is wrong.
    """
    joined = dist.is_initialized()
    device = _device_of_group() if joined else setup_distributed(**fields).device
    try:
        world = _world(device)
        if world.size < 2:
            raise UserError(
                "a single rank has no other to communicate with",
                field="world_size",
                got=world.size,
                allowed="2, 3, ...",
            )
        transport, kind = _transport(torch.device(device)), torch.device(device).type
        found = Report(plan, transport, kind, world.size, world.num_nodes)
        for operation, algorithm in plan.cases:
            if world.rank == 0:
                report(f"{operation} ({algorithm}): {len(plan.sizes)} sizes on {world.size} ranks")
            for nbytes in plan.sizes:
                found.rows.append(_measure(plan, operation, algorithm, nbytes, found.transport, world))
    finally:
        if not joined:
            cleanup_distributed()
    return found if world.rank == 0 else None


def _device_of_group() -> str:
    """The current GPU if the ranks have met over nccl."""
    return f"cuda:{torch.cuda.current_device()}" if "nccl" in dist.get_backend_config() else "cpu"


def _world(device: str) -> World:
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, gethostname())
    rank = dist.get_rank()
    return World(rank=rank, size=len(hosts), num_nodes=len(set(hosts)), host=hosts[rank], device=device)


def _transport(device: torch.device) -> str:
    group = dist.group.WORLD
    assert group is not None
    return str(group._get_backend(device).name())


def _measure(plan: Plan, operation: str, algorithm: str, nbytes: int, transport: str, world: World) -> Row:
    dtype, device = getattr(torch, plan.dtype), torch.device(world.device)
    itemsize = dtype.itemsize
    count = num_elements(operation, nbytes, itemsize, world.size)
    collective = Collective(operation, algorithm, count, dtype, device)
    _first_call(collective, operation, plan.dtype, transport)
    for _ in range(plan.warmup):
        collective.run()
    timed = _on_gpu if device.type == "cuda" else _on_host
    seconds = timed(collective, plan.iterations, device)
    sent, right = _check(collective, transport, device)
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, (seconds, sent, right, world.host))
    for rank, (_, _, right, host) in enumerate(found):
        if not right:
            what = (
                f"{operation} ({algorithm}) of {count} {plan.dtype} over {transport} on rank {rank} ({host})"
            )
            raise WorkerError(
                f"wrong result of {what}",
                rank=rank,
                host=host,
                exc_type="WrongResult",
            )
    slowest = [max(times) for times in zip(*(times for times, *_ in found), strict=True)]
    amounts = [sent for _, sent, *_ in found]
    return Row(
        operation,
        algorithm,
        count * itemsize,
        count,
        world.size,
        slowest,
        None if None in amounts else sum(amounts) / world.size,
        formula_bytes(operation, algorithm, count, itemsize, world.size),
    )


def _first_call(collective: Collective, operation: str, dtype: str, transport: str) -> None:
    """Call it once, which connects the ranks and shows whether the transport can do it."""
    collective.fill()
    try:
        collective.run()
    except (RuntimeError, ValueError, TypeError) as error:
        # Of a connection that was lost, another rank has the cause.
        if isinstance(error, dist.DistNetworkError) or "Connection" in str(error):
            raise
        raise UserError(
            f"{transport} cannot run {operation} with this dtype: {str(error).splitlines()[0]}",
            field="--dtype",
            got=dtype,
            remedy="Use another --dtype, or choose --operations without this one",
        ) from error


def _on_host(collective: Collective, iterations: int, device: torch.device) -> list[float]:
    """Seconds of each call on this rank, from a barrier on."""
    seconds = []
    for _ in range(iterations):
        dist.barrier()
        start = perf_counter()
        collective.run()
        seconds.append(perf_counter() - start)
    return seconds


def _on_gpu(collective: Collective, iterations: int, device: torch.device) -> list[float]:
    """The same by events on the stream, after a small all-reduce that aligns the ranks; the host does not
    wait in between."""
    token = torch.zeros(1, device=device)
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(iterations)]
    for start, end in marks:
        dist.all_reduce(token)
        start.record()
        collective.run()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) * 1e-3 for start, end in marks]


def _check(collective: Collective, transport: str, device: torch.device) -> tuple[float | None, bool]:
    """(bytes that this rank has written in one call, or None; whether its result is right)."""
    collective.fill()
    dist.barrier()
    before = _bytes_written()
    collective.run()
    after = _bytes_written()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    # Only gloo sends by system calls that the kernel counts for a process.
    counts = transport == "gloo" and before is not None and after is not None
    return float(after - before) if counts else None, collective.is_right()  # type: ignore[operator]


def _bytes_written() -> int | None:
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("wchar:"))
    except OSError:
        return None


def main(text: str) -> int:
    """A rank that ``bench comm`` has started: leave the report, or the error, in the run's folder.

    Args:
        text: JSON: plan, and fields for `setup_distributed`.
    """
    watch_parent()
    folder, task = Path(os.environ["DISTRIBUTED_RUN_DIR"]), json.loads(text)
    try:
        found = measure(Plan(**task["plan"]), task["fields"], print_progress)
        if found is not None:
            found.save(folder)
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank has to be reported
        report_error(error, folder)
        return 1
    return 0


def print_progress(text: str) -> None:
    """Print a line about what is measured now to standard error."""
    print(f"measuring {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    leave(main(sys.argv[1]))
