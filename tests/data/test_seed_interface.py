"""The interface this project was asked for, as its users write it, under pytorch-ddp on CPU ranks.

Figures are smaller than in those examples (ranks, epochs, samples); names and shapes are theirs.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from distributed import DistributedConfig, PyTorchDDPTrainer, UserError
from distributed.testing.rank_pool import RankPool
from tests.support import commands
from tests.support.ports import free_port

pytestmark = pytest.mark.starts_processes

NUM_TRAIN, NUM_VAL = 48, 20


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def dataset(length: int) -> TensorDataset:
    x = torch.randn(length, 16, generator=torch.Generator().manual_seed(length))
    return TensorDataset(x, x[:, :3].argmax(dim=1))


def loader(length: int, batch_size: int = 8, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset(length), batch_size=batch_size, **options)


@pytest.fixture(scope="module", autouse=True)
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One folder for all tests here: ranks of a pool stay where they were started."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("seed")
        patch.chdir(folder)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield folder


@pytest.fixture(scope="module")
def pool(workplace: Path) -> Iterator[RankPool]:
    ranks = RankPool(timeout=120.0)
    yield ranks
    ranks.close()


@pytest.fixture(autouse=True)
def _tidy(workplace: Path) -> Iterator[None]:
    torch.manual_seed(0)
    yield
    for path in workplace.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


# Quick start


def test_quick_start_trains_on_four_ranks_by_itself(capfd: pytest.CaptureFixture[str]) -> None:
    train_loader, val_loader = loader(NUM_TRAIN, 4, shuffle=True), loader(NUM_VAL, 4)
    model = MyModel()
    before = model.layers[0].weight.detach().clone()
    trainer = PyTorchDDPTrainer(model=model, num_gpus=4, batch_size=4, epochs=100)
    history = trainer.fit(train_loader, val_loader, epochs=2)
    assert (history.world_size, len(history.epochs)) == (4, 2)
    assert history.num_samples == 2 * NUM_TRAIN
    assert not torch.equal(model.layers[0].weight, before)
    said = capfd.readouterr().out
    assert "pytorch-ddp: 4 ranks on CPU over gloo" in said
    assert "no GPU found" in said


def test_the_trainers_section(pool: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = PyTorchDDPTrainer(
        model=MyModel(), num_gpus=2, batch_size=8, epochs=2, learning_rate=0.001, mixed_precision=True
    )
    trainer.launcher = pool
    history = trainer.fit(
        loader(NUM_TRAIN),
        loader(NUM_VAL),
        checkpoint_dir="./checkpoints",
        mlflow_experiment="distributed-training",
    )
    print(f"Training time: {history.total_time:.2f}s")
    print(f"Final accuracy: {history.best_accuracy:.4f}")
    assert "bf16" in capsys.readouterr().out
    assert history.best_accuracy == trainer.best_accuracy
    saved = sorted(path.name for path in Path("checkpoints").glob("step_*"))
    assert saved == [
        "step_00000003",
        "step_00000006",
    ]
    import mlflow

    client = mlflow.MlflowClient(
        f"sqlite:///{Path('mlflow.db').absolute()}"
    )  # the relative one may be cached
    experiment = client.get_experiment_by_name("distributed-training")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.metrics["val_accuracy"] == pytest.approx(history.epochs[-1]["val_accuracy"])
    assert run.data.params["learning_rate"] == "0.001"


# Configuration


def seed_config(**changes: Any) -> DistributedConfig:
    fields: dict[str, Any] = {
        "num_gpus": 8,
        "num_nodes": 2,
        "gpus_per_node": 4,
        "backend": "pytorch-ddp",
        "batch_size": 32,
        "epochs": 100,
        "learning_rate": 0.001,
        "mixed_precision": True,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "communication_backend": "nccl",
        "find_unused_parameters": False,
        "checkpoint_frequency": 10,
        "checkpoint_dir": "./checkpoints",
        "mlflow_tracking": True,
        "tensorboard": True,
        "log_every_n_steps": 100,
    }
    return DistributedConfig(**{**fields, **changes})


def test_nccl_without_a_gpu_is_one_clear_paragraph_before_anything_starts() -> None:
    with pytest.raises(UserError, match="nccl moves data between GPUs") as caught:
        PyTorchDDPTrainer(MyModel(), seed_config()).fit(loader(NUM_TRAIN, 32))
    assert caught.value.field == "communication_backend"
    assert "gloo" in str(caught.value.allowed)
    assert not list(Path().iterdir())


def test_the_configuration_block_trains_once_it_fits_the_machine(pool: RankPool) -> None:
    config = seed_config(
        num_gpus=2, num_nodes=1, gpus_per_node=2, communication_backend="gloo", batch_size=2, epochs=1
    )
    trainer = PyTorchDDPTrainer(MyModel(), config)
    trainer.launcher = pool
    history = trainer.fit(loader(NUM_TRAIN, 2))
    assert history.batch["global_batch_size"] == 2 * 4 * 2
    assert len(history.steps["loss"]) == 3
    assert Path("runs").is_dir()
    assert Path("mlflow.db").is_file()
    assert Path("checkpoints").is_dir()


# Precision, accumulation


@pytest.mark.parametrize("precision", [True, "fp16"])
def test_mixed_precision_with_a_scaler(precision: bool | str, pool: RankPool) -> None:
    trainer = PyTorchDDPTrainer(
        model=MyModel(),
        mixed_precision=precision,
        scaler_init_scale=2**16,
        scaler_growth_interval=2000,
        learning_rate=0.01,
        num_gpus=2,
    )
    trainer.launcher = pool
    history = trainer.fit(loader(NUM_TRAIN), epochs=6)
    assert history.epochs[-1]["train_loss"] < history.epochs[0]["train_loss"]


def test_gradient_accumulation_makes_the_effective_batch(pool: RankPool) -> None:
    trainer = PyTorchDDPTrainer(model=MyModel(), batch_size=2, gradient_accumulation_steps=8, num_gpus=2)
    trainer.launcher = pool
    history = trainer.fit(loader(64, 2))
    assert history.batch["global_batch_size"] == 2 * 8 * 2
    assert len(history.steps["loss"]) == 2


# Monitoring


def test_tensorboard_gets_what_is_promised(pool: RankPool) -> None:
    trainer = PyTorchDDPTrainer(model=MyModel(), tensorboard_dir="./runs", log_every_n_steps=2, num_gpus=2)
    trainer.launcher = pool
    trainer.fit(loader(NUM_TRAIN), loader(NUM_VAL))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = Path("runs").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    promised = {"train/loss", "val/accuracy", "val/loss", "train/learning_rate", "train/grad_norm"}
    assert promised <= set(events.Tags()["scalars"])


def test_an_active_mlflow_run_is_joined_and_left_to_its_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri("sqlite:///store.db")
    try:
        with mlflow.start_run(run_name="distributed-training") as run:
            tracking = {"baseline_throughput": 50.0}
            trainer = PyTorchDDPTrainer(
                MyModel(), mlflow_tracking=True, log_every_n_steps=1, tracking=tracking
            )
            trainer.fit(loader(NUM_TRAIN), loader(NUM_VAL))
            logged = mlflow.get_run(run.info.run_id).data.metrics
            mlflow.log_param("num_gpus", 8)
            mlflow.log_metric("throughput", 400.0)
            mlflow.log_metric("speedup", 7.5)
        found = mlflow.get_run(run.info.run_id)
        client = mlflow.MlflowClient()
        written = {
            name: {record.value for record in client.get_metric_history(run.info.run_id, name)}
            for name in ("throughput", "speedup")
        }
    finally:
        mlflow.set_tracking_uri(before)
    assert found.info.status == "FINISHED"
    assert logged["throughput"] == logged["samples_per_second"]
    assert logged["speedup"] == pytest.approx(logged["throughput"] / 50.0)
    assert {"loss", "val_accuracy"} <= set(found.data.metrics)
    assert written["throughput"] >= {400.0, logged["throughput"]}
    assert written["speedup"] >= {7.5, logged["speedup"]}
    assert (found.data.params["num_gpus"], found.data.params["learning_rate"]) == ("8", "0.001")


def test_torch_profiler_around_fit_sees_the_training() -> None:
    from torch.profiler import ProfilerActivity, profile

    trainer = PyTorchDDPTrainer(MyModel(), num_processes=1)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as prof:
        history = trainer.fit(loader(NUM_TRAIN), loader(NUM_VAL), max_steps=4)
    assert len(history.steps["loss"]) == 4
    assert "aten::addmm" in prof.key_averages().table(sort_by="cuda_time_total")


def test_torch_profiler_around_fit_profiles_every_rank(
    pool: RankPool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    from torch.profiler import profile

    folder = tmp_path / "profile"
    trainer = PyTorchDDPTrainer(
        MyModel(), num_processes=2, profile={"output_dir": str(folder), "skip_steps": 0}
    )
    trainer.launcher = pool
    with profile():
        trainer.fit(loader(NUM_TRAIN), max_steps=6)
    assert f"a trace and a table of a few steps to {folder}" in caplog.text
    for rank in range(2):
        assert "aten::addmm" in (folder / f"table_rank{rank}.txt").read_text()
        assert (folder / f"trace_rank{rank}.json").stat().st_size > 0
    assert not trainer.config.profile.enabled


# Practices


def test_a_warm_up_built_by_hand_steps_once_an_epoch(pool: RankPool) -> None:
    from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

    warmup_epochs, total_epochs = 2, 5

    def rates_of(model: nn.Module) -> tuple[torch.optim.Optimizer, SequentialLR]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        warmup = LinearLR(optimizer, start_factor=0.1, total_iters=warmup_epochs)
        main = CosineAnnealingLR(optimizer, T_max=total_epochs - warmup_epochs)
        return optimizer, SequentialLR(optimizer, schedulers=[warmup, main], milestones=[warmup_epochs])

    model = MyModel()
    optimizer, scheduler = rates_of(model)
    trainer = PyTorchDDPTrainer(model=model, optimizer=optimizer, scheduler=scheduler, num_gpus=2)
    trainer.launcher = pool
    history = trainer.fit(loader(NUM_TRAIN), epochs=total_epochs)

    oracle, follows = rates_of(MyModel())
    expected = []
    for _ in range(total_epochs):
        expected += 3 * [oracle.param_groups[0]["lr"]]
        oracle.step()
        follows.step()
    assert history.steps["learning_rate"] == pytest.approx(expected)


def test_checkpointing_for_fault_tolerance_resumes(pool: RankPool) -> None:
    def train(epochs: int) -> Any:
        trainer = PyTorchDDPTrainer(
            model=MyModel(),
            checkpoint_frequency=2,
            checkpoint_dir="./checkpoints",
            resume_from_checkpoint=True,
            num_gpus=2,
        )
        trainer.launcher = pool
        return trainer.fit(loader(NUM_TRAIN), epochs=epochs)

    assert train(2).steps["step"] == [1, 2, 3, 4, 5, 6]
    assert train(3).steps["step"] == [7, 8, 9]


def test_a_distributed_sampler_in_the_loader_is_unwrapped(pool: RankPool) -> None:
    data = dataset(NUM_TRAIN)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=4, rank=1)
    train_loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=1, pin_memory=False)
    trainer = PyTorchDDPTrainer(MyModel(), num_gpus=2)
    trainer.launcher = pool
    assert trainer.fit(train_loader).num_samples == NUM_TRAIN


# Launching


SCRIPT = """
import argparse
import torch
from torch import nn
from distributed import PyTorchDDPTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--num-epochs", type=int, default=1)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.001)
parser.add_argument("--local-rank", type=int, default=0)
args = parser.parse_args()

x = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
train = (x, x[:, :3].argmax(dim=1))
model = nn.Linear(16, 3)
trainer = PyTorchDDPTrainer(model, epochs=args.num_epochs, batch_size=args.batch_size, learning_rate=args.lr)
history = trainer.fit(train, train)
print(f"{history.world_size} ranks, {len(history.epochs)} epochs")
"""


@pytest.mark.parametrize(
    ("launch", "times"),
    [
        (["-m", "distributed.cli", "train", "--script", "train.py", "--num-gpus", "2",
          "--backend", "pytorch-ddp", "--", "--num-epochs", "2"], 1),
        (["-m", "torch.distributed.launch", "--nproc_per_node=2", "--master_port=PORT", "train.py",
          "--num-epochs", "2", "--batch-size", "4", "--lr", "0.001"], 2),
    ],
    ids=["cli", "torch.distributed.launch"],
)  # fmt: skip
def test_a_script_starts_both_ways(launch: list[str], times: int, forking_python: Path) -> None:
    Path("train.py").write_text(SCRIPT)
    words = [word.replace("PORT", str(free_port())) for word in launch]
    environment = {**os.environ, "PYTHON_EXEC": str(forking_python)}
    done = commands.run([sys.executable, *words], capture_output=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks, 2 epochs") == times
