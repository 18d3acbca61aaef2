"""Every key of DeepSpeed's configuration: handed to DeepSpeed, owned by ours, ignored, or refused.

A key that is in none of the tables is unknown, and refused as well, so that none is dropped. A test compares
them with what DeepSpeed's own classes read; docs/deepspeed.md shows them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

CHECKPOINTING = "activation_checkpointing"
"""DeepSpeed's section, and our field."""

_OF_STAGE_3 = (
    "prefetch_bucket_size:int param_persistence_threshold:int model_persistence_threshold:int"
    " max_live_parameters:int max_reuse_distance:int module_granularity_threshold:int"
    " use_all_reduce_for_fetch_params:bool allgather_sequential:bool"
)
_PLACE_OF_RUNS = "enabled:bool output_path:text job_name:text"
HANDED: dict[str, str] = {
    "": "communication_data_type:text steps_per_print:count wall_clock_breakdown:bool memory_breakdown:bool"
    " dump_state:bool log_level:level disable_python_gc:bool disable_allgather:bool vocabulary_size:int"
    " zero_allow_untested_optimizer:bool",
    "zero_optimization": "contiguous_gradients:bool reduce_scatter:bool reduce_bucket_size:int"
    " use_multi_rank_bucket_allreduce:bool allgather_partitions:bool allgather_bucket_size:int"
    " overlap_comm:bool sub_group_size:int ignore_unused_parameters:bool memory_efficient_linear:bool"
    " override_module_apply:bool log_trace_cache_warnings:bool enable_sanity_checks:bool"
    " parameter_alignment:bool save_muon_momentum_buffer_in_memory:bool"
    f" {_OF_STAGE_3} stage3_{_OF_STAGE_3.replace(' ', ' stage3_')}",
    "zero_optimization.offload_optimizer": "nvme_path:text buffer_count:int pin_memory:bool fast_init:bool"
    " pipeline_read:bool pipeline_write:bool cpuadam_cores_perc:number",
    "zero_optimization.offload_param": "nvme_path:text buffer_count:int buffer_size:int max_in_cpu:int"
    " pin_memory:bool",
    "zero_optimization.leaf_module": "classes:list names:list name_suffixes:list",
    "flops_profiler": "enabled:bool recompute_fwd_factor:number profile_step:int module_depth:int"
    " top_modules:int detailed:bool output_file:text",
    "comms_logger": "enabled:bool prof_all:bool prof_ops:list verbose:bool debug:bool",
    "tensorboard": _PLACE_OF_RUNS,
    "csv_monitor": _PLACE_OF_RUNS,
    "wandb": "enabled:bool group:text team:text project:text",
    "comet": "enabled:bool samples_log_interval:int project:text workspace:text api_key:text"
    " experiment_name:text experiment_key:text online:bool mode:text",
    "timers.throughput": "enabled:bool synchronized:bool",
    "aio": "block_size:int queue_depth:int intra_op_parallelism:int single_submit:bool overlap_events:bool"
    " use_gds:bool",
}
"""Section -> its ``key:kind`` that reach DeepSpeed as they are."""

