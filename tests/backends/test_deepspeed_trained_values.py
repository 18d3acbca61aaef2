"""DeepSpeed configurations as they are written: what they train, beside plain PyTorch."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from distributed import DeepSpeedDilatedAttentionEngine, Trainer, UserError
from distributed.testing.conformance import problem, small_model
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.backends.fsdp_model import tiny, words
from tests.support.training import make_trainer

initialize = DeepSpeedDilatedAttentionEngine.initialize_deepspeed


def alone(model: nn.Module, native: Any, **given: Any) -> Trainer:
    return make_trainer(model, deepspeed_config=native, batch_size=4, data={"shuffle": False}, **given)


def test_values_in_quotation_marks_train_the_same() -> None:
    params = {"lr": "1e-2", "betas": ["0.8", "0.9"], "eps": "1e-6", "weight_decay": "0.1"}
    native = {"optimizer": {"type": "AdamW", "params": params}, "zero_optimization": {"stage": "1"},
              "zero_force_ds_cpu_optimizer": "true", "zero_allow_untested_optimizer": "false"}  # fmt: skip
    native["zero_optimization"] |= {"cpu_offload": "true"}  # type: ignore[operator]
    model = small_model()
    plain, (x, y) = copy.deepcopy(model), problem(12)
    adam = torch.optim.AdamW(plain.parameters(), 1e-2, (0.8, 0.9), 1e-6, 0.1)
    for first in range(0, 12, 4):
        adam.zero_grad()
        cross_entropy(plain(x[first : first + 4]), y[first : first + 4]).backward()
        adam.step()
    alone(model, native).fit((x, y), max_steps=3)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=EXACT)


def test_an_optimizer_beside_that_of_the_file_is_refused_and_each_alone_trains() -> None:
    native = {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    with pytest.raises(UserError, match=r"an optimizer was given, and deepspeed_config describes another"):
        alone(small_model(), native, optimizer=torch.optim.SGD).fit(problem(8), max_steps=1)
    alone(small_model(), {}, optimizer=torch.optim.SGD).fit(problem(8), max_steps=1)
    trainer = alone(small_model(), native)
    trainer.fit(problem(8), max_steps=1)
    assert trainer.fit(problem(8), max_steps=2).steps["step"][-1] == 3  # which has its optimizer


def test_a_type_of_communication_for_float64_is_refused() -> None:
    with pytest.raises(UserError, match=r"communication_data_type: .*float64.*Leave it out"):
        alone(small_model(), {"communication_data_type": "fp32"}).fit(problem(8), max_steps=1)


def test_an_optimizer_object_beside_that_of_the_file_is_refused() -> None:
    native = {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    model = small_model()
    given: dict[str, Any] = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "device": "cpu"}
    said = r"Leave out the optimizer object, or the optimizer of deepspeed_config"
    with pytest.raises(UserError, match=said):
        initialize(model, deepspeed_config=native, **given)
    with pytest.raises(UserError, match=said):
        alone(model, native, optimizer=given["optimizer"]).fit(problem(8), max_steps=1)


@pytest.mark.parametrize("loss_scale", [0, 2.0**10])
@pytest.mark.parametrize("asked", [True, None], ids=["enabled", "mixed_precision"])
def test_without_zero_the_loss_scale_moves_as_deepspeeds(loss_scale: float, asked: bool | None) -> None:
    """Around an overflow every fourth step; DeepSpeed's rule grows one step later than torch's."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaleConfig

    fp16 = {"enabled": asked, "loss_scale": loss_scale, "initial_scale_power": 20, "loss_scale_window": 3}
    model = small_model(torch.float32)
    plain, (x, y) = copy.deepcopy(model), problem(96, torch.float32)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    moves = {"init_scale": 2.0**20, "scale_window": 3, "min_scale": 1}
    rule = LossScaleConfig(torch.float16, not loss_scale, loss_scale, moves)
    skipped = 0
    for step, (a, b) in enumerate(zip(x.split(4), y.split(4), strict=True)):
        sgd.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = cross_entropy(plain(a), b)
        (loss * rule.cur_scale).backward()
        finite = all(bool(p.grad.isfinite().all()) for p in plain.parameters() if p.grad is not None)
        if finite:
            for p in plain.parameters():
                p.grad /= rule.cur_scale  # type: ignore[operator]
            sgd.step()
        elif rule.dynamic_loss_scale:
            rule.cur_scale /= 2.0
            rule.last_overflow_iter = step
        skipped += not finite
        stable = step - (rule.last_overflow_iter or 0) - 1
        if finite and rule.dynamic_loss_scale and stable > 0 and stable % 3 == 0:
            rule.cur_scale *= 2.0
    given: dict[str, Any] = {"optimizer": torch.optim.SGD, "learning_rate": 0.1}
    given |= {} if asked else {"mixed_precision": "fp16"}
    history = alone(model, {"fp16": fp16}, **given).fit((x, y), max_steps=24)
    assert history.num_skipped_steps == skipped
    assert (loss_scale == 0) == (skipped > 0)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)


def test_a_rule_of_the_scale_that_deepspeed_refuses_is_one_paragraph() -> None:
    """Also where `mixed_precision` has switched the section on."""
    for fp16, given in (({"enabled": True}, {}), ({}, {"mixed_precision": "fp16"})):
        native = {"fp16": {**fp16, "min_loss_scale": 0}}
        with pytest.raises(UserError, match=r"DeepSpeed refuses it: .*min_loss_scale must be > 0"):
            alone(small_model(torch.float32), native, **given).fit(problem(8, torch.float32), max_steps=1)


