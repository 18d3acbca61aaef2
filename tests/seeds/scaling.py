"""Names of the guide to sharding and scaling."""

from __future__ import annotations

from tests.seeds.row import Row

_SCHEDULES = {"GPipe": "gpipe", "1F1B": "1f1b", "Interleaved": "interleaved-1f1b", "Zero Bubble": "zbv"}
_GROUP = "torch.set_default_dtype(torch.float64)\ntorch.manual_seed(0)\n"

ROWS = [
    Row(
        "FSDP",
        "FSDP(model, sharding_strategy=ShardingStrategy.FULL_SHARD,\n"
        "mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),\n"
        "device_id=0, use_orig_params=True)",
        "FSDPTrainer(model, sharding_strategy=ShardingStrategy.FULL_SHARD,\n"
        "mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),\n"
        "device_id=0, use_orig_params=True)",
        "FSDP2. `param_dtype` is autocast over float32 parameters, which is equal on every backend."
        " `fsdp.param_dtype=bf16` gathers them in bf16 as well, with half of the traffic; such a run is not"
        " equal to others. Buffers keep their dtype; a rank has the device of its own.",
        "_.config.mixed_precision == 'bf16' and _.config.fsdp.reduce_dtype == 'bf16'",
        given="from torch.distributed.fsdp import MixedPrecision",
    ),
    Row(
        "ShardingStrategy.NO_SHARD",
        "FSDPTrainer(model, sharding_strategy=ShardingStrategy.NO_SHARD)",
        remark="The backend `pytorch-ddp`.",
        holds="_.config.backend == 'pytorch-ddp'",
    ),
    Row(
        "ShardingStrategy.SHARD_GRAD_OP",
        "FSDPTrainer(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)",
        remark="`fsdp.reshard_after_forward=false`: parameters stay gathered from forward to backward.",
        holds="_.config.fsdp.reshard_after_forward is False",
    ),
    Row(
        "ShardingStrategy.FULL_SHARD",
        "FSDPTrainer(model, sharding_strategy=ShardingStrategy.FULL_SHARD)",
        remark="`fsdp.reshard_after_forward=true`, the default.",
        holds="_.config.fsdp.reshard_after_forward is True",
    ),
    Row(
        "ShardingStrategy.HYBRID_SHARD",
        "FSDPTrainer(model, sharding_strategy=ShardingStrategy.HYBRID_SHARD)",
        'FSDPTrainer(model, sharding_strategy=ShardingStrategy.HYBRID_SHARD, parallel={"data": 2})',
        "The number of copies has to be given; FSDP1 takes that of the hosts.",
        "_.config.parallel.data == 2",
        error="sharding_strategy=HYBRID_SHARD needs the number of copies",
    ),
    Row(
        "zero_optimization",
        'deepspeed_config={"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"},\n'
        '"offload_param": {"device": "cpu"}, "overlap_comm": True, "contiguous_gradients": True,\n'
        '"reduce_bucket_size": 5e8}}\nDeepSpeedTrainer(model, deepspeed_config=deepspeed_config)',
        remark="The file's path may be given as well. `overlap_comm`, `contiguous_gradients` and"
        " `reduce_bucket_size` go to DeepSpeed.",
        holds="_.config.backend == 'deepspeed'",
    ),
    Row(
        "ColumnParallelLinear",
        "ColumnParallelLinear(in_features, out_features, world_size)",
        remark="Each rank has rows of one whole layer, and backward passes through the gather.",
        given=_GROUP + "in_features, out_features, world_size = 6, 4, 2",
        holds="_(torch.ones(3, 6)).shape == (3, 4) and _.weight.shape == (2, 6)",
        ranks=2,
    ),
    Row(
        "gpipe_forward",
        "gpipe_forward(model_chunks, micro_batches)",
        'Trainer(model, parallel={"pipeline": 2, "schedule": "gpipe"})',
        "Stages are read from the model, and the schedule calls autograd. A module has no method `backward`.",
        "_.config.parallel.schedule == 'gpipe'",
        given="model_chunks, micro_batches = [model], [x]",
        error="Set parallel.pipeline and parallel.schedule=gpipe",
    ),
    *(
        Row(
            name,
            f"schedule: {name}",
            f'Trainer(model, parallel={{"pipeline": 2, "schedule": "{word}"}})',
            "A word of `parallel.schedule`.",
            f"_.config.parallel.schedule == '{word}'",
        )
        for name, word in _SCHEDULES.items()
    ),
    Row(
        "compress_gradient",
        "values, indices = compress_gradient(grad, k=0.1)",
        remark="Values have their signs; there they are magnitudes.",
        given="grad = torch.arange(20.0) - 10",
        holds="values.tolist() == [-10.0, -9.0] or sorted(values.tolist()) == [-10.0, 9.0]",
    ),
    Row(
        "random_sparse",
        "random_sparse(grad, p=0.5)",
        given="grad = torch.ones(1000)",
        holds="set(_.tolist()) == {0.0, 2.0}",
    ),
    Row(
        "TP, PP, DP",
        "TP, PP, DP = 4, 2, 8",
        "Trainer(model, parallel={'tensor': TP, 'pipeline': PP, 'data': DP})",
        "The product is the number of ranks; one of them may be left out.",
        "(_.config.parallel.tensor, _.config.parallel.pipeline, _.config.parallel.data) == (4, 2, 8)",
        given="TP, PP, DP = 4, 2, 8",
    ),
    Row(
        "async_checkpoint",
        "thread = async_checkpoint(model, path)",
        remark="The values are copied first, so that training may go on; the file is replaced as a whole; the"
        " thread's `join()` raises the error of a write. `fit` writes whole checkpoints by itself.",
        given="path = 'model.pt'",
        holds="thread.join() is None and torch.equal(torch.load(path)['weight'], model.weight)",
    ),
    Row(
        "FileSystemWriter",
        "save(state_dict=model.state_dict(), storage_writer=FileSystemWriter(path))",
        "Trainer(model, checkpoint_dir=path, num_processes=1).fit((x, y))",
        "Sharded checkpoints, which every backend and number of ranks loads, with optimizer, schedule, random"
        " numbers and place in the data.",
        "any(Path(path).glob('step_*'))",
        given="path = 'checkpoints'",
    ),
    Row(
        "--rdzv_backend=c10d",
        "torchrun --nnodes=1:4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=master:29500 train.py",
        'DistributedConfig(num_nodes=4, elastic={"min_nodes": 1}, checkpoint_dir="run",\n'
        'rdzv_endpoint="master:29500")',
        "torchrun may start the ranks as well. `train --rdzv-endpoint` needs no `--rdzv_backend`: node 0"
        " serves the rendezvous, and hosts may leave and join.",
        "_.elastic.min_nodes == 1",
    ),
    Row(
        "estimate_memory",
        'estimate_memory(params_b, precision="bf16")',
        remark="The guide's formula. `predict_memory` is that of a run here, with float32 weights.",
        given="params_b = 7",
        holds="_ == 7 * 16 and estimate_memory(7, 'fp32') == 7 * 24 and predict_memory(7) > 140",
    ),
    Row(
        "Efficiency",
        "(Time_1GPU / Time_NGPU) / N",
        "scaling_efficiency(time_1gpu=100.0, time_ngpu=14.0, num_gpus=8)",
        "The same formula.",
        "_ == 100.0 / 14.0 / 8",
    ),
]
