"""deepspeed: checkpoints of every stage to and from every other backend, and models that come back whole."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from distributed import Trainer, UserError
from distributed.checkpoint.reader import PortableReader
from distributed.communication.environment import detect
from distributed.interfaces.placement import LauncherEnvironment
from distributed.registry import catalog
from distributed.testing.conformance import distance
from distributed.testing.rank_pool import RankPool
from tests.backends.fsdp_model import HoldsWhatWasSaved, tiny, trainer_of, two_groups, words
from tests.support import commands
from tests.support.forking_python import PRELOAD
from tests.support.ports import free_port

EXACT = 1e-9
BEFORE, AFTER = 6, 10
OFFLOAD = {"offload_optimizer": "cpu"}
PLACES: dict[str, dict[str, Any]] = {
    "zero-0": {"zero_stage": 0},
    "zero-1": {"zero_stage": 1},
    "zero-2": {"zero_stage": 2},
    "zero-3": {"zero_stage": 3},
    "zero-1-offload": {"zero_stage": 1, "zero": OFFLOAD},
    "zero-2-offload": {"zero_stage": 2, "zero": OFFLOAD},
    "zero-3-offload": {"zero_stage": 3, "zero": {**OFFLOAD, "offload_parameters": "cpu"}},
    # The least that stage 3 gathers at once and steps at once, as large models have it.
    "zero-3-parts": {
        "zero_stage": 3,
        "deepspeed_config": {
            "zero_optimization": {
                "sub_group_size": 30,
                "stage3_param_persistence_threshold": 0,
                "stage3_prefetch_bucket_size": 0,
                "stage3_max_live_parameters": 0,
                "stage3_max_reuse_distance": 0,
                "reduce_bucket_size": 20,
            }
        },
    },
}


def trainer(place: tuple[str, int], pool: RankPool, model: nn.Module | None = None, **given: Any) -> Trainer:
    name, ranks = place
    if name in PLACES:
        return trainer_of("deepspeed", ranks, pool, model, **PLACES[name], **given)
    return trainer_of(name, ranks, pool, model, **given)


@pytest.fixture(scope="module")
def uninterrupted() -> nn.Module:
    """Sixteen steps of one process."""
    model = tiny()
    trainer(("serial", 1), RankPool(), model).fit(words(), max_steps=BEFORE + AFTER)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPool) -> Any:
    """(place, ranks) -> the checkpoint that they left after six steps."""
    paths: dict[tuple[str, int], str] = {}

    def path_of(place: str, ranks: int) -> str:
        if (place, ranks) not in paths:
            given = {
                "checkpoint_dir": str(tmp_path_factory.mktemp("saved")),
                "checkpoint": {"every_n_steps": BEFORE},
            }
            found = trainer((place, ranks), rank_pool, **given).fit(words(), max_steps=BEFORE).checkpoint
            assert found
            paths[place, ranks] = found
        return paths[place, ranks]

    return path_of


PAIRS = [
    (("serial", 1), ("zero-1", 2)),
    (("serial", 1), ("zero-3", 3)),
    (("pytorch-ddp", 3), ("zero-2", 2)),
    (("pytorch-ddp", 2), ("zero-3-offload", 2)),
    (("fsdp", 2), ("zero-3", 2)),
    (("fsdp", 3), ("zero-1-offload", 2)),
    (("zero-0", 2), ("zero-3", 1)),
    (("zero-1", 3), ("serial", 1)),
    (("zero-1", 2), ("zero-3-parts", 3)),
    (("zero-2", 2), ("fsdp", 3)),
    (("zero-2", 3), ("zero-2-offload", 2)),
    (("zero-3", 2), ("pytorch-ddp", 3)),
    (("zero-3", 3), ("zero-1", 1)),
    (("zero-3", 3), ("zero-3", 2)),
    (("zero-3-parts", 3), ("zero-0", 2)),
    (("zero-3-offload", 2), ("zero-2", 3)),
    (("zero-2-offload", 3), ("zero-3-offload", 3)),
    (("zero-1-offload", 2), ("serial", 1)),
]


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda place: f"{place[0]}-on-{place[1]}")
def test_any_stage_goes_on_from_any_backend(
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


def test_a_group_steps_together_or_not_at_all(tmp_path: Path, rank_pool: RankPool) -> None:
    """DeepSpeed has one count of steps for a group; a state with several is refused, not bent."""

    def one_stepped(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        first = optimizer.param_groups[0]["params"][0]
        zeros = {"exp_avg": torch.zeros_like(first), "exp_avg_sq": torch.zeros_like(first)}
        optimizer.state[first] = {"step": torch.tensor(5.0), **zeros}
        return optimizer

    saved = {"checkpoint_dir": str(tmp_path)}
    trainer_of("serial", 1, rank_pool, **saved, optimizer=one_stepped).fit(words(), max_steps=2)
    resumed = trainer_of(
        "deepspeed",
        2,
        rank_pool,
        **saved,
        optimizer=torch.optim.AdamW,
        resume_from_checkpoint=True,
        zero_stage=1,
    )
    with pytest.raises(UserError, match=r"steps the parameters of a group together, and .*'step' of"):
        resumed.fit(words(), max_steps=2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_float32_masters_of_16_bit_weights_are_saved(stage: int, tmp_path: Path, rank_pool: RankPool) -> None:
    given = {
        "deepspeed_config": {"bf16": {"enabled": True}},
        "zero_stage": stage,
        "checkpoint_dir": str(tmp_path),
    }
    model = tiny(torch.float32)
    path = trainer_of("deepspeed", 2, rank_pool, model, **given).fit(words(), max_steps=3).checkpoint
    assert path
    reader = PortableReader(path)
    stored = reader.read("model", "embed.weight").reshape(model.embed.weight.shape)
    assert torch.equal(stored, model.embed.weight)
    assert stored.dtype == torch.float32
    assert not torch.equal(stored, stored.bfloat16().float()), "more than 16 bits"
    resumed = trainer_of("deepspeed", 3, rank_pool, tiny(torch.float32), **given, resume_from_checkpoint=path)
    resumed.callbacks = [HoldsWhatWasSaved(path)]
    resumed.fit(words(), max_steps=1)


# -- the caller's own process ------------------------------------------------------------------


def marks(model: nn.Module) -> list[Any]:
    """What a backend may leave behind on modules and parameters."""
    modules = [
        (type(m), type(m._parameters), set(vars(m)),
         [(name, len(table)) for name, table in vars(m).items() if name.endswith("_hooks")])
        for m in model.modules()
    ]  # fmt: skip
    return [modules, [set(vars(p)) for p in model.parameters()]]


def fit_once(place: str) -> weakref.ref[nn.Module]:
    model = tiny()
    Trainer(model, backend="deepspeed", device="cpu", **PLACES[place]).fit(words(), max_steps=2)
    return weakref.ref(model)


@pytest.mark.parametrize("place", ["zero-0", "zero-1", "zero-3"])
def test_an_ended_run_holds_no_descriptors_and_no_model(place: str) -> None:
    """DeepSpeed's engine refers to itself, and ZeRO 3 remembers modules for the whole process."""
    fit_once(place)  # what a first run opens for good
    before, runs = psutil.Process().num_fds(), 5
    gc.disable()
    try:
        models = [fit_once(place) for _ in range(runs)]
        # A run that holds anything holds a descriptor or more; other threads may hold a few for a moment.
        assert psutil.Process().num_fds() - before < runs
    finally:
        gc.enable()
    gc.collect()
    assert [model() for model in models] == [None] * runs


