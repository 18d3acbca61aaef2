"""Names of the guide to dilated attention."""

from __future__ import annotations

from typing import Any

from tests.seeds.row import Row

_SHAPE = "embed_dim=64, num_heads=4, segment_lengths=[8, 16], dilation_rates=[1, 2]"
_MODULES = {
    "RingDistributedDilatedAttention": ("", "On several ranks it takes the `group` that holds slices."),
    "BlockSparseRingDistributedDilatedAttention": (
        ", sparsity_ratio=0.1",
        "The same, over a tenth of the blocks.",
    ),
    "DistributedMultiheadDilatedAttention": ("", "No Lightning: it is a plain module."),
    "DistributedImprovedMultiheadDilatedAttention": ("", "No difference from the one before."),
}
SMALL: dict[str, Any] = {
    "embed_dim": 768,
    "num_heads": 12,
    "num_layers": 12,
    "segment_lengths": [2048, 4096, 8192],
    "dilation_rates": [1, 2, 4],
    "use_deepspeed": True,
    "zero_stage": 2,
    "use_sequence_parallel": False,
    "use_model_parallel": False,
    "cpu_offload": False,
    "use_gradient_checkpointing": True,
}
MEDIUM: dict[str, Any] = {
    **SMALL,
    "embed_dim": 1024,
    "num_heads": 16,
    "num_layers": 24,
    "segment_lengths": [2048, 4096, 8192, 16384],
    "dilation_rates": [1, 2, 4, 8],
    "use_sequence_parallel": True,
    "cpu_offload": True,
}
LARGE: dict[str, Any] = {
    **MEDIUM,
    "embed_dim": 2048,
    "num_heads": 32,
    "segment_lengths": [2048, 4096, 8192, 16384, 32768],
    "dilation_rates": [1, 2, 4, 8, 16],
    "zero_stage": 3,
    "use_model_parallel": True,
}
_SIZES = (
    (
        "small",
        SMALL,
        "The run's part is `backend=deepspeed`, `zero_stage=2` and `activation_checkpointing=full`.",
        "(run_part['backend'], run_part['zero_stage']) == ('deepspeed', 2)",
    ),
    (
        "medium",
        MEDIUM,
        "DeepSpeed has no axis of the sequence here: `fsdp` shards as ZeRO 2 does, and a line says so.",
        "(run_part['backend'], run_part['parallel']['context']) == ('fsdp', 2)",
    ),
    (
        "large",
        LARGE,
        "`parallel.tensor` and `parallel.context` of two ranks each; `parallel=` sets other numbers.",
        "(run_part['parallel']['context'], run_part['parallel']['tensor']) == (2, 2)",
    ),
)
_ZERO_2 = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 4,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    },
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "overlap_comm": True,
        "contiguous_gradients": True,
    },
    "fp16": {
        "enabled": True,
        "auto_cast": False,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "gradient_clipping": 1.0,
}
_ZERO_3 = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "reduce_scatter": True,
        "overlap_comm": True,
        "contiguous_gradients": True,
    },
    "activation_checkpointing": {
        "partition_activations": True,
        "cpu_checkpointing": True,
        "contiguous_memory_optimization": False,
        "synchronize_checkpoint_boundary": False,
    },
}
_MODEL = """
    embed_dim=768, num_heads=12, num_layers=12, segment_lengths=[2048, 4096, 8192],
    dilation_rates=[1, 2, 4], vocab_size=50000, max_seq_len=16384, use_gradient_checkpointing=True"""

