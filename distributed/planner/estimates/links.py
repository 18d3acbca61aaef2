"""Links between the ranks of a group: the bandwidth and latency of its collectives.

Ranks that are neighbours along the innermost axis have consecutive numbers, so that the inner axes lie
within a node. Groups that send between nodes at the same time share the network adapters of a node: a group
has the adapters of as many devices as it has ranks there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from distributed.communication.collective_costs import BUS_FACTORS
from distributed.interfaces.parallel_dims import AXES, ParallelDims
from distributed.planner.estimates.hardware import HardwareProfile

__all__ = ["Link", "link_of"]


@dataclass(frozen=True)
class Link:
    """What a group of ranks communicates over.

    Attributes:
        size: number of ranks.
        bandwidth: bytes per second that a rank sends.
        latency: seconds of a message apart from its bytes.
        within_node: whether all ranks are in one node.
    """

    size: int
    bandwidth: float
    latency: float
    within_node: bool

    def seconds(self, operation: str, nbytes: float) -> float:
        """Time of a collective by latency and bandwidth; 0 on one rank.

        Args:
            operation: of `distributed.communication.collective_costs.OPERATIONS`.
            nbytes: the largest buffer of a rank: the result of an all-gather, the input of a reduce-scatter.
        """
        if self.size == 1:
            return 0.0
        rounds = 1 if operation == "send-recv" else ceil(log2(self.size))
        return rounds * self.latency + BUS_FACTORS[operation](self.size) * nbytes / self.bandwidth


def link_of(
    profile: HardwareProfile, dims: ParallelDims, *axes: str, size: int | None = None, step: int = 1
) -> Link:
    """The link of the ranks that differ along `axes` alone.

    Args:
        axes: neighbouring axes of the mesh, outermost first.
        size: number of ranks of a group, if not all along `axes`: ``expert`` ranks within the data ranks.
        step: distance of the ranks of a group along the last of `axes`.
    """
    inner = AXES[AXES.index(axes[-1]) + 1 :]
    stride = dims.size(*inner) * step
    ranks = dims.size(*axes) if size is None else size
    reached = profile.achievable
    inside = max(1, min(ranks, profile.devices_per_node // stride))
    within = profile.link_within_node * reached.link_within_node
    if inside == ranks:
        return Link(ranks, within, profile.latency_within_node, True)
    between = profile.link_between_nodes * reached.link_between_nodes * inside
    latency = max(profile.latency_within_node, profile.latency_between_nodes)
    # Links within a node also carry what leaves it; a faster network never makes a group slower.
    return Link(ranks, min(within, between) if inside > 1 else between, latency, False)