_FIELDS = {
    "train_micro_batch_size_per_gpu:int": "batch_size",
    "train_batch_size:int": "global_batch_size",
    "gradient_accumulation_steps:int": "gradient_accumulation_steps",
    "gradient_clipping:number": "gradient_clipping",
    "zero_optimization.stage:int": "zero_stage",
    "zero_optimization.offload_optimizer.device:text": "zero.offload_optimizer",
    "zero_optimization.offload_param.device:text": "zero.offload_parameters",
    "optimizer.params.lr:number": "learning_rate",
    "optimizer.params.weight_decay:number": "weight_decay",
    "optimizer.params.momentum:number": "momentum",
    "fp16.initial_scale_power:power": "scaler_init_scale",
    "fp16.loss_scale_window:int": "scaler_growth_interval",
}
_OWNED = {
    "`optimizer`": "optimizer.type:text optimizer.params.adam_w_mode:flag",
    "an argument of torch's class, as other params": "optimizer.params.betas:pair optimizer.params.eps:number"
    " optimizer.params.amsgrad:flag optimizer.params.nesterov:flag optimizer.params.dampening:number"
    " optimizer.params.maximize:flag optimizer.params.foreach:flag optimizer.params.fused:flag",
    "torch's optimizer steps, on the CPU as well": "optimizer.params.torch_adam:flag"
    " zero_force_ds_cpu_optimizer:bool",
    "`mixed_precision`": "bf16.enabled:bool fp16.enabled:bool fp16.auto_cast:bool",
    "the loss scale moves by DeepSpeed's own rule": "fp16.loss_scale:number fp16.min_loss_scale:int"
    " fp16.hysteresis:int fp16.consecutive_hysteresis:bool",
    "the dtype of the weights, or an error": "data_types.grad_accum_dtype:text",
    f"`{CHECKPOINTING}: full`": f"{CHECKPOINTING}.partition_activations:bool",
    f"`{CHECKPOINTING}: offload`": f"{CHECKPOINTING}.cpu_checkpointing:bool",
    "checkpoints are whole and portable": "zero_optimization.load_from_fp32_weights:bool"
    " zero_optimization.pipeline_loading_checkpoint:bool"
    " zero_optimization.gather_16bit_weights_on_model_save:bool"
    " zero_optimization.stage3_gather_16bit_weights_on_model_save:bool"
    " zero_optimization.stage3_gather_fp16_weights_on_model_save:bool",
}
FIELDS = {key.partition(":")[0]: field for key, field in _FIELDS.items()}
"""Key -> our field that takes its value."""
OWNED = {path: f"`{field}`" for path, field in FIELDS.items()} | {
    key.partition(":")[0]: ours for ours, keys in _OWNED.items() for key in keys.split()
}
"""Key -> what takes its place."""

DEFAULTS = {
    "zero_optimization.stage": 0,
    "fp16.loss_scale_window": 1000,
    "fp16.initial_scale_power": 16,
    "optimizer.params.weight_decay": 0.01,  # of the class of torch that torch_adam selects
}
"""Key of `FIELDS` -> DeepSpeed's default, which holds where the key is left out."""

IGNORED = {
    "zero_optimization.round_robin_gradients": "it changes only speed",
    "zero_optimization.elastic_checkpoint": "checkpoints are written in the portable format",
    "bf16.immediate_grad_update": "there is nothing to choose",
    "optimizer.params.set_grad_none": "there is nothing to choose",
    "comms_config": "DeepSpeed ignores it, too, and reads comms_logger",
    "monitor_config": "DeepSpeed ignores it, too, and reads tensorboard, wandb, csv_monitor, comet",
}
"""Key that is accepted with any switch or section, and not used -> why."""

