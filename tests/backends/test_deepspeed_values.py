"""DeepSpeed configurations as they are written: what every value means, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from distributed import DistributedConfig, PyTorchDDPTrainer, Trainer, UserError
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from distributed.testing.conformance import problem, small_model
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.backends.fsdp_model import tiny, words
from tests.support.training import make_trainer

ADAM = {"type": "Adam", "params": {"lr": 0.01}}
ON, OFF = {"enabled": True}, {"enabled": False}


def config(native: Any, **given: Any) -> DistributedConfig:
    return PyTorchDDPTrainer(small_model(), num_processes=2, deepspeed_config=native, **given).config


def plan(native: Any, gpus: int = 2, **given: Any) -> RunPlan:
    return resolve(config(native, **given), get_catalog(), Facts(), Resources(gpus))


# -- what a value means ----------------------------------------------------------------------

MEANS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # A switch is what DeepSpeed's classes make of it, not whether Python takes it for true.
    *(({"bf16": {"enabled": off}}, {}, {"mixed_precision": False}) for off in (False, "false", 0, "off")),
    *(({"bf16": {"enabled": on}}, {}, {"mixed_precision": "bf16"}) for on in (True, "true", 1, "yes")),
    ({"bf16": OFF, "bfloat16": ON}, {}, {"mixed_precision": False}),
    ({"bf16": ON, "bfloat16": OFF}, {}, {"mixed_precision": "bf16"}),
    ({"bfloat16": ON}, {}, {"mixed_precision": "bf16"}),
    ({"bf16": ON}, {"mixed_precision": True}, {"mixed_precision": "bf16"}),
    ({"fp16": OFF}, {"mixed_precision": True}, {"mixed_precision": "bf16"}),
    ({"fp16": ON}, {}, {"scaler_growth_interval": 1000, "scaler_init_scale": 2.0**16}),
    ({"fp16": {"enabled": "true", "loss_scale_window": "500"}}, {}, {"scaler_growth_interval": 500}),
    ({"fp16": ON}, {"scaler_growth_interval": 7}, {"scaler_growth_interval": 7}),
    ({"fp16": {"enabled": "auto"}}, {"mixed_precision": "fp16"}, {"scaler_growth_interval": 1000}),
    ({"fp16": {"enabled": False, "loss_scale_window": 5}}, {}, {"scaler_growth_interval": 2000}),
    ({"fp16": {"loss_scale": 128}}, {}, {"mixed_precision": False}),
    ({"zero_optimization": True}, {}, {"zero_stage": 1}),
    ({"zero_optimization": False}, {}, {"zero_stage": 0}),
    ({"zero_optimization": {"stage": "3"}}, {}, {"zero_stage": 3}),
    ({"zero_optimization": {"stage": 1, "cpu_offload": True}}, {}, {"zero.offload_optimizer": "cpu"}),
    ({"zero_optimization": {"stage": 3, "cpu_offload_param": True}}, {}, {"zero.offload_parameters": "cpu"}),
    ({"zero_optimization": {"stage": 1, "cpu_offload": False}}, {}, {"zero.offload_optimizer": "none"}),
    ({"train_batch_size": "64", "gradient_clipping": "0.5"}, {}, {"global_batch_size": 64,
                                                                 "gradient_clipping": 0.5}),
    ({"gradient_clipping": 0}, {}, {"gradient_clipping": None}),
    ({"optimizer": {"type": "Adam", "params": {"lr": "1e-2"}}}, {}, {"learning_rate": 0.01,
                                                                    "optimizer": "adamw"}),
    ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": "false"}}}, {}, {"optimizer": "adam"}),
    ({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}}, {}, {"optimizer": "adamw"}),
    # torch's own AdamW decays by 0.01, and DeepSpeed's by 0.
    ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, {}, {"weight_decay": 0.01}),
    ({"optimizer": {"type": "AdamW", "params": {}}}, {}, {"weight_decay": 0.0}),
]  # fmt: skip


@pytest.mark.parametrize(("native", "given", "expected"), MEANS, ids=[str(row[0])[:60] for row in MEANS])
def test_a_value_means_what_it_means_to_deepspeed(
    native: dict[str, Any], given: dict[str, Any], expected: dict[str, Any]
) -> None:
    found: Any = config(native, **given)
    for name, value in expected.items():
        inner = found
        for part in name.split("."):
            inner = getattr(inner, part)
        assert inner == value, name


ACCEPTED: list[dict[str, Any]] = [
    *({name: OFF} for name in ("elasticity", "sparse_attention", "amp", "torch_autocast", "data_efficiency")),
    *({name: OFF} for name in ("autotuning", "hybrid_engine", "curriculum_learning", "expert_parallel")),
    {"compile": {"deepcompile": False, "backend": "inductor"}},
    {"tensor_parallel": {"autotp_size": 1}},
    {"tensorboard": {"enabled": False, "output_path": "runs"}},
    {"sparse_gradients": False, "pipeline": {}, "scheduler": {"type": None}, "zero_optimization": None},
    {"prescale_gradients": False, "gradient_predivide_factor": "1.0", "gradient_allreduce_op": "mean"},
    {"dataloader_drop_last": False, "sequence_parallel_size": 1, "managed_gradient_accumulation": "true"},
    {
        "checkpoint": {
            "tag_validation": "Warn",
            "load_universal": False,
            "parallel_write": {"pipeline_stage": 0},
        }
    },
    {"data_types": {"grad_accum_dtype": None, "keep_in_fp32_modules": "auto"}},
    {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1, "round_robin_gradients": "false"}},
    {"bf16": {"enabled": True, "check_grad_overflow": True}, "zero_force_ds_cpu_optimizer": True},
    {"bf16": {"enabled": False, "check_grad_overflow": False, "anything": 1}},
    {"optimizer": {"type": "Adam", "params": {"bias_correction": True, "fp32_optimizer_states": True}}},
    {"_comment": "a remark", "steps_per_print": float("inf"), "fp16": {"enabled": False, "_note": 1}},
]


@pytest.mark.parametrize("native", ACCEPTED, ids=lambda native: str(native)[:60])
def test_a_default_or_a_section_that_is_off_is_accepted(native: dict[str, Any]) -> None:
    assert plan(native).spec.name == "deepspeed"


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ({"bf16": {"enabled": "maybe"}}, {}, r"bf16.enabled: not a value of it.*Got 'maybe'"),
    ({"bf16": True}, {}, r'bf16: it is a section.*Got True.*such as \{"enabled": true\}'),
    ({"fp16": 5}, {}, "fp16: it is a section"),
    ({"zero_optimization": 2}, {}, r'zero_optimization: it is a section.*such as \{"stage": 2\}'),
    ({"fp16": ON, "bf16": ON}, {}, "fp16.enabled: bf16 is enabled, too"),
    ({"bf16": OFF, "fp16": OFF}, {"mixed_precision": True}, "contradicts it"),
    ({"fp16": {"enabled": True, "initial_scale_power": 5000}}, {}, "initial_scale_power: .*Got 5000"),
    ({"fp16": {"enabled": True, "initial_scale_power": "abc"}}, {}, "initial_scale_power: not a value of it"),
    ({"optimizer": "Adam"}, {}, r'optimizer: it is a section.*such as \{"type": "AdamW"\}'),
    ({"optimizer": {"type": "Adam", "params": []}}, {}, r"optimizer.params: it is a section.*Got \[\]"),
    ({"optimizer": {"params": {"lr": 0.1, "betas": [0.8, 0.9]}}}, {}, r"without a type .* Name the type"),
    ({"optimizer": {"type": "Adam", "params": {"lr": "fast"}}}, {}, "params.lr: not a value of it"),
    ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, {}, "params.betas: not a value of it"),
    (
        {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
        {},
        "no optimizer clips.*gradient_clip",
    ),
    ({"optimizer": {"type": "Adam", "params": {"fp32_optimizer_states": False}}}, {}, "changes the training"),
    ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, {}, "always corrects"),
    ({"bf16": {"enabled": True, "check_grad_overflow": False}}, {}, "not finite is always skipped"),
    ({"steps_per_print": 0}, {}, "steps_per_print: not a value of it.*greater than 0"),
    ({"train_batch_size": "many"}, {}, "train_batch_size: not a value of it"),
    ({"train_batch_size": 6.5}, {}, "train_batch_size: not a value of it"),
    ({"gradient_clipping": float("nan")}, {}, "gradient_clipping: not a value of it"),
    (
        {"zero_optimization": {"stage": 3}, "gradient_predivide_factor": 2.0},
        {},
        "factor: .*the mean.*Leave it",
    ),
    ({"prescale_gradients": "true"}, {}, "prescale_gradients: .*the mean over the global batch"),
    (
        {"zero_optimization": {"stage": 2, "unknown": 1}},
        {},
        "zero_optimization.unknown: 'unknown' is not among",
    ),
    (
        {"zero_optimization": {"stage": 3, "stage3_param_persitence_threshold": 1}},
        {},
        "Did you mean 'stage3_para",
    ),
    ({"compile": {"backend": "inductor"}}, {}, "compile: not supported.*Set compile=blocks"),
    ({"tensor_parallel": {"autotp_size": 2}}, {}, "tensor_parallel: not supported.*see parallel.tensor"),
    (
        {"sparse_attention": {"mode": "fixed"}},
        {},
        "sparse_attention: not supported: DeepSpeed has removed it",
    ),
    ({"data_types": {"grad_accum_dtype": "fp32"}}, {}, "grad_accum_dtype: not supported.*Leave it out"),
    ({"tp_size": 2}, {}, r"'tp_size' is not among(?!.*Did you mean).*Leave it out"),
    ({"comms_config": {}}, {}, "its own section is comms_logger"),
    ({"monitor_config": {}}, {}, "its own sections are tensorboard"),
    ({"offload_optimizer": {"device": "cpu"}}, {}, "It belongs into zero_optimization"),
    ({"lr": 0.1}, {}, "It belongs into optimizer.params"),
    ({"wandb": {"api_key": "x"}}, {}, r"wandb.api_key: 'api_key' is not among(?!.*comet)"),
    ({"zero_optimization": {"stage": 2, "gradient_clipping": 1.0}}, {}, "It belongs at the top"),
    (
        {"communication_data_type": "fp16"},
        {"compression.codec": "int8"},
        "the codec int8 decides.*Leave out one",
    ),
    ({"wandb": ON}, {}, "the package wandb is not installed.*pip install wandb"),
    ({"comet": ON}, {}, "the package comet_ml is not installed"),
]


@pytest.mark.parametrize(("native", "given", "message"), REFUSED, ids=[row[2][:50] for row in REFUSED])
def test_what_cannot_be_read_is_one_paragraph(native: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(native, **given)


FILES = [
    ('{"fp16": {"enabled": false}, "fp16": {"enabled": true}}', "fp16: the key is set twice"),
    ("[" * 100_000, "not a DeepSpeed configuration"),
    ("[1, 2]", "not a DeepSpeed configuration. Got 'list'"),
    ("bf16 enabled", "the file is not JSON"),
]


@pytest.mark.parametrize(("text", "message"), FILES, ids=[message for _, message in FILES])
def test_a_file_that_cannot_be_read(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(UserError, match=message):
        config(tmp_path / "ds.json")


def test_a_file_with_comments_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{\n  # ours\n  "zero_optimization": {"stage": 2,},\n}')
    assert config(tmp_path / "ds.json").zero_stage == 2


def test_a_clipping_that_is_left_out_is_said() -> None:
    said = "deepspeed_config has no gradient_clipping, and nothing is clipped"
    clipped: list[tuple[dict[str, Any], dict[str, Any]]] = [({"gradient_clipping": 0}, {})]
    clipped.append(({}, {"gradient_clipping": 1.0}))
    for rows, number in (([({}, {}), ({"gradient_clipping": "auto"}, {})], 1), (clipped, 0)):
        for native, given in rows:
            assert len([note for note in plan(native, **given).notes if said in note]) == number


# -- public files ----------------------------------------------------------------------------

FP16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
        "hysteresis": 2, "min_loss_scale": 1}  # fmt: skip
AUTO = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
                      "gradient_clipping"), "auto")  # fmt: skip
OFFLOAD = {"device": "cpu", "pin_memory": True}
BUCKETS = {"allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": True,
           "reduce_scatter": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True}  # fmt: skip
STAGE_3 = {"stage": 3, "sub_group_size": 1e9, "reduce_bucket_size": "auto", "overlap_comm": False,
           "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
           "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
           "stage3_gather_16bit_weights_on_model_save": True}  # fmt: skip
PUBLIC: dict[str, tuple[dict[str, Any], str]] = {
    "transformers zero 3": (
        {"fp16": FP16, "optimizer": ADAM, "scheduler": {"type": "WarmupLR", "params": {}},
         "zero_optimization": {**STAGE_3, "offload_optimizer": OFFLOAD, "offload_param": OFFLOAD}},
        "scheduler: not supported.*warmup_steps"),
    "transformers zero 2 bf16": (
        {**AUTO, "bfloat16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": dict.fromkeys(
            ("lr", "betas", "eps", "weight_decay"), "auto")}, "steps_per_print": 2000,
         "zero_optimization": {"stage": 2, "offload_optimizer": OFFLOAD, **BUCKETS}}, ""),
    "axolotl zero 3 bf16": (
        {**AUTO, "bf16": ON, "wall_clock_breakdown": False, "zero_optimization": {
            "stage": 3, "sub_group_size": 0, "prefetch_bucket_size": "auto", "max_live_parameters": 0,
            "max_reuse_distance": 0, "gather_16bit_weights_on_model_save": True}}, ""),
    "axolotl zero 1 compile": (
        {**AUTO, "fp16": {**FP16, "enabled": "auto", "auto_cast": False, "initial_scale_power": 32},
         "compile": {"disable": False, "backend": "inductor"}, "zero_optimization": {"stage": 1}},
        "compile: not supported.*compile=blocks"),
    "LLaMA-Factory z3 offload": (
        {**AUTO, "fp16": {**FP16, "enabled": "auto"}, "bf16": {"enabled": "auto"},
         "zero_allow_untested_optimizer": True, "comms_config": {"verbose": False},
         "zero_optimization": {**STAGE_3, "offload_optimizer": OFFLOAD, "offload_param": OFFLOAD}},
        "comms_config: .*DeepSpeed ignores it; its own section is comms_logger"),
    "LLaMA-Factory z3": (
        {**AUTO, "fp16": {**FP16, "enabled": "auto"}, "bf16": {"enabled": "auto"},
         "zero_allow_untested_optimizer": True, "zero_optimization": STAGE_3}, ""),
    "LLaMA-Factory z2 autotp": (
        {**AUTO, "_comment": "models", "zero_optimization": {"stage": 2, **BUCKETS},
         "tensor_parallel": {"autotp_size": 2}}, "tensor_parallel: not supported.*parallel.tensor"),
    "LLaMA-Factory z1 gaudi": (
        {**AUTO, "zero_optimization": {"stage": 1, "round_robin_gradients": True},
         "timers": {"throughput": {"enabled": True, "synchronized": False}}}, "round_robin_gradients: not"),
    "examples cifar": (
        {"train_batch_size": 4, "prescale_gradients": False, "gradient_clipping": 1.0,
         "zero_optimization": {"stage": 2, "cpu_offload": True},
         "fp16": {**FP16, "fp16_master_weights_and_grads": True}}, "fp16_master.*DeepSpeed's own Adam"),
    "examples bing_bert": (
        {"train_batch_size": 4096, "optimizer": {"type": "Adam", "params": {
            "lr": 2e-4, "max_grad_norm": 1.0, "weight_decay": 0.01, "bias_correction": False}}},
        "max_grad_norm: .*Set gradient_clipping"),
    "examples bing_bert lamb": (
        {"train_batch_size": 64, "optimizer": {"type": "Lamb", "params": {"lr": 11e-3, "max_coeff": 0.3}}},
        "optimizer.type: .*Got 'Lamb'.*Leave the section out"),
    "examples megatron": (
        {"train_batch_size": 16, "zero_optimization": True, "optimizer": ADAM, "fp16": FP16}, ""),
    "megatron zero 1": (
        {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 32, "steps_per_print": 1,
         "gradient_clipping": 1.0, "prescale_gradients": False, "zero_optimization": {"stage": 1},
         "fp16": {**FP16, "loss_scale_window": 500, "initial_scale_power": 11}}, ""),
    "megatron zero 2 bf16": (
        {"train_batch_size": 96, "bfloat16": {"enabled": True, "loss_scale": 1.0}},
        "bf16.loss_scale: 'loss_scale' is not among"),
    "autotuning": (
        {"fp16": ON, "autotuning": {"enabled": True, "fast": True}}, "autotuning: .*distributed.cli tune"),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_file_is_planned_or_refused_with_the_way_on(name: str) -> None:
    native, message = PUBLIC[name]
    if not message:
        assert plan(native).spec.name == "deepspeed"
        return
    with pytest.raises(UserError, match=message):
        plan(native)


# -- what trains -----------------------------------------------------------------------------


def alone(model: nn.Module, native: Any, **given: Any) -> Trainer:
    return make_trainer(model, deepspeed_config=native, batch_size=4, data={"shuffle": False}, **given)


def test_values_in_quotation_marks_train_the_same() -> None:
    params = {"lr": "1e-2", "betas": ["0.8", "0.9"], "eps": "1e-6", "weight_decay": "0.1", "amsgrad": "false"}
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


@pytest.mark.parametrize("loss_scale", [0, 2.0**10])
def test_without_zero_the_loss_scale_moves_as_deepspeeds(loss_scale: float) -> None:
    """Around an overflow every fourth step; DeepSpeed's rule grows one step later than torch's."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaleConfig

    fp16 = {"enabled": True, "loss_scale": loss_scale, "initial_scale_power": 20, "loss_scale_window": 3}
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
    given = {"optimizer": torch.optim.SGD, "learning_rate": 0.1}
    history = alone(model, {"fp16": fp16}, **given).fit((x, y), max_steps=24)
    assert history.num_skipped_steps == skipped
    assert (loss_scale == 0) == (skipped > 0)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)


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
        "leaf_module": {"classes": "Block"},
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
