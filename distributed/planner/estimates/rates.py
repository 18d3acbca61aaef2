"""How long operations and collectives take on a profile: by its rates, or by curves that were measured."""

from __future__ import annotations

from collections.abc import Iterable
from math import hypot
from typing import Protocol

from distributed.planner.estimates.engine import OURS, Engine
from distributed.planner.estimates.hardware import HardwareProfile
from distributed.planner.estimates.links import Link
from distributed.planner.estimates.measured_node import seconds_of
from distributed.planner.estimates.work_facts import CAUSAL, MATRIX_KINDS, Operations

__all__ = ["DatasheetRates", "MeasuredRates", "Rates", "rates_of"]

_BLOCK_OPERATIONS = 25
"""Kernels in the forward pass of a block whose launch time `Achievable.block_seconds` is."""


def _computed(operation: Operations, num_samples: int) -> float:
    """Floating-point operations that a kernel computes: half of them where a mask is causal."""
    return operation.flops.at(num_samples) * (0.5 if operation.kind in CAUSAL else 1.0)


class Rates(Protocol):
    """Times on one device, while all ranks of its node are at work."""

    def compute(self, work: Iterable[Operations], num_samples: int, *, backward: bool = False) -> float:
        """Seconds of operations one after another, with the time of the host."""

    def copy(self, nbytes: float) -> float:
        """Seconds of one operation that moves `nbytes` bytes in all, without the time of the host."""

    def collective(self, operation: str, link: Link, nbytes: float) -> float:
        """Seconds of a collective; `nbytes` as in `Link.seconds`."""

    def exposed(self, communication: float, beside: float) -> float:
        """Seconds of `communication` that `beside` seconds of computation do not hide."""

    def gathered(self, communication: float, number: int, beside: float) -> float:
        """The same of `number` gathers and reductions of units of FSDP2."""

    def replicas(self, number: int) -> float:
        """Seconds of the host in backward for `number` parameters whose gradients DDP reduces."""

    def update(self, nbytes: float, *, sharded: bool) -> float:
        """Seconds of the update of a parameter whose operations move `nbytes` bytes."""

    def waiting(self, compute: float) -> float:
        """Seconds that ranks wait for the slowest one after `compute` seconds of computation."""

    def idle(self, bubble: float, compute: float) -> float:
        """Seconds by which a step is longer than its computation where ranks wait for `bubble` seconds."""


class DatasheetRates:
    """Rates of the profile, and what software reaches of them.

    Args:
        profile: the hardware.
        precision: of matrix products.
        engine: the program that trains.
    """

    def __init__(self, profile: HardwareProfile, precision: str, engine: Engine = OURS) -> None:
        reached = profile.achievable
        self._flops = profile.flops(precision) * reached.matmul
        self._bandwidth = profile.memory_bandwidth * reached.memory
        self._launch = reached.block_seconds / _BLOCK_OPERATIONS
        self._overlap = engine.overlap

    def compute(self, work: Iterable[Operations], num_samples: int, *, backward: bool = False) -> float:
        """Seconds of the device and of the host that launches, as the root of the sum of squares."""
        device = host = 0.0
        for operation in work:
            if operation.kind == "view":
                continue
            moved = operation.nbytes.at(num_samples) / self._bandwidth
            products = _computed(operation, num_samples) / self._flops
            device += operation.number * max(moved, products)
            host += operation.number * self._launch
        return hypot(device, host)

    def copy(self, nbytes: float) -> float:
        """Seconds by the bandwidth of memory."""
        return nbytes / self._bandwidth

    def collective(self, operation: str, link: Link, nbytes: float) -> float:
        """Seconds by latency and bandwidth."""
        return link.seconds(operation, nbytes)

    def exposed(self, communication: float, beside: float) -> float:
        """What is longer than a share of the computation."""
        return max(0.0, communication - self._overlap * beside)

    def gathered(self, communication: float, number: int, beside: float) -> float:
        """As `exposed`."""
        return self.exposed(communication, beside)

    def replicas(self, number: int) -> float:
        """Nothing: the host runs ahead of the device."""
        return 0.0

    def update(self, nbytes: float, *, sharded: bool) -> float:
        """Seconds by the bandwidth of memory."""
        return nbytes / self._bandwidth

    def waiting(self, compute: float) -> float:
        """Nothing: times are of the mean device."""
        return 0.0

    def idle(self, bubble: float, compute: float) -> float:
        """All of them: each rank has a device."""
        return bubble


