"""What Ray has room for, how often it is asked, and what a search remembers of its end: without a cluster."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import ray
from distributed_backends.ray import cluster
from distributed_backends.ray.launcher import _looks
from distributed_backends.ray.tune.engine import _Ends

from distributed import DistributedConfig
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog


def plan(folder: Path, **given: Any) -> RunPlan:
    options = {"backend": "ray", "device": "cpu", "num_processes": 4, "global_batch_size": 24}
    options["checkpoint_dir"] = str(folder)
    return resolve(DistributedConfig(**(options | given)), get_catalog(), Facts(), Resources())


@pytest.mark.parametrize(
    ("given", "looks"),
    [
        ({}, 1),
        ({"elastic": {"max_restarts": 3}}, 4),
        ({"elastic": {"min_ranks": 2}}, 10),
        ({"elastic": {"min_ranks": 2}, "ray": {"start_timeout": 3600}}, 120),
        ({"elastic": {"min_ranks": 2, "max_restarts": 1}, "ray": {"start_timeout": 20}}, 2),
    ],
)
def test_all_looks_for_room_together_take_as_long_as_was_asked(
    given: dict[str, Any], looks: int, tmp_path: Path
) -> None:
    assert _looks(plan(tmp_path, **given)) == looks


def test_gpus_that_may_come_count_for_a_run_that_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many ranks as there are GPUs are not as many as an autoscaler could buy."""
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 8.0})
    monkeypatch.setattr(cluster, "_limits", lambda: {"GPU": 64})
    assert (cluster.num_gpus(or_to_come=False), cluster.num_gpus(or_to_come=True)) == (8, 64)


def test_a_search_that_goes_on_has_not_ended_yet() -> None:
    """A trial without the metric had ended it; the script is mended now."""
    ends = _Ends(60.0)
    ends.found = True
    assert ends.stop_all()
    assert not pickle.loads(pickle.dumps(ends)).stop_all()