SUMMED: list[tuple[str, torch.dtype, dict[str, Any], bool]] = [
    ("fp32", torch.float32, {}, True),
    ("torch.float32", torch.float32, {"mixed_precision": "bf16"}, True),
    ("fp32", torch.float64, {}, False),
    ("bf16", torch.float32, {}, False),
    ("bf16", torch.float32, {"zero_stage": 1, "bf16": True}, True),
    ("fp32", torch.float32, {"zero_stage": 1, "bf16": True}, False),
    ("many", torch.float32, {}, False),
]


@pytest.mark.parametrize(("named", "dtype", "given", "accepted"), SUMMED)
def test_the_dtype_of_sums_is_that_of_the_weights_or_refused(
    named: str, dtype: torch.dtype, given: dict[str, Any], accepted: bool
) -> None:
    """Accepted, it trains as the same file without it."""
    given = dict(given)
    native: dict[str, Any] = {"zero_optimization": {"stage": given.pop("zero_stage", 0)}}
    native |= {"bf16": {"enabled": True}} if given.pop("bf16", False) else {}
    one, other = small_model(dtype), small_model(dtype)
    trainer = alone(one, native | {"data_types": {"grad_accum_dtype": named}}, **given)
    if not accepted:
        with pytest.raises(UserError, match=r"grad_accum_dtype: gradients are summed in .*Leave it out"):
            trainer.fit(problem(8, dtype), max_steps=1)
    else:
        trainer.fit(problem(8, dtype), max_steps=2)
    alone(other, native, **given).fit(problem(8, dtype), max_steps=2)  # the remedy
    if accepted:
        torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_remedy_for_a_scheduler_trains(num_ranks: int, rank_pool: RankPool) -> None:
    """DeepSpeed's own schedule in a function, at each step, as in a loop of plain PyTorch."""
    from deepspeed.runtime.lr_schedules import WarmupLR

    native: dict[str, Any] = {"zero_optimization": {"stage": num_ranks}}
    params = {"warmup_max_lr": 0.2, "warmup_num_steps": 4, "warmup_type": "linear"}
    given: dict[str, Any] = {"optimizer": torch.optim.SGD, "learning_rate": 0.1, "global_batch_size": 32}
    given |= {"data": {"shuffle": False}}
    with pytest.raises(UserError, match=r"Leave it out.*scheduler=lambda optimizer: .*WarmupLR.*='step'"):
        alone(tiny(), native | {"scheduler": {"type": "WarmupLR", "params": params}})
    model, plain = tiny(), tiny()
    given |= {"scheduler": lambda optimizer: WarmupLR(optimizer, **params), "scheduler_interval": "step"}
    make_trainer(model, num_ranks, rank_pool, deepspeed_config=native, **given).fit(words(160), max_steps=5)
    sgd = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    schedule, rates = WarmupLR(sgd, **params), []
    for x, y in zip(*(t.split(32) for t in words(160)), strict=True):
        sgd.zero_grad()
        cross_entropy(plain(x).flatten(0, 1), y.flatten()).backward()
        rates.append(sgd.param_groups[0]["lr"])
        sgd.step()
        schedule.step()
    assert len(set(rates)) > 2
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=EXACT)


SWEEP: dict[str, Any] = {
    "steps_per_print": "1", "wall_clock_breakdown": "true", "memory_breakdown": 0, "disable_allgather": True,
    "flops_profiler": {"enabled": True, "profile_step": 1, "detailed": False},
    "comms_logger": {"enabled": True}, "timers": {"throughput": {"enabled": True, "synchronized": "false"}},
    "zero_optimization": {
        "contiguous_gradients": "false", "reduce_bucket_size": 50, "use_multi_rank_bucket_allreduce": False,
        "allgather_partitions": False, "allgather_bucket_size": 30.0, "overlap_comm": "true",
        "sub_group_size": 0, "stage3_prefetch_bucket_size": 0, "param_persistence_threshold": 0,
        "stage3_max_live_parameters": "0", "max_reuse_distance": 0, "ignore_unused_parameters": False,
        "stage3_use_all_reduce_for_fetch_params": True, "stage3_allgather_sequential": True,
        "memory_efficient_linear": False, "gather_16bit_weights_on_model_save": True,
        "load_from_fp32_weights": False, "enable_sanity_checks": True, "parameter_alignment": True,
        "leaf_module": {"classes": "Block"}, "round_robin_gradients": True, "elastic_checkpoint": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_options_of_speed_change_no_weight(stage: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """All of them away from their defaults, on two ranks, as in plain PyTorch."""
    native = json.loads(json.dumps(SWEEP))
    native["zero_optimization"]["stage"] = stage
    native["csv_monitor"] = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    model, plain = tiny(), tiny()
    given = {"deepspeed_config": native, "optimizer": "sgd", "learning_rate": 0.1, "global_batch_size": 32}
    trainer = make_trainer(model, 2, rank_pool, data={"shuffle": False}, **given)
    trainer.fit(words(96), max_steps=3)
    sgd = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    for x, y in zip(*(t.split(32) for t in words(96)), strict=True):
        sgd.zero_grad()
        cross_entropy(plain(x).flatten(0, 1), y.flatten()).backward()
        sgd.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=EXACT)
    assert list(tmp_path.rglob("*.csv"))
