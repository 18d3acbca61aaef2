"""Scripts with a loop of their own, on ranks that no launcher of ours starts, train as one process does."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed import UserError, cleanup_distributed, setup_distributed
from distributed.testing.suite import EXACT
from tests.support.commands import start
from tests.support.ports import free_port

pytestmark = pytest.mark.starts_processes


def problem(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return x, x[:, :4].argmax(dim=1)


SCRIPT = """
import json, os, pathlib, sys
import psutil, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distributed import *

rank, size, out = int(sys.argv[1]), int(sys.argv[2]), {}
world = setup_distributed(rank, size, "gloo", device="cpu")
assert (world.rank, world.size, dist.get_rank(), dist.get_world_size()) == (rank, size, rank, size)
listening = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
out["listening"] = sorted(set(listening))

def new_model():
    torch.manual_seed(rank)  # the ranks start from rank 0's weights all the same
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    model.register_buffer("sketch", torch.full((2,), float(rank)))
    return model

x, y = (torch.load(os.environ["DATA"], weights_only=True)[name] for name in "xy")
mine = slice(rank * 4, rank * 4 + 4)
criterion = nn.CrossEntropyLoss()

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def weights(model):
    return [value for p in model.parameters() for value in p.flatten().tolist()]

model = new_model()
trainer = DistributedTrainer(model, sgd(model), size, rank, device="cpu")
for _ in range(3):
    trainer.train_step(x[mine], y[mine])
out["steps"] = weights(model)

model = new_model()
trainer = AdvancedDistributedTrainer(model, rank, size, device="cpu", gradient_clipping=None)
optimizer, loader = sgd(model), DataLoader(TensorDataset(x, y), batch_size=4)
out["losses"] = [trainer.train_epoch(loader, optimizer, criterion) for _ in range(2)]
out["epochs"] = weights(model)
model.sketch.fill_(rank)
trainer.synchronize_sketching_matrices()
out["sketch"] = model.sketch.tolist()
try:
    trainer.train_epoch(loader, sgd(model), criterion)
except UserError as error:
    out["other"] = str(error)

model = new_model()
plan = {"0": "colwise", "2": "rowwise"}
trainer = HybridParallelTrainer(model, {"tensor": size, "tensor_plan": plan}, device="cpu")
trainer.setup_process_groups()
out["groups"] = [trainer.tp_rank, dist.get_world_size(trainer.tp_group), trainer.dp_rank, trainer.dp_group]
optimizer = sgd(model)
for _ in range(3):
    trainer.train_step((x[:8], y[:8]), optimizer, criterion)
out["hybrid"] = [value for p in trainer.model.parameters() for value in
                 (p.full_tensor() if hasattr(p, "full_tensor") else p).flatten().tolist()]
cleanup_distributed()
assert not dist.is_initialized() and "RANK" not in os.environ
pathlib.Path(os.environ["OUT"], f"{rank}.json").write_text(json.dumps(out))
"""

HOROVOD = """
import json, os, pathlib, sys
import horovod.torch as hvd, torch
from torch import nn
from distributed import HorovodTrainer, setup_horovod

world = setup_horovod(device="cpu")
assert (hvd.rank(), hvd.size()) == (world.rank, world.size)
mean = float(hvd.allreduce(torch.tensor(float(hvd.rank())), name="rank"))
torch.manual_seed(world.rank)
model = nn.Linear(6, 4).double()
trainer = HorovodTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")
x, y = (torch.load(os.environ["DATA"], weights_only=True)[name] for name in "xy")
part = 8 // world.size
mine = slice(world.rank * part, world.rank * part + part)
for _ in range(3):
    trainer.train_step(x[mine], y[mine])
out = {"mean": mean, "weights": [v for p in model.parameters() for v in p.flatten().tolist()]}
pathlib.Path(os.environ["OUT"], f"{world.size}-{world.rank}.json").write_text(json.dumps(out))
"""


def run_ranks(script: str, folder: Path, size: int, env: Callable[[int], dict[str, str]]) -> None:
    """Run `script` on `size` ranks, which no launcher of ours starts."""
    x, y = problem(8)
    torch.save({"x": x, "y": y}, folder / "data.pt")
    base = {**os.environ, "DATA": str(folder / "data.pt"), "OUT": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        start(
            [sys.executable, "-c", script, str(rank), str(size)],
            env={**base, **env(rank)},
            stdout=-1,
            stderr=-2,
        )
        for rank in range(size)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(outputs)


def steps_of(model: nn.Module, steps: int) -> list[float]:
    """Weights after `steps` steps of SGD on all samples."""
    x, y = problem(8)
    momentum = 0.9 if isinstance(model, nn.Sequential) else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [float(value) for p in model.parameters() for value in p.detach().flatten()]


def test_a_script_that_knows_its_rank_trains_as_one_process_does(tmp_path: Path) -> None:
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    run_ranks(SCRIPT, tmp_path, 2, lambda rank: meet)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    expected = steps_of(copy.deepcopy(model), 3)
    epochs = steps_of(copy.deepcopy(model), 2)
    x, y = problem(8)
    first = float(nn.functional.cross_entropy(model(x), y).detach())
    for rank, out in enumerate(found):
        assert set(out["listening"]) <= {"127.0.0.1", "::1"}
        assert out["steps"] == pytest.approx(expected, abs=EXACT)
        assert out["hybrid"] == pytest.approx(expected, abs=EXACT)
        assert out["epochs"] == pytest.approx(epochs, abs=EXACT)
        assert out["losses"][0] == pytest.approx(first, abs=EXACT)
        assert out["losses"][1] < out["losses"][0]
        assert out["sketch"] == [0.0, 0.0]
        assert "optimizer: training continues with the object of the first call" in out["other"]
        assert out["groups"] == [rank, 2, 0, None]
    assert found[0]["listening"]


def test_setup_horovod_and_the_optimizer_by_position(tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch")
    for size in (2, 1):
        meet = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        run_ranks(HOROVOD, tmp_path, size, lambda rank, meet=meet: {**meet, "RANK": str(rank)})
        torch.manual_seed(0)
        expected = steps_of(nn.Linear(6, 4).double(), 3)
        for rank in range(size):
            out = json.loads((tmp_path / f"{size}-{rank}.json").read_text())
            assert out["mean"] == (size - 1) / 2
            assert out["weights"] == pytest.approx(expected, abs=EXACT)


def test_one_rank_has_a_group_and_a_missing_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # another run has it, which does as well
            other.bind(("", 29500))
            other.listen()
        world = setup_distributed(0, 1, device="cpu")
    assert (world.rank, world.size, dist.get_world_size()) == (0, 1, 1)
    assert setup_distributed().size == 1  # the same group
    cleanup_distributed()
    assert not dist.is_initialized()
    assert "RANK" not in os.environ
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(UserError, match="ranks 1 of 2 did not join within 1 s"):
        setup_distributed(0, 2, device="cpu", collective_timeout=1)
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & set(os.environ)
    with pytest.raises(UserError, match=r"communication_backend: nccl moves data between GPUs"):
        setup_distributed(0, 1, "nccl", device="cpu")
    with pytest.raises(UserError, match=r"RANK: the launcher's variables contradict.*Got 2\."):
        setup_distributed(2, 2, device="cpu")