def our_environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if "TORCH" not in name}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["zero-0", "zero-1", "zero-2", "zero-3", "zero-3-offload"])
def test_one_rank_leaves_the_callers_objects_as_they_were(place: str, uninterrupted: nn.Module) -> None:
    """Model, optimizer, scheduler, torch and the process group, between two fits and after them."""
    model, linear = tiny(), nn.functional.linear
    parameters, clean = list(model.parameters()), marks(model)
    optimizer = two_groups(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0)
    given: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler, **PLACES[place]}
    own = Trainer(
        model, backend="deepspeed", device="cpu", global_batch_size=12, gradient_clipping=0.5, **given
    )
    environment = our_environment()
    own.fit(words(), words(5), max_steps=BEFORE)
    assert marks(model) == clean
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.head.weight is model.embed.weight
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {
        id(p) for p in parameters if p.requires_grad
    }
    assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in parameters if p.requires_grad)
    assert nn.functional.linear is linear
    assert not dist.is_initialized()
    assert our_environment() == environment
    own.fit(words(), words(5), max_steps=AFTER)
    assert distance(model, uninterrupted) < EXACT


# -- ranks that others started -------------------------------------------------------------------

SCRIPT = """
import json, os, pathlib, sys
import torch
from distributed import DeepSpeedTrainer
from tests.backends.fsdp_model import TinyLM, Block, tiny, two_groups, words
from tests.backends.test_deepspeed_state import marks
model = tiny()
if os.environ["RANK"] == "1":
    for p in model.parameters():
        p.data.add_(1.0)  # a joined rank that seeds otherwise: rank 0's weights are everybody's
parameters, clean = list(model.parameters()), marks(model)
optimizer = two_groups(model)
trainer = DeepSpeedTrainer(model, global_batch_size=12, optimizer=optimizer, gradient_clipping=0.5,
                           zero_stage=int(sys.argv[-1]), device="cpu")
trainer.fit(words(), words(5), max_steps=6)
assert marks(model) == clean and all(a is b for a, b in zip(model.parameters(), parameters))
held = [p for group in optimizer.param_groups for p in group["params"]]
assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in held)
history = trainer.fit(words(), words(5), max_steps=10)
said = {"world": history.world_size, "weights": [p.tolist() for p in model.parameters()]}
# A file each: what ranks print to one pipe may run together.
pathlib.Path(f"rank_{os.environ['RANK']}.json").write_text(json.dumps(said))
"""


