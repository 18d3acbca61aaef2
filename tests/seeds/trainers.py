"""Names of the guide to a training platform."""

from __future__ import annotations

from tests.seeds.row import Row

_KERAS = """
import tensorflow as tf
strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
with strategy.scope():
    keras_model = tf.keras.Sequential([tf.keras.layers.Dense(8, "relu"), tf.keras.layers.Dense(4, "softmax")])
    keras_model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
train_dataset = val_dataset = tf.data.Dataset.from_tensor_slices((x.numpy(), y.numpy())).batch(8)
"""
_TUNE = """
import ray
from ray import tune
if not ray.is_initialized():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
def train_fn(config):
    trainer = RayTrainer(nn.Linear(6, 4), config, num_processes=1, device="cpu")
    trainer.fit(train_loader, val_loader)
    return {"accuracy": trainer.best_accuracy}
"""
_SCRIPT = (
    "Path('train.py').write_text('from distributed import Trainer\\nfrom torch import nn, zeros\\n'"
    " 'Trainer(nn.Linear(2, 2)).fit((zeros(64, 2), zeros(64).long()))')\n"
)
_CLI = "python -m distributed.cli train"

ROWS = [
    Row(
        "PyTorchDDPTrainer",
        "trainer = PyTorchDDPTrainer(model=model, num_gpus=1, batch_size=8, epochs=2)\n"
        "history = trainer.fit(train_loader, val_loader)",
        remark="Without GPUs the ranks are processes on the CPU.",
        holds="history.total_time > 0 and history.best_accuracy == trainer.best_accuracy",
    ),
    Row(
        "fit",
        'trainer.fit(train_loader, val_loader, checkpoint_dir="./checkpoints",\n'
        'mlflow_experiment="distributed-training")',
        remark="Any field of the configuration may be given to `fit` as well.",
        given="import mlflow\ntrainer = PyTorchDDPTrainer(model, num_processes=1)",
        holds="any(Path('checkpoints').glob('step_*'))"
        " and mlflow.get_experiment_by_name('distributed-training') is not None",
    ),
    Row(
        "HorovodTrainer",
        "trainer = HorovodTrainer(model=model, optimizer=optimizer, loss_fn=loss_fn, verbose=False)\n"
        "trainer.fit(train_loader, epochs=2)",
        remark="`hvd.init()` around it is allowed, and not needed.",
        holds="len(_.epochs) == 2",
    ),
    Row(
        "metric_average",
        'trainer.metric_average(accuracy, name="accuracy")',
        remark="Where `fit` starts the ranks, code around it runs once, and the value is returned as it is.",
        given="accuracy = 0.5\ntrainer = HorovodTrainer(model)",
        holds="_ == 0.5",
    ),
    Row(
        "hvd.Compression.fp16",
        "HorovodTrainer(model=model, compression=hvd.Compression.fp16)",
        remark="Other backends: `compression: {codec: fp16}`.",
        given="import horovod.torch as hvd",
        holds="_.config.horovod.compression == 'fp16'",
    ),
    Row(
        "RayTrainer, tune.run",
        'analysis = tune.run(train_fn, config={"hidden_size": tune.choice([8]), "lr": tune.choice([0.1])},\n'
        "num_samples=1)\nanalysis.best_config",
        'analysis = tune.run(train_fn, config={"hidden_size": tune.choice([8]), "lr": tune.choice([0.1])},\n'
        'num_samples=1, metric="accuracy", mode="max")\nanalysis.best_config',
        "Ray asks for `metric` and `mode` to name a best configuration. What in `config` is no field of ours"
        " is in `trainer.hyperparameters`.",
        "_ == {'hidden_size': 8, 'lr': 0.1}",
        given=_TUNE,
        error="metric",
    ),
    Row(
        "TensorFlowDistributedTrainer",
        "model.fit(train_dataset, epochs=50, validation_data=val_dataset)",
        "TensorFlowDistributedTrainer(keras_model).fit(train_dataset, val_dataset, epochs=2)",
        "The model may be built in the strategy's scope, as there. Keras's own `fit` trains in one process.",
        "len(_.epochs) == 2",
        given=_KERAS + "model = keras_model",
    ),
    Row(
        "DistributedConfig",
        'DistributedConfig(num_gpus=8, num_nodes=2, gpus_per_node=4, backend="pytorch-ddp", batch_size=32,\n'
        "epochs=100, learning_rate=0.001, mixed_precision=True, gradient_accumulation_steps=4,\n"
        'gradient_clipping=1.0, communication_backend="nccl", find_unused_parameters=False,\n'
        'checkpoint_frequency=10, checkpoint_dir="./checkpoints", mlflow_tracking=True, tensorboard=True,\n'
        "log_every_n_steps=100)",
        remark="`communication_backend=nccl` needs GPUs when the run starts.",
        holds="_.checkpoint_frequency == 10 and _.mixed_precision is True",
    ),
    Row(
        "scaler_init_scale",
        "PyTorchDDPTrainer(model=model, mixed_precision=True, scaler_init_scale=2**16,\n"
        "scaler_growth_interval=2000)",
        remark="On a CPU `true` is bf16, which needs no scale; `mixed_precision=fp16` scales there, too.",
        holds="_.config.scaler_growth_interval == 2000",
    ),
    Row(
        "gradient_accumulation_steps",
        "trainer = PyTorchDDPTrainer(model=model, batch_size=2, gradient_accumulation_steps=8)",
        remark="The global batch is `batch_size` x steps x ranks, as there, and is printed.",
        holds="PyTorchDDPTrainer(model, batch_size=2, gradient_accumulation_steps=8, num_processes=1)"
        ".fit((x, y)).batch['global_batch_size'] == 16",
    ),
    Row(
        "deepspeed.DeepSpeedConfig",
        'config = DeepSpeedConfig(zero_optimization={"stage": 3})\n'
        "trainer = PyTorchDDPTrainer(model=model, deepspeed_config=config)",
        'config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}\n'
        "trainer = PyTorchDDPTrainer(model=model, deepspeed_config=config)",
        "DeepSpeed's class takes no keywords. Pass the mapping; the run moves to the backend `deepspeed`, and"
        " its first line says so.",
        "trainer.config.deepspeed_config == config",
        given="from deepspeed import DeepSpeedConfig",
        error="unexpected keyword argument",
    ),
    Row(
        "zero_stage",
        "PyTorchDDPTrainer(model=model, num_gpus=4, zero_stage=3)",
        remark="The run moves to the backend `deepspeed`.",
        holds="_.config.zero_stage == 3",
    ),
    Row(
        "DistributedTuner",
        "tuner = DistributedTuner(train_fn=train_function, search_space=search_space, num_gpus=1,\n"
        "trials_per_gpu=1)\nbest_params = tuner.tune(num_samples=2)",
        remark="The objective is the first figure that `train_fn` returns, unless `metric` names one.",
        given="def train_function(sample): return {'loss': sample['lr']}\n"
        "search_space = {'lr': {'choice': [0.1, 0.2]}}",
        holds="best_params['lr'] in (0.1, 0.2)",
    ),
    Row(
        "tensorboard_dir",
        'trainer = PyTorchDDPTrainer(model=model, tensorboard_dir="./runs", log_every_n_steps=10)',
        remark="Loss, validation metrics, rate, gradient norm, throughput, and the GPU's utilisation if its"
        " driver reports it.",
        given="",
        holds="PyTorchDDPTrainer(model, num_processes=1, tensorboard_dir='./runs').fit((x, y))"
        " and any(Path('runs').rglob('events*'))",
    ),
    Row(
        "mlflow_tracking",
        "with mlflow.start_run(run_name='distributed-training'):\n"
        "    trainer = PyTorchDDPTrainer(model, mlflow_tracking=True)\n"
        "    trainer.fit(train_loader, val_loader)\n"
        "    mlflow.log_metric('speedup', 7.5)",
        remark="`throughput` is logged as well, and `speedup` with `tracking.baseline_throughput`.",
        given="import mlflow",
        holds="{'throughput', 'loss', 'speedup'} <= set(mlflow.last_active_run().data.metrics)",
    ),
    Row(
        "torch.profiler.profile",
        "with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:\n"
        "    trainer.fit(train_loader, val_loader, max_steps=2)\n"
        'prof.key_averages().table(sort_by="cpu_time_total")',
        remark="One rank trains in the process itself. Where `fit` starts ranks, each writes a trace and a"
        " table of its own to `profile.output_dir`.",
        given="from torch.profiler import ProfilerActivity, profile\n"
        "trainer = PyTorchDDPTrainer(model, num_processes=1)",
        holds="'aten::' in _",
    ),
    Row(
        "learning_rate",
        "PyTorchDDPTrainer(model=model, num_gpus=num_gpus, learning_rate=new_lr)",
        remark="Or `lr_scaling`: `sqrt` and `base_batch_size` compute the same rate from the batch.",
        given="num_gpus, base_lr = 8, 0.001\nnew_lr = base_lr * (32 * num_gpus / 32) ** 0.5",
        holds="_.config.learning_rate == new_lr",
    ),
    Row(
        "SequentialLR",
        "warmup = LinearLR(optimizer, start_factor=0.1, total_iters=warmup_epochs)\n"
        "main = CosineAnnealingLR(optimizer, T_max=total_epochs - warmup_epochs)\n"
        "scheduler = SequentialLR(optimizer, schedulers=[warmup, main], milestones=[warmup_epochs])",
        remark="`Trainer(model, optimizer=optimizer, scheduler=scheduler)` steps it once an epoch, on every"
        " backend.",
        given="from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR\n"
        "warmup_epochs, total_epochs = 2, 5",
        holds="len(PyTorchDDPTrainer(model, optimizer=optimizer, scheduler=scheduler, num_processes=1)"
        ".fit((x, y), epochs=2).epochs) == 2",
    ),
    Row(
        "resume_from_checkpoint",
        "trainer = PyTorchDDPTrainer(model=model, checkpoint_frequency=10, checkpoint_dir='./checkpoints',\n"
        "resume_from_checkpoint=True)",
        remark="Every checkpoint has model, optimizer, schedule, step, random numbers and place in the data,"
        " and is loaded by any backend and number of ranks. With an empty folder, training starts from the"
        " beginning.",
        holds="PyTorchDDPTrainer(model, checkpoint_dir='./checkpoints', resume_from_checkpoint=True,"
        " num_processes=1).fit((x, y)) and any(Path('checkpoints').glob('step_*'))",
    ),
    Row(
        "train --backend",
        f"{_CLI} --script train.py --num-gpus 4 --backend pytorch-ddp",
        remark="`--dry-run` prints the plan.",
        given=_SCRIPT,
    ),
    Row(
        "horovodrun",
        f"horovodrun -np 8 {_CLI} --script train.py --backend horovod",
        f"{_CLI} --script train.py --backend horovod --num-processes 8",
        "Both start eight ranks; the second without horovodrun and its ssh.",
        given=_SCRIPT,
    ),
    Row(
        "--address",
        f"{_CLI} --script train.py --num-nodes 4 --gpus-per-node 8 --backend ray\n"
        "--address ray://head-node:10001",
        f"{_CLI} --script train.py --num-processes 2 --backend ray",
        "The line there runs as it is where a cluster answers at the address. Without one, Ray starts on this"
        " host.",
        given=_SCRIPT,
    ),
    Row(
        "torch.distributed.launch",
        "python -m torch.distributed.launch --nproc_per_node=8 --master_port=29500 train.py",
        f"{_CLI} --script train.py --num-processes 8 --launch per-rank",
        "For a script with a loop of its own. torch's launcher and torchrun start ours as well; a script with"
        " a `Trainer` needs none of them.",
        given=_SCRIPT,
    ),
    Row(
        "srun",
        "srun python -m torch.distributed.launch --nnodes=4 train.py",
        "python -m distributed.cli deploy slurm --help",
        "`deploy slurm` writes the whole job, `deploy kubernetes` the manifest: [Slurm](slurm.md),"
        " [Kubernetes](kubernetes.md).",
    ),
]
