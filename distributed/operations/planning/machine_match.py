"""Whether a measured profile is of the machine on which a run would be."""

from __future__ import annotations

import os

from distributed.planner.estimates.hardware import HardwareProfile
from distributed.system.omp_threads import omp_threads
from distributed.system.output import print_line

__all__ = ["announce_difference", "difference_to_machine", "shared_cores"]


def difference_to_machine(
    profile: HardwareProfile, num_ranks: int, *, cores: int | None = None, threads: int | None = None
) -> str | None:
    """A sentence about how `profile` was measured in another way than a run here would compute.

    Args:
        profile: any; one without measurements differs in nothing.
        num_ranks: of the run on this node.
        cores: of this machine; None reads them.
        threads: of each rank; None is OMP_NUM_THREADS, or an equal share of the cores.
    """
    node = profile.measured
    if node is None or node.asynchronous:
        return None
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    if threads is None:
        threads = omp_threads(os.environ, cores) or max(1, cores // num_ranks)
    start = f"the profile {profile.name} was measured"
    if node.cores != cores:
        return f"{start} on {node.cores} cores, and there are {cores} here"
    if num_ranks > max(node.ranks):
        return f"{start} with at most {max(node.ranks)} ranks on the node, and the run has {num_ranks}"
    measured, _ = node.of(num_ranks)
    if measured.threads != threads:
        return f"{start} with {measured.threads} threads a rank, and the run has {threads}"
    return None


def shared_cores(profile: HardwareProfile, num_ranks: int, *, cores: int | None = None) -> str | None:
    """A clause about ranks that share cores in a way that `profile` does not have; None without.

    Args:
        num_ranks: of the run, all on this host.
        cores: of this machine; None reads them.
    """
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    if profile.device != "cpu" or num_ranks <= cores:
        return None
    if profile.measured is None:
        covers = "has a core for each rank"
    elif num_ranks > max(profile.measured.ranks):
        covers = f"was measured with at most {max(profile.measured.ranks)}"
    else:
        return None
    count = f"{cores} core{'s' if cores > 1 else ''}"
    return f"{num_ranks} ranks share {count}, and the profile {profile.name} {covers}"


def announce_difference(profile: HardwareProfile, num_ranks: int) -> None:
    """Print a note if `profile` was measured in another way than `num_ranks` ranks here would compute."""
    # Ranks that are processes are all on this host, however many a profile was measured with.
    most = num_ranks if profile.device == "cpu" else profile.devices_per_node
    found = difference_to_machine(profile, min(num_ranks, most))
    if found is not None:
        print_line(f"note: {found}; run `calibrate` here for predictions of this machine")