_PORTABLE, _REMOVED = "checkpoints are written in the portable format", "DeepSpeed has removed it"
_OTHERS, _SAMPLER = "it is not part of this backend", "Give the Trainer a DataLoader with your own sampler"
_REFUSED: tuple[tuple[str, str, str], ...] = (
    ("it changes the training", "", "zero_optimization: zenflow zero_quantized_weights=false"
     " zero_quantized_gradients=false zero_quantized_nontrainable_weights=false; bf16:"
     " bf16_master_weights_and_grads=false bf16_optimizer_states=false;"
     " optimizer.params: fp32_optimizer_states=true"),
    ("its partitions are not in the portable checkpoints", "",
     "zero_optimization: zero_hpz_partition_size=1"),
    ("clipping and the log need the norm", "", "zero_optimization: compute_grad_norm=true"),
    (_PORTABLE, "", "datastates_ckpt=false; checkpoint:"
     ' writer tag_validation="warn"|"ignore"|"fail" checkpoint_serialization=true load_universal=false'
     " use_node_local_storage=false; checkpoint.parallel_write: pipeline_stage=false"),
    (_REMOVED, "", "zero_optimization: legacy_stage1=false mics_hierarchical_params_gather=false"
     " mics_shard_size=-1 zeropp_loco_param; nebula compression_training quantize_training sparse_gradients"
     " eigenvalue sparse_attention graph_harvesting progressive_layer_drop"),
    (_REMOVED, _SAMPLER, "curriculum_learning"),
    (_REMOVED, "Set mixed_precision=fp16", "amp"),
    (_REMOVED, "Set global_batch_size; it is kept on any number of ranks", "elasticity"),
    ("it takes DeepSpeed's own Adam", "", "zero_optimization.offload_optimizer: ratio=1"
     " super_offload=false; fp16: fp16_master_weights_and_grads=false; optimizer: legacy_fusion=false"),
    ("a step with a gradient that is not finite is always skipped", "", "bf16: check_grad_overflow=true"),
    ("DeepSpeed applies it only where the model calls deepspeed.checkpointing",
     f"Set {CHECKPOINTING}=full, selective or offload",
     f"{CHECKPOINTING}: contiguous_memory_optimization=false synchronize_checkpoint_boundary=false"
     " number_checkpoints=false profile=false"),
    ("no optimizer clips", "Set gradient_clipping, which clips by the norm",
     "optimizer.params: max_grad_norm"),
    ("torch's Adam always corrects its bias", "", "optimizer.params: bias_correction=true"),
    ("weights have the dtype that bf16 or fp16 gives, and buffers keep theirs", "",
     "data_types: param_dtype buffer_dtype keep_in_fp32_modules"),
    ("the loop makes the mean over the global batch", "", 'gradient_allreduce_op="mean"'
     " managed_gradient_accumulation=true prescale_gradients=false gradient_predivide_factor=1"),
    ("DeepCompile rewrites ZeRO's graph", "Set compile=blocks or model, up to stage 2",
     "compile/deepcompile=false"),
    (_OTHERS, "Set scheduler, warmup_steps and min_lr_ratio, or give the Trainer a function such as"
     " scheduler=lambda optimizer: deepspeed.runtime.lr_schedules.WarmupLR(optimizer, **params), with"
     " scheduler_interval='step'", "scheduler/type=null"),
    (_OTHERS, "Set mixed_precision=bf16 or fp16, which is autocast", "torch_autocast"),
    (_OTHERS, _SAMPLER, "data_efficiency"),
    (_OTHERS, "Set drop_last=True on the DataLoader", "dataloader_drop_last=false"),
    (_OTHERS, "Use `python -m distributed.cli tune`", "autotuning"),
    (_OTHERS, "See parallel.tensor, context, expert and pipeline", "tensor_parallel/autotp_size=0|1|false"
     " expert_parallel pipeline sequence_parallel_size=1"),
    (_OTHERS, "", 'hybrid_engine weight_quantization seq_parallel_communication_data_type="fp32"'
     " use_data_before_expert_parallelism=false"),
)  # fmt: skip


def _refused() -> Iterator[tuple[str, tuple[str, list[Any], str, str]]]:
    for reason, instead, blocks in _REFUSED:
        for block in blocks.split(";"):
            section, _, keys = block.rpartition(":")
            for key in keys.split():
                spelled, _, harmless = key.partition("=")
                name, _, switch = spelled.partition("/")
                values = [json.loads(value) for value in (harmless or "false").split("|")]
                switch = switch or ("" if harmless else "enabled")
                yield f"{section.strip()}.{name}".lstrip("."), (switch, values, reason, instead)


REFUSED = dict(_refused())
"""Key -> (the key inside of it that switches a section on, values that change nothing and are accepted, why
others are refused, what to do in its place)."""
_SPELLED = [f"{section}.{key}".lstrip(".") for section, keys in HANDED.items() for key in keys.split()]
_SPELLED += [*_FIELDS, *(key for keys in _OWNED.values() for key in keys.split())]
KINDS: dict[str, str] = {name: kind for name, _, kind in (key.partition(":") for key in _SPELLED)}
"""Key that is handed on or owned -> kind of its values."""
_PARENTS = {path.rpartition(".")[0] for path in (*KINDS, *REFUSED, *IGNORED)}
SECTIONS = (_PARENTS | {path.rpartition(".")[0] for path in _PARENTS}) - {""}
"""Keys whose values are mappings."""
