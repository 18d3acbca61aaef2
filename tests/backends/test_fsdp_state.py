"""fsdp: checkpoints to and from every other backend, and models that come back whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed import Trainer, UserError
from distributed.testing.conformance import distance
from distributed.testing.rank_pool import RankPool
from tests.backends.fsdp_model import HoldsWhatWasSaved, tiny, trainer_of, words
from tests.support import commands
from tests.support.ports import free_port

EXACT = 1e-9
HYBRID = "hybrid"
BEFORE, AFTER = 6, 10


def trainer(place: tuple[str, int], pool: RankPool, model: nn.Module | None = None, **given: Any) -> Trainer:
    backend, ranks = place
    if backend == HYBRID:
        backend, given = "fsdp", {**given, "fsdp": {"replicate": 2}}
    return trainer_of(backend, ranks, pool, model, **given)


@pytest.fixture(scope="module")
def uninterrupted() -> nn.Module:
    """Sixteen steps of one process."""
    model = tiny()
    trainer(("serial", 1), RankPool(), model).fit(words(), max_steps=BEFORE + AFTER)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPool) -> Any:
    """(backend, ranks) -> the checkpoint that they left after six steps."""
    paths: dict[tuple[str, int], str] = {}

    def path_of(backend: str, ranks: int) -> str:
        if (backend, ranks) not in paths:
            given = {
                "checkpoint_dir": str(tmp_path_factory.mktemp("saved")),
                "checkpoint": {"every_n_steps": BEFORE},
            }
            found = trainer((backend, ranks), rank_pool, **given).fit(words(), max_steps=BEFORE).checkpoint
            assert found
            paths[backend, ranks] = found
        return paths[backend, ranks]

    return path_of


PLACES = [("serial", 1), ("pytorch-ddp", 2), ("pytorch-ddp", 3), ("fsdp", 2), ("fsdp", 3)]
PAIRS = [(a, b) for a in PLACES for b in PLACES if "fsdp" in (a[0], b[0])]
PAIRS += [(("fsdp", 1), ("fsdp", 3)), (("fsdp", 3), ("fsdp", 1))]
PAIRS += [((HYBRID, 4), ("pytorch-ddp", 3)), (("fsdp", 3), (HYBRID, 4))]


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda place: f"{place[0]}-{place[1]}")
def test_any_backend_goes_on_from_any_other(
    first: tuple[str, int], second: tuple[str, int], saved: Any, uninterrupted: nn.Module, rank_pool: RankPool
) -> None:
    """The same bits by name after loading; ten steps later the weights of a run never interrupted."""
    path = saved(*first)
    model = tiny()
    resumed = trainer(second, rank_pool, model, resume_from_checkpoint=path)
    resumed.callbacks = [HoldsWhatWasSaved(path)]
    history = resumed.fit(words(), max_steps=BEFORE + AFTER)
    assert history.steps["step"] == list(range(BEFORE + 1, BEFORE + AFTER + 1))
    assert distance(model, uninterrupted) < EXACT


class RowMeans(torch.optim.Optimizer):
    """Steps by the mean of each row: state of another shape than the parameter's."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["row"] = p.grad.mean(-1, keepdim=True) if p.dim() else p.grad.clone()
            p.data.sub_(p.grad * self.param_groups[0]["lr"])


def test_state_that_is_not_of_each_element_is_refused(tmp_path: Path, rank_pool: RankPool) -> None:
    given: dict[str, Any] = {
        "optimizer": RowMeans,
        "checkpoint_dir": str(tmp_path),
        "gradient_clipping": None,
    }
    trainer_of("serial", 1, rank_pool, **given).fit(words(), max_steps=2)
    with pytest.raises(UserError, match=r"optimizer\.row.* is not elementwise state"):
        trainer_of("fsdp", 2, rank_pool, **given, resume_from_checkpoint=True).fit(words(), max_steps=2)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([p for p in model.parameters() if p.requires_grad], lr=0.01)


