"""Mistakes by name: each is one paragraph that says the field, the value, what is allowed, the remedy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from distributed import DistributedConfig, Trainer, UserError
from distributed.cli import main
from distributed.communication.environment import detect
from distributed.interfaces.backend_spec import BackendSpec, Capabilities
from distributed.interfaces.plan import Facts, Resources
from distributed.planner.resolve import resolve
from distributed.registry.catalog import build_catalog, get_catalog
from distributed.registry.hookspecs import hookimpl
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer


def points(length: int = 16) -> tuple[Tensor, Tensor]:
    x = torch.randn(length, 4, generator=torch.Generator().manual_seed(0))
    return x, (x.sum(dim=1) > 0).long()


def mistake(action: Callable[[], Any], field: str | None, *words: str) -> UserError:
    """The UserError of `action`: about `field`, one paragraph, holding each of `words`."""
    with pytest.raises(UserError) as caught:
        action()
    error, text = caught.value, str(caught.value)
    assert error.field == field
    assert "\n" not in text
    for word in words:
        assert word in text
    # What was wrong, and a way out of it.
    assert error.allowed or error.remedy or "Did you mean" in text or "use " in text
    return error


def train(model: Any = None, data: Any = None, val: Any = None, **given: Any) -> Any:
    options = {"device": "cpu", "batch_size": 4, **given}
    return Trainer(nn.Linear(4, 2) if model is None else model, **options).fit(
        points() if data is None else data, val
    )


# What the configuration says


def test_an_unknown_backend() -> None:
    error = mistake(
        lambda: train(backend="pytorch-dpp"), "backend", "called 'pytorch-dpp'", "Did you mean 'pytorch-ddp'?"
    )
    assert "serial" in str(error.allowed)


def test_an_unknown_field() -> None:
    mistake(lambda: train(batchsize=4), None, "field 'batchsize'", "Did you mean 'batch_size'?")
    mistake(
        lambda: DistributedConfig(learning_rat=1), None, "'learning_rat'", "Did you mean 'learning_rate'?"
    )


def test_a_value_out_of_range() -> None:
    mistake(lambda: train(learning_rate=-1.0), "learning_rate", "Got -1.0")


def test_an_impossible_batch() -> None:
    mistake(
        lambda: train(global_batch_size=10, num_processes=2),
        "global_batch_size",
        "Got 10",
        "nearest: 8 or 16",
    )
    mistake(lambda: train(global_batch_size=2, num_processes=2), "global_batch_size", "nearest: 8")
    mistake(
        lambda: train(global_batch_size=16, num_processes=2, gradient_accumulation_steps=4),
        "global_batch_size",
        "4 (batch_size) x 4 (gradient_accumulation_steps) x 2 (data_parallel_size) = 32",
        "Allowed: 32",
        "Leave one of the three out",
    )


def test_more_gpus_than_there_are() -> None:
    def plan(gpus: int, **fields: Any) -> Any:
        return resolve(DistributedConfig(**fields), get_catalog(), Facts(), Resources(gpus))

    mistake(
        lambda: plan(2, num_gpus=4, device="cuda"), "num_gpus", "Got 4", "at most 2 per host", "device=cpu"
    )
    mistake(lambda: plan(2, num_gpus=4), "num_gpus", "4 ranks on this host need 4 GPUs and 2 are visible")
    mistake(lambda: plan(0, device="cuda"), "num_gpus", "0 are visible")
    assert "no GPU found" in plan(0, num_gpus=4).notes[0]


def test_nccl_on_cpu() -> None:
    mistake(
        lambda: train(communication_backend="nccl"), "communication_backend", "Got 'nccl'", "auto, gloo, mpi"
    )


def test_fp16_on_a_backend_that_lacks_it() -> None:
    class Plain:
        @hookimpl
        def register_backends(self) -> list[BackendSpec]:
            return [BackendSpec("plain", "nowhere:Nothing", capabilities=Capabilities())]

    catalog = build_catalog(extra=[*_built_in(), Plain()], found=[])
    config = DistributedConfig(backend="plain", mixed_precision="fp16", device="cpu")
    mistake(
        lambda: resolve(config, catalog, Facts(), Resources()),
        "mixed_precision",
        "Got 'fp16'",
        "backend 'plain' cannot train in fp16",
        "Backends that can: pytorch-ddp, serial",
    )


def _built_in() -> list[Any]:
    from distributed_backends.ddp import hooks as ddp
    from distributed_backends.serial import hooks as serial

    return [serial, ddp]


def test_ranks_on_a_backend_of_one() -> None:
    mistake(
        lambda: train(backend="serial", num_processes=2),
        "num_processes",
        "'serial' cannot run 2 ranks",
        "pytorch-ddp",
    )


def test_nodes_that_cannot_find_each_other() -> None:
    mistake(
        lambda: train(num_gpus=2, num_nodes=2),
        "node_rank",
        "node_rank and rdzv_endpoint missing",
        "--node-rank",
    )
    for endpoint in ("nowhere", "host:port", "host:0", "host:70000"):
        mistake(
            lambda e=endpoint: train(num_gpus=2, num_nodes=2, node_rank=0, rdzv_endpoint=e),
            "rdzv_endpoint",
            f"Got '{endpoint}'",
            "HOST:PORT",
        )


def test_a_size_that_contradicts_the_launcher() -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    config = DistributedConfig(num_gpus=4)
    mistake(
        lambda: resolve(config, get_catalog(), Facts(), Resources(), detect(env)),
        "num_gpus",
        "Got 4",
        "torchrun started 2",
    )


def test_train_step_cannot_start_ranks() -> None:
    trainer = Trainer(nn.Linear(4, 2), num_gpus=4, device="cpu", batch_size=4)
    mistake(lambda: trainer.train_step(*points()), "num_gpus", "4 ranks", "torchrun --nproc_per_node=4")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_directory_that_cannot_be_written(
    ranks: int, tmp_path: Path, rank_pool: RankPool
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "run"
    trainer = make_trainer(nn.Linear(4, 2), ranks, rank_pool, folder=folder, batch_size=4)
    mistake(lambda: trainer.fit(points()), "checkpoint_dir", str(tmp_path / "file" / "run"), "Choose another")


# Data


def test_empty_data() -> None:
    empty = TensorDataset(torch.zeros(0, 4), torch.zeros(0))
    mistake(lambda: train(data=empty), "train_loader", "TensorDataset of length 0", "at least one sample")
    mistake(lambda: train(data=DataLoader(empty, batch_size=4)), "train_loader", "length 0")
    mistake(
        lambda: train(val=DataLoader(empty)), "val_loader", "nothing to validate on", "leave val_loader out"
    )
    mistake(lambda: train(data=(torch.zeros(0, 4), torch.zeros(0))), "train_loader", "length 0")


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def test_a_stream_without_samples() -> None:
    mistake(lambda: train(data=Nothing()), "train_loader", "yielded no sample")
    mistake(lambda: train(val=Nothing()), "val_loader", "yielded no sample")


def test_a_last_batch_that_is_all_and_dropped() -> None:
    mistake(
        lambda: train(
            data=DataLoader(TensorDataset(*points(3)), batch_size=4, drop_last=True), batch_size=None
        ),
        "train_loader",
        "drop_last drops the only global batch",
    )


def test_tensors_of_unequal_length() -> None:
    mistake(
        lambda: train(data=(points(16)[0], points(15)[1])),
        "train_loader",
        "Got [16, 15]",
        "same first dimension",
    )


def test_what_is_no_data() -> None:
    mistake(lambda: train(data=(batch for batch in [])), "train_loader", "Got 'generator'", "IterableDataset")
    mistake(
        lambda: train(data=DataLoader(TensorDataset(*points()), batch_size=None)),
        "train_loader",
        "batch_size=None",
    )


def test_a_loader_whose_batch_size_contradicts_the_config() -> None:
    mistake(
        lambda: train(data=DataLoader(TensorDataset(*points()), batch_size=8)),
        "batch_size",
        "Got 4",
        "Allowed: 8, the loader's own",
        "leave batch_size out",
    )


class Whole(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(4)


def test_a_batch_without_target() -> None:
    mistake(lambda: train(data=Whole()), "train_loader", "cannot separate inputs and target", "training_step")


# Model, optimizer, loss


def test_a_model_that_cannot_learn() -> None:
    mistake(lambda: train(nn.Tanh()), "model", "no trainable parameters", "Got 'Tanh without parameters'")
    mistake(lambda: train(nn.Linear(4, 2).requires_grad_(False)), "model", "with 2 parameters, all frozen")
    mistake(lambda: train("resnet"), "model", "Got 'str'", "a function without arguments that builds one")


def test_an_optimizer_over_other_parameters() -> None:
    other = torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=0.1)
    mistake(lambda: train(optimizer=other), "optimizer", "2 of its 2 are not the model's", "Got 'SGD'")
    mistake(
        lambda: train(lambda: nn.Linear(4, 2), optimizer=other),
        "optimizer",
        "yet to be built",
        "Give its class",
    )
    mistake(lambda: train(optimizer=lambda model: model), "optimizer", "Got 'Linear'")


def test_an_optimizers_own_rate_and_another() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mistake(
        lambda: train(model, optimizer=optimizer, learning_rate=0.5),
        "learning_rate",
        "Got 0.5",
        "optimizer=torch",
    )


def test_a_scheduler_of_another_optimizer(rank_pool: RankPool) -> None:
    model = nn.Linear(4, 2)
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1)
    for ranks in (1, 2):
        fields = {"optimizer": optimizer, "scheduler": scheduler, "batch_size": 4}
        trainer = make_trainer(model, ranks, rank_pool, **fields)
        mistake(
            lambda t=trainer: t.fit(points()),
            "scheduler",
            "another optimizer",
            "Got 'StepLR'",
            "scheduler=lambda",
        )


def test_a_loss_that_is_no_mean() -> None:
    summed = nn.CrossEntropyLoss(reduction="sum")
    mistake(lambda: train(loss_fn=summed), "loss_fn", "Got \"reduction='sum'\"", "reduction='mean'")
    mistake(lambda: train(loss_fn=nn.MSELoss(reduction="none")), "loss_fn", "reduction='none'")
    mistake(lambda: train(loss_fn=lambda output, target: output.sum(dim=1)), "loss_fn", "Got (4,)", ".mean()")
    mistake(lambda: train(loss_fn=lambda output, target: 1.0), "loss_fn", "Got 'float'", "0-dimensional")
    mistake(lambda: train(training_step=lambda model, batch: model(batch[0])), "training_step", "Got (4, 2)")


def test_what_cannot_travel_to_the_ranks(tmp_path: Path) -> None:
    lock = threading.Lock()
    with open(tmp_path / "log", "w") as file:
        for held in (lock, file):

            def loss(output: Tensor, target: Tensor, held: Any = held) -> Tensor:
                return nn.functional.cross_entropy(output, target)

            mistake(
                lambda loss=loss: train(num_processes=2, loss_fn=loss),
                "model, loaders, loss_fn, callbacks",
                "cannot pickle the Trainer's arguments",
                "torchrun",
            )


# The same on the command line: exit code 2 and one paragraph


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backend", "pytorch-dpp"], "error: backend: "),
        (["--script", "/nowhere/train.py"], "error: --script: no such directory /nowhere"),
        (["--script", "{here}/trian.py"], "Did you mean 'train.py'?"),
        (
            ["--script", "{here}/train.py", "--global-batch-size", "10", "--num-processes", "2"],
            "nearest: 8 or 16",
        ),
        (
            ["--script", "{here}/train.py", "--checkpoint-dir", "{here}/train.py/run"],
            "error: checkpoint_dir: ",
        ),
    ],
)
def test_exit_code_2(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nfrom distributed import Trainer\n"
        "Trainer(torch.nn.Linear(4, 2), batch_size=4, device='cpu')"
        ".fit((torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)))\n"
    )
    assert main(["train", *(word.format(here=tmp_path) for word in words)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