ROWS = [
    *(
        Row(
            name,
            f"{name}({_SHAPE}{more})",
            remark=remark,
            holds="_(torch.zeros(2, 32, 64)).shape == (2, 32, 64)",
        )
        for name, (more, remark) in _MODULES.items()
    ),
    Row(
        "sequence_parallel",
        f"DistributedImprovedMultiheadDilatedAttention({_SHAPE}, sequence_parallel=True)",
        f"DistributedImprovedMultiheadDilatedAttention({_SHAPE}, sequence_parallel=True, group=group)",
        "The ranks that hold slices of the sequence are given. Under a `Trainer`: `parallel.context`.",
        "_(torch.zeros(2, 16, 64)).shape == (2, 16, 64)",
        given="group = dist.group.WORLD",
        ranks=2,
    ),
    Row(
        "model_parallel",
        f"DistributedImprovedMultiheadDilatedAttention({_SHAPE}, model_parallel=True)",
        'Trainer(model, parallel={"tensor": 2})',
        "The run divides the model, and not the model itself.",
        "_.config.parallel.tensor == 2",
        error="model_parallel -> parallel: {tensor: N}",
    ),
    Row(
        "create_distributed_model",
        f"create_distributed_model({_MODEL}, use_deepspeed=True)",
        f"with torch.device('meta'):\n    model = create_distributed_model({_MODEL})",
        "`use_deepspeed` is `backend=deepspeed` of the run. The device `meta` builds no weights.",
        "sum(p.numel() for p in model.parameters()) > 1e8",
        error="use_deepspeed",
    ),
    *(
        Row(
            f"config, {size}",
            f"config = {{'use_deepspeed': True, 'zero_stage': {settings['zero_stage']},\n"
            f"'use_sequence_parallel': {settings['use_sequence_parallel']},"
            f" 'use_model_parallel': {settings['use_model_parallel']},\n"
            f"'cpu_offload': {settings['cpu_offload']}, 'use_gradient_checkpointing': True, ...}}",
            "model_part, run_part = split_settings(config, num_processes=4)\n"
            "with torch.device('meta'):\n"
            "    model = create_distributed_model(**model_part, vocab_size=50000, max_seq_len=65536)",
            remark,
            holds,
            given=f"config = {settings!r}",
        )
        for size, settings, remark, holds in _SIZES
    ),
    Row(
        "DeepSpeedDilatedAttentionEngine",
        "engine, optimizer, _, lr_scheduler = DeepSpeedDilatedAttentionEngine.initialize_deepspeed(\n"
        "model=model, train_batch_size=8, learning_rate=1e-4, zero_stage=2)\n"
        "engine.backward(loss_fn(engine(data), target))\nengine.step()",
        remark="DeepSpeed's engine, for a loop of your own. `DeepSpeedTrainer(model, global_batch_size=8,"
        " learning_rate=1e-4, zero_stage=2)` owns the loop.",
        given="before = model.weight.detach().clone()",
        holds="not torch.equal(before, model.weight)",
    ),
    Row(
        "ds_config.json, ZeRO 2",
        "DeepSpeedTrainer(model, deepspeed_config=ds_config)",
        remark="`fp16` needs a GPU. Optimizer, batch, accumulation and clipping become fields.",
        given=f"ds_config = {_ZERO_2!r}",
        holds="(_.config.zero_stage, _.config.global_batch_size, _.config.gradient_clipping) == (2, 64, 1.0)",
    ),
    Row(
        "ds_config.json, ZeRO 3",
        "DeepSpeedTrainer(model, deepspeed_config=ds_config)",
        remark="`activation_checkpointing` becomes ours, with a note.",
        given=f"ds_config = {_ZERO_3!r}",
        holds="_.config.zero_stage == 3 and _.config.activation_checkpointing != 'none'",
    ),
    Row(
        "use_bf16, use_fp16",
        "config['use_bf16'] = True\nconfig['use_fp16'] = False",
        "model_part, run_part = split_settings(config)",
        "`mixed_precision=bf16` of the run. What a script sets in `torch.backends` travels to the ranks.",
        "run_part['mixed_precision'] == 'bf16'",
        given="config = {'embed_dim': 64, 'use_bf16': True, 'use_fp16': False}",
    ),
    Row(
        "train_batch_size, micro_batch_size",
        "config = {'train_batch_size': 64, 'micro_batch_size': 4, 'gradient_accumulation_steps': 4}",
        "_, run_part = split_settings(config, num_processes=4)",
        "`global_batch_size`, `batch_size` and `gradient_accumulation_steps` of the run.",
        "(run_part['global_batch_size'], run_part['batch_size']) == (64, 4)",
        given="config = {'train_batch_size': 64, 'micro_batch_size': 4, 'gradient_accumulation_steps': 4}",
    ),
    Row(
        "monitor_memory",
        "monitor_memory()",
        remark="Returns MiB by name; `show=True` prints them.",
        holds="_['memory_rss_mb'] > 0",
    ),
    Row(
        "profile_training_step",
        "profile_training_step(model, batch)",
        "profile = {'enabled': True, 'skip_steps': 0, 'steps': 1}\n"
        "trainer = PyTorchDDPTrainer(model, num_processes=1, profile=profile)\n"
        "trainer.fit((x, y), max_steps=2)",
        "A trace and a table of each rank, in `profile.output_dir`.",
        "Path('profile/table_rank0.txt').exists()",
        given="batch = x",
        error="Set profile.enabled=true",
    ),
]