class MeasuredRates:
    """Curves that `calibrate` measured with a number of ranks at work on each node.

    Args:
        profile: with measurements.
        precision: of matrix products.
        num_ranks: on a node.
    """

    def __init__(self, profile: HardwareProfile, precision: str, num_ranks: int) -> None:
        assert profile.measured is not None
        self._ranks, self._slower = profile.measured.of(num_ranks)
        self._asynchronous = profile.measured.asynchronous
        self._sharing = 1.0 if self._asynchronous else max(1.0, num_ranks / profile.measured.cores)
        self._faster = profile.flops(precision) / profile.flops("fp32")

    def compute(self, work: Iterable[Operations], num_samples: int, *, backward: bool = False) -> float:
        """Seconds by the curve of each kind, and those of the host."""
        ranks = self._ranks
        each = ranks.backward_seconds if backward else ranks.forward_seconds
        device = host = 0.0
        for operation in work:
            if operation.kind == "view":
                continue
            matrix = operation.kind in MATRIX_KINDS
            size = _computed(operation, num_samples) if matrix else operation.nbytes.at(num_samples)
            kind = operation.kind_at(num_samples)
            seconds = seconds_of(ranks.operations[CAUSAL.get(kind, kind)], size)
            device += operation.number * seconds / (self._faster if matrix else 1.0)
            host += operation.number * each
        return self._slower * (hypot(device, host) if self._asynchronous else device + host)

    def copy(self, nbytes: float) -> float:
        """Seconds of an elementwise operation."""
        if nbytes <= 0.0:
            return 0.0
        return self._slower * seconds_of(self._ranks.operations["elementwise"], nbytes)

    def collective(self, operation: str, link: Link, nbytes: float) -> float:
        """Seconds by the curve of the group's size or the next larger one; between nodes by the link."""
        curves = self._ranks.collectives.get(operation, {})
        sizes = [size for size in sorted(curves) if size >= link.size]
        if link.size == 1 or not link.within_node or not sizes:
            return link.seconds(operation, nbytes)
        return self._slower * seconds_of(curves[sizes[0]], max(1.0, nbytes))

    def exposed(self, communication: float, beside: float) -> float:
        """What is left if a share of the communication is hidden, as far as there is computation."""
        return communication - min(self._ranks.overlap * communication, beside)

    def gathered(self, communication: float, number: int, beside: float) -> float:
        """On CPUs the host waits for each; on GPUs as `exposed`."""
        waits = self._slower * number * self._ranks.unit_seconds
        if self._asynchronous:
            return self.exposed(communication, beside) + waits
        return communication + waits

    def replicas(self, number: int) -> float:
        """On CPUs a measured time for each; on GPUs nothing, as the host runs ahead."""
        return 0.0 if self._asynchronous else self._slower * number * self._ranks.replica_seconds

    def update(self, nbytes: float, *, sharded: bool) -> float:
        """Seconds by the curve of updates, and those of the host."""
        ranks = self._ranks
        seconds = seconds_of(ranks.operations["update"], max(1.0, nbytes)) + ranks.update_seconds
        return self._slower * (seconds + (ranks.sharded_update_seconds if sharded else 0.0))

    def waiting(self, compute: float) -> float:
        """A measured share."""
        return self._ranks.skew * compute

    def idle(self, bubble: float, compute: float) -> float:
        """While one of several ranks that share a processor waits, the others compute faster: a step takes as
        long as the computation, or as the longest path with a processor for each rank."""
        return max(0.0, (compute + bubble) / self._sharing - compute)


def rates_of(profile: HardwareProfile, precision: str, world_size: int, engine: Engine = OURS) -> Rates:
    """The measured rates of `profile` if it has any for ranks of a node, otherwise those of its datasheet."""
    if profile.measured is None:
        return DatasheetRates(profile, precision, engine)
    return MeasuredRates(profile, precision, min(world_size, profile.devices_per_node))