ENGINE = catalog.get_catalog().backends["deepspeed"].preload
"""What a rank imports."""


def together(folder: Path, *words: list[str], python: Path | None = None) -> None:
    """Run the commands side by side in `folder`, as a user starts them, or with `python` as their Python."""
    base = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    if python is not None:
        base |= {"PYTHON_EXEC": str(python), PRELOAD: " ".join(["deepspeed", *ENGINE])}
    base["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), base.get("PYTHONPATH", "")])
    running = [
        commands.start(
            command,
            env=base,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preload=["deepspeed.launcher.runner"],
            fresh=python is None,
        )
        for command in words
    ]
    commands.finish(running, timeout=360)


def check_weights(folder: Path, uninterrupted: nn.Module) -> None:
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))]
    assert [report["world"] for report in reports] == [2, 2]
    for report in reports:
        for found, expected in zip(report["weights"], uninterrupted.parameters(), strict=True):
            assert torch.allclose(torch.tensor(found, dtype=torch.float64), expected, rtol=0, atol=EXACT)


@pytest.mark.starts_processes
@pytest.mark.timeout(400)  # six processes import DeepSpeed, on a busy machine
def test_ranks_of_a_hostfile_are_joined_and_get_their_own_model_back(
    tmp_path: Path, uninterrupted: nn.Module
) -> None:
    """deepspeed on each of two nodes, by one hostfile; the script is given --local_rank."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    master = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    common = ["--hostfile", "hosts", "--no_ssh", *master]
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", *common]
    together(tmp_path, *([*launcher, "--node_rank", node, "train.py", "3"] for node in "01"))
    check_weights(tmp_path, uninterrupted)


def test_ranks_of_torchrun_are_joined(tmp_path: Path, uninterrupted: nn.Module, forking_python: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    together(tmp_path, [*torchrun, "--master-port", str(free_port()), "train.py", "1"], python=forking_python)
    check_weights(tmp_path, uninterrupted)


# DeepSpeed's command, which starts its own launcher and that the ranks by this Python.
RUNNER = """
import sys
from runpy import run_module
sys.executable = sys.argv.pop(1)
run_module("deepspeed.launcher.runner", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("flags", [[], ["--no_local_rank"]])
def test_the_command_line_under_deepspeed(flags: list[str], tmp_path: Path, forking_python: Path) -> None:
    """Its launcher puts --local_rank before our words, unless told not to."""
    launcher = [
        sys.executable,
        "-c",
        RUNNER,
        str(forking_python),
        "--num_gpus",
        "2",
        "--master_port",
        str(free_port()),
    ]
    words = [
        "train",
        "--backend",
        "deepspeed",
        "--zero-stage",
        "2",
        "--checkpoint-dir",
        "saved",
        "--epochs",
        "1",
    ]
    command = [*launcher, *flags, "--module", "distributed.cli", *words]
    together(tmp_path, command, python=forking_python)
    (manifest,) = tmp_path.glob("saved/step_*/manifest.json")
    assert len(list(manifest.parent.glob("rank_*.json"))) == 2


def test_the_place_that_deepspeed_gives() -> None:
    place = detect({
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "1",
        "CROSS_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
    })  # fmt: skip
    assert place == LauncherEnvironment("deepspeed", 3, 4, 1, 2, 1, 2, "10.0.0.1", 29500)
