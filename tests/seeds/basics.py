"""Names of the guide to data parallelism by hand."""

from __future__ import annotations

from tests.seeds.row import Row

_ON_RANKS = "torch.manual_seed(0)\nrank, world_size = dist.get_rank(), dist.get_world_size()\n"
_PRIMITIVE = "A name of the guide's own: torch's function does it, after `setup_distributed()`."

ROWS = [
    Row(
        "setup_distributed",
        "setup_distributed()",
        remark="On the ranks of torchrun, srun, mpirun or horovodrun. Without a launcher it names `rank` and"
        " `world_size`.",
        given="os.environ.update(RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT='0')",
        holds="dist.is_initialized()",
    ),
    Row(
        "DistributedTrainer",
        "trainer = DistributedTrainer(model, optimizer, world_size, rank)\ntrainer.train_step(data, target)",
        remark="The mean over the samples of all ranks, also where their numbers differ.",
        given="weight = model.weight.detach().clone()",
        holds="_ > 0 and not torch.equal(weight, model.weight)",
    ),
    Row(
        "setup_horovod",
        "setup_horovod()",
        given="os.environ.update(RANK='0', WORLD_SIZE='1')",
        remark="Under any launcher.",
    ),
    Row(
        "HorovodTrainer",
        "trainer = HorovodTrainer(model, optimizer)\ntrainer.train_step(data, target)",
        remark="The learning rate is not multiplied by the number of ranks: see the next line.",
        holds="_ > 0 and optimizer.param_groups[0]['lr'] == 0.1",
    ),
    Row(
        "hvd.size()",
        "param_group['lr'] = param_group['lr'] * hvd.size()",
        "HorovodTrainer(model, optimizer, lr_scaling={'rule': 'linear', 'base_batch_size': 32})",
        "A request: the rate follows the global batch, so that another number of ranks with the same batch is"
        " the same training.",
        "_.config.lr_scaling.rule == 'linear'",
    ),
    Row(
        "create_distributed_model",
        "model = create_distributed_model(strategy)",
        "trainer = TensorFlowDistributedTrainer(create_keras_model)",
        "`distributed` has this name for models of dilated attention. A Keras model comes from a function, or"
        " from the scope of a strategy.",
        "trainer.config.backend == 'tensorflow'",
        given="class strategy: scope = None\ncreate_keras_model = lambda: None",
        error="Give TensorFlowDistributedTrainer the function that builds",
    ),
    Row(
        "allreduce_example",
        "tensor = allreduce_example()",
        "tensor = torch.ones(10)\ndist.all_reduce(tensor, op=dist.ReduceOp.SUM)",
        _PRIMITIVE,
        "torch.equal(tensor, torch.full((10,), 2.0))",
        ranks=2,
        error="Call setup_distributed(), then torch.distributed.all_reduce",
    ),
    Row(
        "allgather_example",
        "tensors = allgather_example()",
        "tensors = [torch.zeros(10) for _ in range(dist.get_world_size())]\n"
        "dist.all_gather(tensors, torch.full((10,), float(dist.get_rank())))",
        _PRIMITIVE,
        "[float(tensor[0]) for tensor in tensors] == [0.0, 1.0]",
        ranks=2,
        error="Call setup_distributed(), then torch.distributed.all_reduce, all_gather",
    ),
    Row(
        "broadcast_example",
        "tensor = broadcast_example()",
        "tensor = torch.full((10,), float(dist.get_rank()))\ndist.broadcast(tensor, src=0)",
        _PRIMITIVE,
        "float(tensor[0]) == 0.0",
        ranks=2,
        error="or broadcast",
    ),
    Row(
        "CustomCommunication",
        "CustomCommunication(world_size, rank).ring_allreduce(tensor)",
        remark="The whole sum, in place, for any length; there the ring ends after its first half.",
        given=_ON_RANKS + "tensor = torch.arange(7.0) * (rank + 1)",
        holds="torch.equal(tensor, torch.arange(7.0) * 3)",
        ranks=2,
    ),
    Row(
        "GradientCompression",
        "compression = GradientCompression(compression_ratio=0.1)\n"
        "compressed = compression.compress_gradients(gradients)\n"
        "gradients = compression.decompress_gradients(compressed)",
        remark="Between the two calls a gradient is its values and indices, and what is left out is added to"
        " the next one; `error_feedback=False` drops it. Under a `Trainer`: `compression.codec`.",
        given="gradients = [torch.arange(20.0) - 10, None]",
        holds="gradients[1] is None and gradients[0].count_nonzero() == 2 and float(gradients[0][0]) == -10",
    ),
    Row(
        "OverlappedTrainer",
        "trainer = OverlappedTrainer(model, optimizer, world_size)\n"
        "trainer.train_step_overlapped(data, target)",
        remark="Gradients are reduced during backward; there it begins after it.",
        holds="_ > 0",
    ),
    Row(
        "PerformanceMonitor",
        'monitor = PerformanceMonitor()\nmonitor.start_timer("step")\nmonitor.end_timer("step")',
        remark="Every measurement is kept, and `table()` prints them. `PerformanceMonitor(synchronize=True)`"
        " waits for the GPU. A timer that was not started is an error.",
        holds="_ >= 0 and len(monitor.timings['step']) == 1",
    ),
    Row(
        "PerformanceMonitor.monitor_training",
        "monitor.monitor_training(trainer, data_loader, num_steps=2)",
        remark="Returns the medians; there it prints.",
        given="monitor = PerformanceMonitor()\ntrainer = DistributedTrainer(model, optimizer, 1, 0)\n"
        "data_loader = loader",
        holds="_['forward_backward'] > 0 and len(monitor.timings['forward_backward']) == 2",
    ),
    Row(
        "profile_communication",
        "profile_communication()",
        ranks=2,
        remark="The median of several all-reduces of each size; there the first one, which is slower.",
    ),
    Row(
        "create_dataloader",
        "dataloader, sampler = create_dataloader(batch_size, world_size, rank)",
        "dataloader = DataLoader(dataset, batch_size=batch_size, shuffle=True, num_workers=2)",
        "A name of the guide's own. `fit` takes the loader, and divides and reshuffles the samples.",
        "dataloader.batch_size == 8",
        given="batch_size = 8",
        error="Give Trainer.fit a torch DataLoader",
    ),
    Row(
        "--local_rank",
        'parser.add_argument("--local_rank", type=int, default=0)',
        remark="Only the old launcher of torch passes it; others set LOCAL_RANK.",
        given="parser = argparse.ArgumentParser()",
        holds="parser.parse_args([]).local_rank == 0",
    ),
]