def test_an_optimizer_that_cannot_step_shards_is_refused(rank_pool: RankPool) -> None:
    """On one rank nothing is cut."""
    trainer_of("fsdp", 1, rank_pool, optimizer=adafactor).fit(words(), max_steps=1)
    with pytest.raises(UserError, match=r"Adafactor needs unsharded parameters.*Got 'Adafactor'"):
        trainer_of("fsdp", 2, rank_pool, optimizer=adafactor).fit(words(), max_steps=1)


# -- ranks that others started, and several nodes ---------------------------------------------

SCRIPT = """
import json, os, sys
import torch
from torch import nn
from distributed import FSDPTrainer
from tests.backends.fsdp_model import Block, TinyLM, tiny, two_groups, words
options = json.loads(os.environ["OPTIONS"])
model = tiny()
if os.environ.get("RANK") == "1":
    for p in model.parameters():
        p.data.add_(1.0)  # a joined rank that seeds otherwise: rank 0's weights are everybody's
parameters, names = list(model.parameters()), [n for n, _ in model.named_parameters()]
hooks = lambda: [len(table) for m in model.modules() for n, table in vars(m).items() if n.endswith("_hooks")]
clean, attributes = hooks(), [set(vars(m)) for m in model.modules()]
optimizer = two_groups(model)
trainer = FSDPTrainer(model, global_batch_size=12, optimizer=optimizer, gradient_clipping=0.5,
                      device="cpu", **options)
trainer.fit(words(), words(5), max_steps=6)
assert [type(m) for m in model.modules()] == [type(m) for m in tiny().modules()]
assert [n for n, _ in model.named_parameters()] == names
assert all(a is b for a, b in zip(model.parameters(), parameters)), "the caller's own parameters"
assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in model.parameters())
assert model.head.weight is model.embed.weight
assert hooks() == clean and [set(vars(m)) for m in model.modules()] == attributes
if "RANK" in os.environ:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in parameters if p.requires_grad}
    assert all(type(v) is torch.Tensor for s in optimizer.state.values() for v in s.values())
    assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in held)
print(model(words(2)[0]).sum().item(), file=sys.stderr)
trainer.fit(words(), words(5), max_steps=10)
# A file each: what ranks print to one pipe may run together.
with open(f"weights_{os.getpid()}.json", "w") as file:
    json.dump([p.tolist() for p in model.parameters()], file)
"""


def together(folder: Path, words: list[list[str]], options: list[dict[str, Any]], **env: str) -> None:
    """Run the commands side by side in `folder`."""
    base = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env}
    base["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), base.get("PYTHONPATH", "")])
    running = [
        commands.start(
            command,
            env={**base, "OPTIONS": json.dumps(option)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for command, option in zip(words, options, strict=True)
    ]
    commands.finish(running, timeout=120)


def check_weights(folder: Path, uninterrupted: nn.Module) -> None:
    reports = list(folder.glob("weights_*.json"))
    assert len(reports) == 2
    for report in reports:
        for found, expected in zip(json.loads(report.read_text()), uninterrupted.parameters(), strict=True):
            assert torch.allclose(torch.tensor(found, dtype=torch.float64), expected, rtol=0, atol=EXACT)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_joined_ranks_get_their_own_model_back_whole(
    script: str, tmp_path: Path, uninterrupted: nn.Module, forking_python: Path
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command = [*torchrun, "--master-port", str(free_port()), script]
    together(tmp_path, [command], [{}], PYTHON_EXEC=str(forking_python))
    check_weights(tmp_path, uninterrupted)


@pytest.mark.starts_processes
def test_every_node_gets_the_whole_model(script: str, tmp_path: Path, uninterrupted: nn.Module) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    nodes = [{"num_gpus": 2, "num_nodes": 2, "node_rank": node, "rdzv_endpoint": endpoint} for node in (0, 1)]
    together(tmp_path, [[sys.executable, script]] * 2, nodes)
    check_weights(tmp_path, uninterrupted)
