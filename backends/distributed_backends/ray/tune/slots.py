"""Slots for the trials of a search: GPUs or CPU slots, and no more trials than fit."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import ray
from ray import tune

from distributed.errors import UserError
from distributed.interfaces.search import Search
from distributed_backends.ray.cluster import address_of
from distributed_backends.ray.section import RaySection
from distributed_backends.ray.tune.schedulers import hands_over
from distributed_backends.ray.tune.search_space import count_grid, translate

_SLOT = "distributed_slot"
"""Resource that limits trials on our own cluster, whose host may have more cores than slots."""


@dataclass
class TrialSlots:
    """Slots of a search.

    Attributes:
        ours: whether the cluster is started for the search.
        device: ``GPU`` or ``CPU``.
        slots: number of GPUs or CPU slots for all trials; known once connected where it is not ours.
    """

    search: Search
    ours: bool
    device: str = "CPU"
    slots: int = 0

    @property
    def num_cpus(self) -> int:
        """Minimum number of CPUs declared by our own cluster."""
        return max(1, self.slots)

    @property
    def resources(self) -> dict[str, float]:
        """Other resources declared by our own cluster."""
        return {_SLOT: float(self.slots)}

    @property
    def share(self) -> float:
        """Share of the slots that each trial holds. Ray counts in ten thousandths."""
        return math.floor(self.search.ranks_per_trial / self.search.trials_per_gpu * 1e4) / 1e4

    @property
    def capacity(self) -> int:
        """Trials that fit at a time."""
        return self.slots * self.search.trials_per_gpu // self.search.ranks_per_trial

    def of_trial(self) -> tune.PlacementGroupFactory:
        """Resources that Ray reserves for one trial, all on one node."""
        held = {"CPU": self.share}
        if self.device == "GPU":
            held["GPU"] = self.share
        if self.ours:
            held[_SLOT] = self.share
        return tune.PlacementGroupFactory([held])

    def max_concurrent(self) -> int:
        """Number of trials sampled ahead; 0 for as many as fit."""
        asked = self.search.max_concurrent or self.capacity
        most = min(asked, self.capacity)
        if not hands_over(self.search):
            return most
        total = self.search.num_samples * count_grid(translate(self.search.space))
        if total > most and (not self.ours or self.search.max_concurrent):
            raise UserError(
                f"this scheduler compares all {total} trials while they run, and only {most} may run at a"
                " time on a cluster with slots for more",
                field="num_samples",
                got=self.search.num_samples,
                allowed=f"at most {most} trials",
                remedy="Raise num_gpus or leave out max_concurrent, or sample less often",
            )
        return 0

    def check(self) -> None:
        """Count the slots of a running cluster, and refuse impossible searches.

        Raises:
            UserError: it has less than requested, or no node that holds a whole trial.
        """
        if not self.ours:
            total = ray.cluster_resources()
            self.device, self.slots = _slots(
                self.search, int(total.get("GPU", 0)), int(total.get("CPU", 0)), True
            )
        nodes = [node["Resources"].get(self.device, 0.0) for node in ray.nodes() if node["Alive"]]
        whole = self.slots if self.ours else min(self.slots, int(max(nodes, default=0.0)))
        if whole < self.share:
            raise UserError(
                f"a trial of {self.search.ranks_per_trial} ranks needs as many {self.device}s on one node;"
                f" there are {whole}",
                field="ranks_per_trial",
                got=self.search.ranks_per_trial,
                allowed=f"at most {whole}",
            )

    def summary(self) -> str:
        """The first lines of a search."""
        search = self.search
        total = search.num_samples * count_grid(translate(search.space))
        ranks = "1 rank" if search.ranks_per_trial == 1 else f"{search.ranks_per_trial} ranks"
        at_once = min(total, self.capacity, search.max_concurrent or total)
        kind = {None: "random search", "asha": "ASHA", "pbt": "population based training"}.get(
            search.scheduler if isinstance(search.scheduler, str | None) else "",
            type(search.scheduler).__name__,
        )
        trials = "1 trial" if total == 1 else f"{total} trials"
        first = f"{kind}: {trials} of {ranks} on {self.device}, {at_once} at a time; in {search.folder}"
        if self.device == "CPU" and search.num_gpus:
            first += "\nnote: no GPU found: num_gpus counts CPU slots"
        return first


def find_slots(search: Search) -> TrialSlots:
    """The slots for `search`, as far as they are known before a cluster is connected.

    Raises:
        UserError: this host has fewer GPUs than requested, or less than a trial needs.
    """
    ours = not ray.is_initialized() and address_of(RaySection(address=search.address)) is None
    if not ours:
        return TrialSlots(search, ours)
    import torch

    gpus = 0 if search.num_cpus else torch.cuda.device_count()
    return TrialSlots(search, ours, *_slots(search, gpus, len(os.sched_getaffinity(0)), False))


def _slots(search: Search, gpus: int, cpus: int, strict: bool) -> tuple[str, int]:
    if search.num_cpus is None and gpus:
        _refuse(search.num_gpus or 0, gpus, "GPU", "num_gpus")
        return "GPU", search.num_gpus or gpus
    asked = search.num_cpus or search.num_gpus
    if strict:
        _refuse(asked or 0, cpus, "CPU", "num_cpus" if search.num_cpus else "num_gpus")
    return "CPU", asked or cpus


def _refuse(asked: int, there: int, what: str, field: str) -> None:
    if asked > there:
        raise UserError(
            f"the search requests {asked} {what}s; there are {there}",
            field=field,
            got=asked,
            allowed=f"at most {there}",
            remedy="Request fewer, or share each between trials (trials_per_gpu)",
        )
