"""DeepSpeed configurations as they are written: what every value means, and what is refused."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from distributed_backends.deepspeed.keys import IGNORED
from distributed_backends.deepspeed.keys import REFUSED as REFUSED_KEYS
from distributed_backends.deepspeed.native_config import understood

from distributed import DistributedConfig, PyTorchDDPTrainer, UserError
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from distributed.testing.conformance import small_model

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
    # Without `enabled` DeepSpeed leaves a section off, and `mixed_precision` may ask for it.
    ({"fp16": {"loss_scale_window": 5}}, {}, {"mixed_precision": False, "scaler_growth_interval": 2000}),
    ({"fp16": {"loss_scale_window": 5, "initial_scale_power": 4}}, {"mixed_precision": "fp16"},
     {"scaler_growth_interval": 5, "scaler_init_scale": 16.0}),
    ({"fp16": {"hysteresis": 3}}, {"mixed_precision": "fp16"}, {"scaler_growth_interval": 1000}),
    ({"fp16": {"loss_scale_window": 5}}, {"mixed_precision": "bf16"}, {"scaler_growth_interval": 2000}),
    ({"fp16": {}}, {"mixed_precision": "fp16"}, {"scaler_growth_interval": 2000}),
    *(({"bf16": bf16, "fp16": {"enabled": "auto"}}, {"mixed_precision": True},
       {"mixed_precision": "fp16", "scaler_growth_interval": 1000, "scaler_init_scale": 2.0**16})
      for bf16 in (None, OFF)),
    ({"fp16": {"loss_scale_window": 5}}, {"mixed_precision": True}, {"mixed_precision": "fp16",
                                                                     "scaler_growth_interval": 5}),
    ({"bf16": {"enabled": "auto"}}, {"mixed_precision": True}, {"mixed_precision": "bf16"}),
    ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, {"mixed_precision": "bf16"},
     {"mixed_precision": "bf16"}),
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
    ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": 0}}}, {}, {"optimizer": "adam"}),
    ({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}}, {}, {"optimizer": "adamw"}),
    # torch's own AdamW decays by 0.01, and DeepSpeed's by 0.
    ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, {}, {"weight_decay": 0.01}),
    ({"optimizer": {"type": "AdamW", "params": {}}}, {}, {"weight_decay": 0.0}),
    *(({"optimizer": {"type": "AdamW", "params": {"torch_adam": 1, "weight_decay": "auto"}}}, given, found)
      for given, found in (({}, {"weight_decay": 0.0}), ({"weight_decay": 0.2}, {"weight_decay": 0.2}))),
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
    *({name: {"enabled": "auto"}} for name in ("amp", "torch_autocast", "elasticity")),
    *({"zero_optimization": {"stage": stage, "elastic_checkpoint": on}} for stage in (1, 3)
      for on in (True, False)),
    {"log_level": "WARNING"},
    {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
    {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1, "round_robin_gradients": "false"}},
    {"bf16": {"enabled": True, "check_grad_overflow": True}, "zero_force_ds_cpu_optimizer": True},
    {"bf16": {"enabled": False, "check_grad_overflow": False, "anything": 1}},
    {"optimizer": {"type": "Adam", "params": {"bias_correction": True, "fp32_optimizer_states": True}}},
    {"_comment": "a remark", "steps_per_print": float("inf"), "fp16": {"enabled": False, "_note": 1}},
]  # fmt: skip


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
    (
        {"tensor_parallel": {"autotp_size": 2}},
        {},
        "tensor_parallel: not supported.*Leave it out. See parallel.tensor",
    ),
    (
        {"sparse_attention": {"mode": "fixed"}},
        {},
        "sparse_attention: not supported: DeepSpeed has removed it",
    ),
    ({"data_types": {"param_dtype": "fp32"}}, {}, "param_dtype: not supported.*Leave it out"),
    *(
        (
            {"bf16": {"enabled": "auto"}, "fp16": other},
            {"mixed_precision": True},
            "^mixed_precision: .*the choice.*Set one",
        )
        for other in ({"enabled": "auto"}, {"loss_scale_window": 5})
    ),
    *(
        (
            {"optimizer": {"type": "Adam", "params": {name: text}}},
            {},
            f"params.{name}: not a value of it: DeepSpeed does not convert it",
        )
        for name in ("adam_w_mode", "torch_adam", "amsgrad")
        for text in ("false", "true")
    ),
    ({"log_level": "chatty"}, {}, "log_level: not a value of it.*'critical'"),
    *(
        (
            {"zero_optimization": {"stage": 1, "cpu_offload": on, "offload_optimizer": {"device": place}}},
            {},
            "cpu_offload: offload_optimizer is set, too.*Leave it out",
        )
        for on, place in ((True, "none"), (False, "cpu"), (True, "cpu"))
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        {},
        "Leave it out, or choose stage 3",
    ),
    (
        {"zero_stage": 2},
        {},
        "zero_stage: .*a key of accelerate: leave it out here, and set the field zero_stage",
    ),
    ({"offload_optimizer_device": "cpu"}, {}, "set the field zero.offload_optimizer"),
    ({"zero3_init_flag": True}, {}, "a key of accelerate: leave it out here."),
    (
        {"zero_optimization": {"round_robin_gradients": "often"}},
        {},
        "round_robin_gradients: not a value of it",
    ),
    ({"tp_size": 2}, {}, r"'tp_size' is not among(?!.*Did you mean).*Leave it out"),
    ({"offload_optimizer": {"device": "cpu"}}, {}, "It belongs in zero_optimization"),
    ({"lr": 0.1}, {}, "It belongs in optimizer.params"),
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


NOTED: list[tuple[dict[str, Any], str]] = [
    (
        {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
        "gradients is not used: it changes only",
    ),
    (
        {"zero_optimization": {"stage": 3, "elastic_checkpoint": "true"}},
        "not used: checkpoints are written in",
    ),
    ({"comms_config": {}}, "comms_config is not used: .* and reads comms_logger"),
    ({"monitor_config": {"enabled": True}}, "not used: .* and reads tensorboard"),
]


@pytest.mark.parametrize(("native", "note"), NOTED, ids=[note[:30] for _, note in NOTED])
def test_a_key_that_is_not_used_is_said(native: dict[str, Any], note: str) -> None:
    found = plan(native)
    assert [text for text in found.notes if re.search(note, text)], found.notes
    handed = json.dumps(understood(native))
    assert not [key for key in IGNORED if key.rpartition(".")[2] in handed]
    quiet = plan({"zero_optimization": {"round_robin_gradients": False, "elastic_checkpoint": "auto"}})
    assert not [text for text in quiet.notes if "is not used" in text]


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_every_remedy_says_what_to_do_with_the_key(key: str) -> None:
    """And what it names in its place is a field that there is."""
    values: list[Any] = [True, 7, "x", {"enabled": True, "deepcompile": True, "autotp_size": 2, "type": "x"}]
    refusals = []
    for value in values:
        native: Any = value
        for part in reversed(key.split(".")):
            native = {part: native}
        for section in ("fp16", "bf16"):
            if section in native:
                native[section] |= {"enabled": True}
        try:
            config(native)
        except UserError as error:
            refusals.append(str(error))
    assert refusals
    assert all("Leave it out" in text for text in refusals), refusals


FOLLOWED: dict[str, dict[str, Any]] = {
    "amp": {"mixed_precision": "fp16"},
    "torch_autocast": {"mixed_precision": "bf16"},
    "elasticity": {"global_batch_size": 64},
    "compile": {"compile": "blocks"},
    "activation_checkpointing.profile": {"activation_checkpointing": "selective"},
    "optimizer.params.max_grad_norm": {"gradient_clipping": 1.0},
    "scheduler": {"scheduler": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.1},
}


@pytest.mark.parametrize("key", FOLLOWED)
def test_the_fields_that_a_remedy_names_are_accepted(key: str) -> None:
    native: Any = {"enabled": True, "type": "x", "deepcompile": True}
    for part in reversed(key.split(".")):
        native = {part: native}
    with pytest.raises(UserError) as caught:
        plan(native)
    remedy = str(caught.value).partition("Leave it out. ")[2]
    assert all(name in remedy for name in FOLLOWED[key]), remedy
    found = plan({"zero_optimization": {"stage": 2}}, **FOLLOWED[key]).config
    assert all(getattr(found, name) == value for name, value in FOLLOWED[key].items())


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
        ""),
    "LLaMA-Factory z3": (
        {**AUTO, "fp16": {**FP16, "enabled": "auto"}, "bf16": {"enabled": "auto"},
         "zero_allow_untested_optimizer": True, "zero_optimization": STAGE_3}, ""),
    "LLaMA-Factory z2 autotp": (
        {**AUTO, "_comment": "models", "zero_optimization": {"stage": 2, **BUCKETS},
         "tensor_parallel": {"autotp_size": 2}}, "tensor_parallel: not supported.*parallel.tensor"),
    "LLaMA-Factory z1 gaudi": (
        {**AUTO, "zero_optimization": {"stage": 1, "round_robin_gradients": True},
         "timers": {"throughput": {"enabled": True, "synchronized": False}}}, ""),
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


GIVEN: list[dict[str, Any]] = [row[0] for row in MEANS] + ACCEPTED + [row[0] for row in NOTED]
GIVEN += [native for native, message in PUBLIC.values() if not message]
SIZES = {"train_batch_size": None, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}


def acting(tree: Any) -> Any:
    """A configuration without what is in sections that are off."""
    if not isinstance(tree, dict):
        return tree
    return {"enabled": False} if tree.get("enabled") is False else {k: acting(v) for k, v in tree.items()}


def test_what_deepspeed_reads_in_a_file_as_it_stands_is_what_is_read_here() -> None:
    """Of all of the above that DeepSpeed's own classes take, without a change by ours in between."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    not_read = {key.rpartition(".")[2] for key in IGNORED}
    not_read |= {"cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"}  # read as newer ones
    compared = 0
    for native in GIVEN:
        try:
            theirs = DeepSpeedConfig(copy.deepcopy(native) | SIZES)
        except (
            DeepSpeedConfigError,
            AssertionError,
            AttributeError,
            TypeError,
            ValueError,
        ):  # a key that it has removed, or a remark in a section
            continue
        ours = DeepSpeedConfig(understood(native) | SIZES)
        assert theirs.steps_per_print == ours.steps_per_print, native
        for name in ("zero_config", "monitor_config", "timers_config", "float16_config", "bfloat16_config"):
            read, here = (acting(getattr(one, name).model_dump(exclude=not_read)) for one in (theirs, ours))
            assert read == here, (native, name)
        compared += 1
    assert compared > 60
