"""Names of the guide to sketched layers."""

from __future__ import annotations

from tests.seeds.row import Row

_GROUP = "torch.set_default_dtype(torch.float64)\nmodel_group = dist.group.WORLD\ntorch.manual_seed(0)\n"
_LAYERS = """
layer_configs = [
    {"in_features": 8, "out_features": 6, "sketch_size": 2},
    {"in_features": 6, "out_features": 4, "sketch_size": 2},
]
"""
_HYBRID = 'trainer = HybridParallelTrainer({"layers": [model]}, {"tensor_parallel_size": 1}, num_processes=1)'

ROWS = [
    Row(
        "setup_distributed",
        'setup_distributed(rank, world_size, backend="nccl")',
        'setup_distributed(rank, world_size, backend="gloo")',
        "`nccl` needs GPUs; without `backend` it is chosen by the device. The ports and the address are the"
        " launcher's, or free ones. `Trainer.fit` needs no call.",
        "dist.is_initialized()",
    ),
    Row("cleanup_distributed", "cleanup_distributed()", holds="not dist.is_initialized()"),
    Row(
        "DistributedSketchedModel",
        "DistributedSketchedModel(1024, [512, 256, 128], 10, sketch_ratios=[0.5, 0.6, 0.7, 0.8])",
        remark="One warning: with these ratios no layer saves anything, and it names the break-even ranks.",
        holds="_(torch.zeros(2, 1024)).shape == (2, 10)",
    ),
    Row(
        "train_distributed",
        "mp.spawn(train_distributed, args=(world_size,), nprocs=world_size, join=True)",
        "PyTorchDDPTrainer(model, num_gpus=world_size, epochs=5).fit(dataset)",
        "`fit` starts the ranks, divides the samples, reshuffles each epoch and trains. The script needs no"
        " function of its own for a rank.",
        "len(_.epochs) == 5",
    ),
    Row(
        "AdvancedDistributedTrainer",
        "trainer = AdvancedDistributedTrainer(model, rank, world_size)\n"
        "trainer.train_epoch(dataloader, optimizer, criterion)",
        remark="The mean over all samples of all ranks, also where their numbers differ.",
        holds="_ > 0 and trainer.config.find_unused_parameters and trainer.config.gradient_clipping == 1.0",
    ),
    Row(
        "synchronize_sketching_matrices",
        "trainer.synchronize_sketching_matrices()",
        remark="Where `fit` starts the ranks, these are equal from the start.",
        given="trainer = AdvancedDistributedTrainer(model, rank, world_size)",
    ),
    Row(
        "PipelineParallelSketchedModel",
        "PipelineParallelSketchedModel(layer_configs, devices)",
        remark="In one process, as there. Ranks divide it at the same time with `parallel.pipeline`.",
        given=_LAYERS + 'devices = ["cpu", "cpu"]',
        holds="_(torch.zeros(3, 8)).shape == (3, 4)",
    ),
    Row(
        "MicrobatchPipelineTrainer",
        "trainer = MicrobatchPipelineTrainer(model, num_microbatches=4)\n"
        "trainer.forward_backward_pipeline(batch_data, batch_targets, criterion, optimizer)",
        remark="No sample is left out where the batch is not divisible by the number.",
        given="batch_data, batch_targets = x[:10], y[:10]\nweight = model.weight.detach().clone()",
        holds="_ > 0 and not torch.equal(weight, model.weight)",
    ),
    Row(
        "TensorParallelSKLinear",
        "TensorParallelSKLinear(in_features, out_features, sketch_size, tensor_parallel_group)",
        remark="The factors are those of one whole layer, cut; there each rank draws others.",
        given=_GROUP + "in_features, out_features, sketch_size, tensor_parallel_group = 8, 6, 2, model_group",
        holds="_(torch.ones(3, 8)).shape == (3, 6)",
        ranks=2,
    ),
    Row(
        "TensorParallelModel",
        "TensorParallelModel(layer_configs, tensor_parallel_group)",
        remark="A `sketch_size` means `SKLinear`; without one the layer is `torch.nn.Linear`.",
        given=_GROUP + _LAYERS + "tensor_parallel_group = model_group",
        holds="_(torch.ones(3, 8)).shape == (3, 4) and type(_.model[0]).__name__ == 'SKLinear'",
        ranks=2,
    ),
    Row(
        "HybridParallelTrainer",
        'trainer = HybridParallelTrainer({"layers": layers}, {"tensor_parallel_size": 2})\n'
        "trainer.create_hybrid_model()",
        remark="Layers with `tensor_parallel: True` are cut. `create_hybrid_model()` builds the whole model.",
        given=_LAYERS + 'layers = [{**layer, "tensor_parallel": True} for layer in layer_configs]',
        holds="trainer.config.parallel.tensor == 2 and type(trainer.create_hybrid_model()[0]).__name__"
        " == 'SKLinear'",
    ),
    Row(
        "HybridParallelTrainer.train_step",
        "trainer.train_step((data, targets), optimizer, criterion)",
        remark="Under a launcher with as many ranks as the sizes multiply to.",
        given=_HYBRID + "\ntargets = target",
        holds="_ > 0",
    ),
    Row(
        "HybridParallelTrainer.setup_process_groups",
        "trainer.setup_process_groups()",
        "trainer.fit((x, y))",
        "Without a launcher the ranks do not exist before `fit`, which makes the groups. Under torchrun the"
        " call sets `tp_group`, `tp_rank`, `dp_group` and `dp_rank`.",
        "len(_.epochs) == 1",
        given=_HYBRID,
        error="fit starts them, and makes their groups",
    ),
    Row(
        "DistributedMetricsCollector",
        "metrics = DistributedMetricsCollector(rank, world_size)\nmetrics.update_metric('loss', 0.5)\n"
        "metrics.compute_global_metrics()\nmetrics.print_metrics()",
        remark="The mean over all values of all ranks, also where their numbers differ.",
        given="rank, world_size = dist.get_rank(), dist.get_world_size()",
        holds="metrics.compute_global_metrics() == {'loss': 0.5}",
        ranks=2,
    ),
    Row(
        "profile_communication_overhead",
        "profile_communication_overhead()",
        ranks=2,
        remark="The table goes to rank 0. Without a script: `bench comm`.",
    ),
    Row(
        "choose_parallelism_strategy",
        "choose_parallelism_strategy(model_size=7e9, num_gpus=8, memory_per_gpu=80e9)",
        remark="The strategies whose predicted memory fits, the fastest first, and `sharded_data_parallel`"
        " besides. Sizes below 100,000 are billions and gigabytes; `num_parameters` is taken as it is.",
        holds="_ and 'data_parallel' not in _",
    ),
    Row(
        "SKLinear",
        "pr.nn.SKLinear(prev_size, hidden_size, sketch_size)",
        "SKLinear(prev_size, hidden_size, sketch_size)",
        "A rank at which the layer saves nothing is an error; `allow_costly=True` accepts it.",
        "_(torch.zeros(2, 64)).shape == (2, 32)",
        given="prev_size, hidden_size, sketch_size = 64, 32, 8",
    ),
    Row(
        "DDP",
        "DDP(model, device_ids=[rank])",
        "PyTorchDDPTrainer(model)",
        "Pass the model itself. A step uses the mean over the samples of all ranks.",
        "_.config.backend == 'pytorch-ddp'",
    ),
    Row(
        "DistributedSampler",
        "DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset, num_replicas=1, rank=0))",
        remark="`fit` takes the loader with the samples of all ranks: nothing is divided twice, and"
        " `set_epoch` needs no call.",
        holds="PyTorchDDPTrainer(model, num_processes=1).fit(_).num_samples == len(dataset)",
    ),
]
