"""What we take for granted inside the libraries, so that an upgrade that takes it away says so here.

Each test fails, and is never skipped, when something internal is gone or means another thing; the
message names the file that relies on it. What users see of the same traps is tested where it belongs:
state of several groups and of every stage by `test_transfers`, hooks that FSDP leaves behind by
`tests/backends/test_fsdp_state.py`, a group's single count of steps by `test_deepspeed_state.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from distributed.testing.rank_pool import RankPool
from distributed.testing.reference_problem import distance
from tests.backends.fsdp_model import tiny, trainer_of, words
from tests.contracts.library_probes import CutByRows, FlatRanges, PartitionedRanges, Steps, need

EXACT = 1e-9


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


# -- DeepSpeed: where it keeps what a checkpoint holds -----------------------------------------------


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("stage", "probe"), [(1, FlatRanges), (2, FlatRanges), (3, PartitionedRanges)])
def test_where_zero_keeps_master_weights(stage: int, probe: Any, offload: bool, rank_pool: RankPool) -> None:
    zero = {"offload_optimizer": "cpu"} if offload else {}
    trainer = trainer_of("deepspeed", 2, rank_pool, zero_stage=stage, zero=zero)
    trainer.callbacks = [probe(offload)]
    trainer.fit(words(), max_steps=1)


# -- DeepSpeed: how it steps -------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_steps_by_our_scale_norm_and_clipping(
    stage: int, clip: float | None, rank_pool: RankPool
) -> None:
    """DeepSpeed clips at 1.0 where nothing is said: a gradient longer than that is left alone."""
    models, norms = [], []
    optimizer = partial(torch.optim.SGD, lr=1e-3)
    for backend, ranks in (("serial", 1), ("deepspeed", 2)):
        given = {"zero_stage": stage} if backend == "deepspeed" else {}
        model = tiny()
        with torch.no_grad():
            model.heat.fill_(40.0)
        trainer = trainer_of(
            backend, ranks, rank_pool, model, optimizer=optimizer, gradient_clipping=clip, **given
        )
        trainer.callbacks = [Steps()] if given.get("zero_stage") else []
        norms.append(trainer.fit(words(), max_steps=1).logs[0]["grad_norm"])
        models.append(model)
    assert norms[0] > 2.0
    assert norms[1] == pytest.approx(norms[0], rel=1e-12)
    assert distance(*models) < EXACT, "another step: see engine_options in deepspeed/engine.py"


def test_what_we_override_in_deepspeed_is_there() -> None:
    """A method that is renamed would not be overridden any more, without a word."""
    from distributed_backends.deepspeed.import_deepspeed import import_deepspeed

    import_deepspeed("cpu")
    from deepspeed.ops import __compatible_ops__
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

    where = "backends/distributed_backends/deepspeed/engine.py"
    need(DeepSpeedEngine, where, "_broadcast_model", "get_data_types", "communication_data_type")
    need(DeepSpeedEngine, where, "zero_optimization", "allreduce_no_retain", "_configure_distributed_model")
    assert parameters(DeepSpeedEngine._reduce_non_expert_gradients) == [
        "self",
        "grads",
        "elements_per_buffer",
    ]
    assert parameters(Init._zero_init_param) == ["self", "param"]
    need(Init, where, "_convert_to_deepspeed_param")
    need(ZeROOptimizer, where, "_configure_master_weights")
    for name in (
        *("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP"),
        *("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP", "_ALL_TO_ALL_GROUP"),
        "_get_sequence_data_parallel_group",
    ):
        assert hasattr(groups, name), f"deepspeed.utils.groups has no {name}; {where} relies on it"
    assert "deepspeed_shm_comm" in __compatible_ops__, f"{where} keeps it from being compiled"


# -- torch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_where_fsdp_keeps_rows(ranks: int, rank_pool: RankPool) -> None:
    trainer = trainer_of("fsdp", ranks, rank_pool)
    trainer.callbacks = [CutByRows()]
    trainer.fit(words(), max_steps=1)


def test_dtensors_cut_rows_as_torch_chunks_them() -> None:
    """`own_pieces` counts ceil(rows / ranks) rows a rank, the last ones fewer or none."""
    from torch.distributed.tensor import Shard

    for rows in range(1, 30):
        for ranks in range(1, 9):
            for rank in range(ranks):
                _, offset = Shard.local_shard_size_and_offset(rows, ranks, rank)
                assert offset == min(-(-rows // ranks) * rank, rows), (rows, ranks, rank)


def test_what_fsdp_is_told_and_cleaned_of() -> None:
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    where = "backends/distributed_backends/fsdp/sharded_model.py"
    need(_module_state_mapping, where, "pop")
    need(FSDPModule, where, "reshard", "set_requires_gradient_sync", "set_is_last_backward")
    assert {"mesh", "mp_policy", "offload_policy", "ignored_params", "reshard_after_forward"} <= set(
        parameters(fully_shard)
    )
    assert MixedPrecisionPolicy().reduce_dtype is None
    assert OffloadPolicy is not None


def test_the_gradient_scaler_asks_where_it_used_to() -> None:
    """Sharded scalers override the look for infinities, and read what it found."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    expected = ["optimizer", "inv_scale", "found_inf", "allow_fp16"]
    assert parameters(scaler._unscale_grads_) == expected
    need(scaler, "distributed/training/torch_backend.py", "_found_inf_per_device", "_get_scale_async")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.full((1, 2), torch.inf)).sum()).backward()
    scaler.unscale_(optimizer)
    assert [bool(found) for found in scaler._found_inf_per_device(optimizer).values()] == [True]
    assert float(scaler._get_scale_async()) == 8.0
    found, gradient = torch.zeros(1), torch.tensor([16.0])
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, torch.tensor(0.125))
    assert (float(gradient), float(found)) == (2.0, 0.0)


def test_state_that_torch_keeps_without_a_dimension() -> None:
    """A step count is a tensor on the CPU, which a checkpoint keeps as a number; the rest has the
    parameter's shape."""
    p = nn.Parameter(torch.ones(3, 2))
    for optimizer in (torch.optim.AdamW([p]), torch.optim.SGD([p], lr=0.1, momentum=0.9)):
        assert not optimizer.state, "an optimizer that has not stepped has no state"
        p.grad = torch.ones(3, 2)
        optimizer.step()
        for slot, value in optimizer.state[p].items():
            assert value.shape == (() if slot == "step" else p.shape), (type(optimizer), slot)
