"""Where ranks compute, on machines of any number of GPUs: decided without one."""

from __future__ import annotations

from typing import Any

import pytest

from distributed import DistributedConfig, UserError
from distributed.joined import Joined
from distributed.plan import Facts, Resources, RunPlan, resolve
from distributed.plugin_manager import get_catalog


def plan(gpus: int, joined: Joined | None = None, **fields: Any) -> RunPlan:
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


def test_a_launcher_may_show_each_rank_one_gpu() -> None:
    place = Joined("srun", 1, 4, 1, 4, 0, 1, "127.0.0.1", 29500)
    assert plan(1, place).device == "cuda"


def test_gpus_count_over_nodes() -> None:
    found = plan(8, num_nodes=2, gpus_per_node=8, node_rank=1, rdzv_endpoint="n0:29500")
    assert (found.world_size, found.local_size, found.node_rank) == (16, 8, 1)


def test_true_means_fp16_on_cuda_and_bf16_on_cpu() -> None:
    assert plan(1, mixed_precision=True).precision == "fp16"
    assert plan(0, mixed_precision=True).precision == "bf16"
