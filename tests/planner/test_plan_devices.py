"""Where ranks compute, on machines of any number of GPUs: decided without one."""

from __future__ import annotations

from typing import Any

import pytest

from distributed import DistributedConfig, UserError
from distributed.interfaces.placement import LauncherEnvironment
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog


def plan(gpus: int, joined: LauncherEnvironment | None = None, **fields: Any) -> RunPlan:
    return resolve(DistributedConfig(**fields), get_catalog(), Facts(), Resources(gpus), joined)


def test_all_visible_gpus_are_used_by_default() -> None:
    found = plan(8)
    assert (found.device, found.world_size, found.communication_backend) == ("cuda", 8, "nccl")
    assert found.device_of(3) == "cuda:3"


def test_serial_uses_one_of_several_gpus() -> None:
    found = plan(8, backend="serial")
    assert (found.device, found.world_size, found.mode) == ("cuda", 1, "in-process")


def test_without_a_gpu_ranks_are_cpu_processes_and_the_plan_says_so() -> None:
    found = plan(0, num_gpus=4)
    assert (found.device, found.world_size, found.communication_backend) == ("cpu", 4, "gloo")
    assert "no GPU found" in found.summary()


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_too_few_gpus_are_refused(device: str) -> None:
    with pytest.raises(UserError, match=r"num_gpus: 4 ranks on this host need 4 GPUs and 2 are visible"):
        plan(2, num_gpus=4, device=device)


def test_ranks_share_a_gpu_over_gloo_where_both_are_asked_for() -> None:
    found = plan(1, num_processes=2, device="cuda", communication_backend="gloo")
    assert (found.device, found.world_size, found.communication_backend) == ("cuda", 2, "gloo")
    assert "note: 2 ranks share 1 GPU(s) over gloo" in found.summary()
    for fields in ({"device": "cuda"}, {"communication_backend": "gloo"}):
        with pytest.raises(UserError, match=r"2 ranks on this host need 2 GPUs and 1 are visible"):
            plan(1, num_processes=2, **fields)
    with pytest.raises(UserError, match=r"0 are visible"):
        plan(0, num_processes=2, device="cuda", communication_backend="gloo")


@pytest.mark.parametrize("axis", ["pipeline", "context", "tensor"])
def test_ranks_that_share_a_model_on_gpus_need_nccl(axis: str) -> None:
    """On a GPU, torch ended their processes: "writev: Bad address" and segmentation faults (torch 2.11)."""
    shared = {"num_processes": 2, "parallel": {axis: 2}, "batch_size": 4}
    fields = {**shared, "communication_backend": "gloo"}
    with pytest.raises(UserError, match=f"communication_backend: ranks along the axis {axis}.*Got 'gloo'"):
        plan(2, **fields, device="cuda")
    assert plan(2, **shared, device="cuda").communication_backend == "nccl"
    assert plan(2, **fields, device="cpu").device == "cpu"


def test_a_launcher_may_show_each_rank_one_gpu() -> None:
    place = LauncherEnvironment("srun", 1, 4, 1, 4, 0, 1, "127.0.0.1", 29500)
    assert plan(1, place).device == "cuda"


def test_gpus_count_over_nodes() -> None:
    found = plan(8, num_nodes=2, gpus_per_node=8, node_rank=1, rdzv_endpoint="n0:29500")
    assert (found.world_size, found.local_size, found.node_rank) == (16, 8, 1)


@pytest.mark.parametrize("given", [{"num_nodes": 2, "gpus_per_node": 4}, {"num_nodes": 2, "num_gpus": 8}])
def test_one_task_of_srun_a_host_starts_the_ranks_of_its_host(given: dict[str, int]) -> None:
    """Slurm has said where they meet, and the first lines of the run say it, too."""
    place = LauncherEnvironment("srun", 1, 2, 0, 1, 1, 2, "n7", 21234)
    found = plan(4, place, **given)
    assert (found.mode, found.world_size, found.local_size, found.node_rank) == ("spawn", 8, 4, 1)
    assert "note: hosts meet at n7:21234 (srun: first host of the step, port" in found.summary()
    assert plan(4, place, num_nodes=2, gpus_per_node=1).mode == "join"
    elsewhere = plan(4, place, rdzv_endpoint="n9:1", **given)
    assert elsewhere.config.rdzv_endpoint == "n9:1"
    with pytest.raises(UserError, match=r"asks for 8 ranks and srun started 2"):
        plan(4, place, launch="join", **given)


def test_where_hosts_meet_is_said() -> None:
    found = plan(0, num_nodes=2, gpus_per_node=1, node_rank=0, rdzv_endpoint="n0:29500")
    assert "note: hosts meet at n0:29500 (argument); node 0 serves it" in found.summary()
    joined = plan(0, LauncherEnvironment("torchrun", 1, 2, 0, 1, 1, 2, "n0", 29501))
    assert "note: ranks meet at n0:29501, as torchrun says" in joined.summary()
    assert "meet" not in plan(0, num_processes=2).summary()


def test_true_means_fp16_on_cuda_and_bf16_on_cpu() -> None:
    assert plan(1, mixed_precision=True).precision == "fp16"
    assert plan(0, mixed_precision=True).precision == "bf16"
