"""Measure what ranks wait for beyond collectives: each other, and the bookkeeping of DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, median
from time import thread_time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.operations.planning.measure_collectives import timed
from distributed.operations.planning.measure_host import network
from distributed.operations.planning.measure_operations import Curves
from distributed.planner.estimates.measured_node import seconds_of

__all__ = ["Waits", "measure_waits"]

_LAYERS, _WIDTH = 6, 256
_SMALL = 8, 32
"""Layers and width of a network whose parameters fit into the smallest bucket."""
_REPEATS = 5
_SMALL_REPEATS = 20


class Waits(NamedTuple):
    """What `measure_waits` found.

    Attributes:
        skew: by how much the slowest rank is behind the mean one, as a share of the computation.
        replica_seconds: for each parameter of DDP, of the host.
        unit_seconds: for each gather and each reduction of a unit of FSDP2, beyond the collective and copies.
        sharded_update_seconds: for the update of each sharded parameter, beyond that of a whole one.
    """

    skew: float
    replica_seconds: float
    unit_seconds: float
    sharded_update_seconds: float


def measure_waits(
    curves: Curves,
    collective: Callable[[str, float], float],
    device: str,
    *,
    update_seconds: float = 0.0,
    slower: float = 1.0,
) -> Waits:
    """Train small networks on all ranks: whole, as replicas of DDP, and sharded. Collective.

    Args:
        curves: kind -> (size, seconds).
        collective: (operation, bytes) -> seconds, among all ranks.
        device: of this rank.
        update_seconds: of the host for the update of each parameter.
        slower: ranks that share a processor.
    """
    torch.manual_seed(0)
    model = network(_LAYERS, _WIDTH).to(device)
    values = torch.randn(4, 128, _WIDTH, device=device)
    computed, skew = _plain(model, values, device)
    unit_bytes = sum(p.numel() * p.element_size() for p in model[0].parameters())
    exchanged = 2 * collective("all-gather", unit_bytes) + collective("reduce-scatter", unit_bytes)
    copied = 4 * seconds_of(curves["elementwise"], 2.0 * unit_bytes)
    expected = computed + _LAYERS * (exchanged + copied)
    measured, updated, rest = _sharded(model, values, device, curves)
    each = max(0.0, measured - expected) / (3 * _LAYERS)
    number = sum(1 for _ in model.parameters())
    shards = max(0.0, (updated - rest) / number - update_seconds)
    return Waits(skew, slower * _replica(device), each, shards)


def _replica(device: str) -> float:
    """Seconds of this thread for each parameter of DDP: its hooks, and copies of gradients into buckets. What
    a collective takes meanwhile is no time of this thread."""
    from torch.nn.parallel import DistributedDataParallel

    model = network(*_SMALL).to(device)
    values = torch.randn(1, 16, _SMALL[1], device=device)
    alone = _thread_seconds(model, values)
    together = _thread_seconds(DistributedDataParallel(model, gradient_as_bucket_view=True), values)
    return max(0.0, together - alone) / sum(1 for _ in model.parameters())


def _thread_seconds(model: nn.Module, values: Tensor) -> float:
    """Median seconds of this thread in a pass."""
    found = []
    for _ in range(_SMALL_REPEATS):
        model.zero_grad()
        start = thread_time()
        model(values).sum().backward()
        found.append(thread_time() - start)
    return median(found[_SMALL_REPEATS // 4 :])


def _plain(model: nn.Module, values: Tensor, device: str) -> tuple[float, float]:
    """Seconds of a pass of the whole network on the slowest rank, and its share behind the mean one."""
    slowest, skews = [], []
    for _ in range(_REPEATS):
        seconds = timed(lambda: model(values).sum().backward(), 1, device)
        each: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(each, seconds)
        slowest.append(max(each))
        skews.append(max(each) / fmean(each) - 1.0)
    return median(slowest[1:]), median(skews[1:])


def _sharded(model: Any, values: Tensor, device: str, curves: Curves) -> tuple[float, float, float]:
    """Seconds of a pass under FSDP2, of the update, and of the update by its curve."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.split(":")[0], (ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    passes, updates = [], []
    for _ in range(_REPEATS):
        optimizer.zero_grad()
        passes.append(timed(lambda: model(values).sum().backward(), 1, device))
        updates.append(timed(optimizer.step, 1, device))
    bytes_each = [76.0 * -(-p.numel() // ranks) for p in model.parameters()]
    known = sum(seconds_of(curves["update"], nbytes) for nbytes in bytes_each)
    return median(passes[1:]), median(updates[1:]), known
