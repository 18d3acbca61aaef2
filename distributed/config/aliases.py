"""What other tools call our fields and backends, and the guess for an unknown name in an error.

A table first, then the nearest spelling: by its letters alone, ``lr`` is nearest to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from distributed.errors import did_you_mean

__all__ = ["guess_backend", "guess_field", "instead_of", "meant_fields"]

FIELDS = {
    # Ranks and hosts
    "world_size": "num_gpus num_processes",
    "nproc": "num_gpus num_processes",
    "num_ranks": "num_gpus num_processes",
    "gpus": "num_gpus gpus_per_node",
    "devices": "gpus_per_node num_gpus",
    "nproc_per_node": "gpus_per_node",
    "nnodes": "num_nodes",
    "master_addr": "rdzv_endpoint",
    "master_port": "rdzv_endpoint",
    "init_method": "rdzv_endpoint",
    "dist_url": "rdzv_endpoint",
    "accelerator": "device",
    # Backend
    "strategy": "backend",
    "ddp": "backend=pytorch-ddp",
    "deepspeed": "backend=deepspeed deepspeed_config",
    "use_deepspeed": "backend=deepspeed",
    "use_fsdp": "backend=fsdp",
    "zero_optimization": "zero_stage",
    "stage": "zero_stage",
    "dist_backend": "communication_backend",
    "process_group_backend": "communication_backend",
    "timeout": "collective_timeout",
    "ddp_timeout": "collective_timeout",
    "sync_bn": "sync_batchnorm",
    # Mesh
    **dict.fromkeys(("model_parallel", "use_model_parallel"), "parallel.tensor parallel.pipeline"),
    **{f"{name}_size": "parallel.tensor" for name in ("tensor_parallel", "tensor_model_parallel", "tp")},
    **{
        f"{name}_size": "parallel.pipeline" for name in ("pipeline_parallel", "pipeline_model_parallel", "pp")
    },
    **{
        short: f"parallel.{axis}"
        for axis, short in {
            "data": "dp",
            "tensor": "tp",
            "pipeline": "pp",
            "context": "cp",
            "expert": "ep",
        }.items()
    },
    "data_parallel_size": "parallel.data",
    **dict.fromkeys(("sequence_parallel", "use_sequence_parallel"), "parallel.context"),
    **{f"{name}_parallel_size": "parallel.context" for name in ("sequence", "context")},
    **{f"{name}_size": "parallel.expert" for name in ("expert_parallel", "expert_model_parallel")},
    # Batch
    "bs": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "micro_batch_size": "batch_size",
    "train_micro_batch_size_per_gpu": "batch_size",
    "train_batch_size": "global_batch_size",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "accumulation_steps": "gradient_accumulation_steps",
    "grad_accum": "gradient_accumulation_steps",
    # Training
    "max_epochs": "epochs",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_train_steps": "max_steps",
    "num_steps": "max_steps",
    "total_steps": "max_steps",
    "lr": "learning_rate",
    "wd": "weight_decay",
    "optim": "optimizer",
    "lr_scheduler": "scheduler",
    "lr_scheduler_type": "scheduler",
    "num_warmup_steps": "warmup_steps",
    "precision": "mixed_precision",
    "amp": "mixed_precision",
    "dtype": "mixed_precision",
    "fp16": "mixed_precision=fp16",
    "bf16": "mixed_precision=bf16",
    "use_fp16": "mixed_precision=fp16",
    "use_bf16": "mixed_precision=bf16",
    "param_dtype": "mixed_precision",
    "max_grad_norm": "gradient_clipping",
    "clip_grad_norm": "gradient_clipping",
    "grad_clip": "gradient_clipping",
    **dict.fromkeys(
        ("gradient_compression", "grad_compression", "compress_gradients", "gradientcompression"),
        "compression.codec",
    ),
    "compress_gradient": "compression.codec=top-k",
    "random_sparse": "compression.codec=random-k",
    "compression_ratio": "compression.ratio",
    "gradient_checkpointing": "activation_checkpointing",
    "torch_compile": "compile",
    "gradient_clip_val": "gradient_clipping",
    "seed_everything": "seed",
    "random_seed": "seed",
    # Checkpoints and logs
    "resume": "resume_from_checkpoint",
    "ckpt_path": "resume_from_checkpoint",
    "ckpt_dir": "checkpoint_dir",
    "save_dir": "checkpoint_dir",
    "output_dir": "checkpoint_dir",
    "default_root_dir": "checkpoint_dir",
    **dict.fromkeys(("async_checkpoint", "async_checkpointing", "async_save"), "checkpoint.asynchronous"),
    "save_steps": "checkpoint.every_n_steps",
    "save_total_limit": "checkpoint.keep_last",
    "logging_steps": "log_every_n_steps",
    "mlflow": "mlflow_tracking",
    "profile_training_step": "profile.enabled",
}
"""Name elsewhere -> our field, or several with the most likely first; ``=`` with the value to set."""

_OFFLOAD = "cpu_offload"

NOT_FIELDS = {
    "num_workers": "Set it in the DataLoader",
    "pin_memory": "Set it in the DataLoader",
    "rdzv_backend": "Leave it out: node 0 serves the rendezvous, at rdzv_endpoint. torchrun has such a flag",
    "sharding_strategy": "FULL_SHARD is backend=fsdp, SHARD_GRAD_OP is fsdp.reshard_after_forward=false,"
    " HYBRID_SHARD is backend=fsdp with parallel.data, NO_SHARD is backend=pytorch-ddp",
    "buffer_dtype": "Leave it out: buffers keep their dtype, and mixed_precision casts inside operations",
    **dict.fromkeys(
        ("profile_communication", "profile_communication_overhead"),
        "Call distributed.profile_communication() on the ranks, or run `distributed.cli bench comm`",
    ),
    "device_id": "Leave it out: rank N of a host computes on its GPU N, or all on the CPU with device=cpu",
    _OFFLOAD: "Set zero.offload_optimizer=cpu under deepspeed, at stage 3 zero.offload_parameters=cpu as"
    " well; fsdp.cpu_offload=true under fsdp; optimizer_offload=true under other backends",
    **dict.fromkeys(
        (
            "embed_dim",
            "num_heads",
            "num_layers",
            "segment_lengths",
            "dilation_rates",
            "sparsity_ratio",
            "vocab_size",
            "max_seq_len",
            "sketch_size",
            "sketch_ratios",
        ),
        "It belongs to the model: give it to the class or function that builds the model",
    ),
    "use_orig_params": "Leave it out: parameters keep their names and shapes under fsdp",
    "use_gradient_checkpointing": "Set activation_checkpointing=full",
    "local_rank": "The launcher sets it in the environment",
    "rank": "The launcher sets it in the environment",
    "per_device_eval_batch_size": "The validation DataLoader's own batch size is used",
}
"""Name elsewhere -> what to do instead of setting a field."""

BACKENDS = {
    "ddp": "pytorch-ddp",
    "pytorch": "pytorch-ddp",
    "torch": "pytorch-ddp",
    "dp": "pytorch-ddp",
    "torchrun": "pytorch-ddp",
    "fsdp1": "fsdp",
    "fsdp2": "fsdp",
    "fairscale": "fsdp",
    "fully_sharded": "fsdp",
    "zero": "deepspeed",
    **{f"zero{stage}": f"deepspeed zero_stage={stage}" for stage in (1, 2, 3)},
    **{f"deepspeed_stage_{stage}": f"deepspeed zero_stage={stage}" for stage in (1, 2, 3)},
    "ds": "deepspeed",
    "hvd": "horovod",
    "tf": "tensorflow",
    "keras": "tensorflow",
    "single": "serial",
    "single_device": "serial",
    "none": "serial",
}
"""Name elsewhere -> our backend, with a field to set beside it."""

BACKEND_SECTIONS = ("fsdp", "horovod", "ray", "tensorflow")
"""Sections that a user may take for the switch that selects the backend."""

_OFFLOADS = {
    "deepspeed": "Set zero.offload_optimizer=cpu",
    "fsdp": "Set fsdp.cpu_offload=true",
    "tensorflow": "Leave it out: backend 'tensorflow' offloads nothing",
    **dict.fromkeys(("pytorch-ddp", "horovod", "serial"), "Set optimizer_offload=true"),
}
"""Backend -> how it offloads."""
_OFFLOADS_OF_ZERO = {
    0: "Set zero_stage=1 or higher and zero.offload_optimizer=cpu: stage 0 offloads nothing",
    3: "Set zero.offload_optimizer=cpu and zero.offload_parameters=cpu",
}
"""Stage of ZeRO -> how it offloads, where it differs from the others."""

_TRANSPORTS = ("nccl", "gloo", "mpi")


def meant_fields(name: str, known: Iterable[str]) -> list[str]:
    """Those of the fields `known` that `name` means elsewhere, the most likely first; ``field=value`` where
    the name stands for one value. A field of a section is meant by its last part, if no other has it."""
    fields, plain = list(known), _plain(name)
    leaf = plain.rpartition(".")[2]
    found = FIELDS.get(plain, FIELDS.get(leaf, "")).split()
    ends = [field for field in fields if field.rpartition(".")[2] == leaf]
    return found or (ends if len(ends) == 1 else [])


def instead_of(name: str) -> str:
    """What to do instead of setting a field, for a name that is none; empty without advice."""
    return NOT_FIELDS.get(_plain(name), "")


def guess_field(name: str, known: Iterable[str], given: Mapping[str, Any] | None = None) -> str:
    """A sentence, after a space, about the field that `name` most likely means; empty without a guess.

    Args:
        given: fields that were set beside it, the backend among them if it is known.
    """
    fields = list(known)
    instead = _offloading(given or {}) if _plain(name).rpartition(".")[2] == _OFFLOAD else instead_of(name)
    if instead:
        return f" {instead}."
    meant = meant_fields(name, fields)
    return f" Did you mean {_either(meant)}?" if meant else did_you_mean(name, fields)


def _offloading(given: Mapping[str, Any]) -> str:
    """Sentence on how to offload under the backend that `given` sets, or under each."""
    stage = given.get("zero_stage")
    backend = given.get("backend") if stage is None else "deepspeed"  # which a stage moves the default to
    found = _OFFLOADS.get(str(backend), NOT_FIELDS[_OFFLOAD])
    return _OFFLOADS_OF_ZERO.get(stage, found) if isinstance(stage, int) else found


def guess_backend(name: str, known: Iterable[str]) -> str:
    """The same for a backend's name."""
    names, plain = list(known), _plain(name)
    if plain in _TRANSPORTS:
        return f" It is a transport: communication_backend={plain}."
    backend, _, beside = BACKENDS.get(plain, "").partition(" ")
    if backend not in names:
        return did_you_mean(name.lower(), names)
    return f" Did you mean '{backend}'{f' with {beside}' if beside else ''}?"


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _either(names: Iterable[str]) -> str:
    return " or ".join(f"'{name}'" for name in names)
