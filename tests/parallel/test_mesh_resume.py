"""Checkpoints of one mesh continue on every other, and on the backends without axes."""

from __future__ import annotations

import importlib.util
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed import Callback, Trainer
from distributed.checkpoint.reader import PortableReader
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.parallel.expert_models import EXPERT_ENTRIES
from tests.parallel.models import ENTRIES, tokens, train_plainly
from tests.parallel.test_tensor_parallel import difference
from tests.support.training import make_trainer

pytest.importorskip("transformers")

DATA = tokens(21)
OPTIONS: dict[str, Any] = {"global_batch_size": 8, "max_norm": 0.5}
PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "serial": (1, {"backend": "serial"}),
    "ddp 2": (2, {"backend": "pytorch-ddp"}),
    "zero 1": (2, {"backend": "deepspeed", "zero_stage": 1}),
    "zero 3": (2, {"backend": "deepspeed", "zero_stage": 3}),
    "horovod 2": (2, {"backend": "horovod"}),
    "tensor 2": (2, {"backend": "pytorch-ddp", "parallel": {"tensor": 2}}),
    "tensor 4": (4, {"backend": "pytorch-ddp", "parallel": {"tensor": 4}}),
    "data 2 x tensor 2": (4, {"backend": "pytorch-ddp", "parallel": {"tensor": 2}}),
    "shard 2 x tensor 2": (4, {"backend": "fsdp", "parallel": {"tensor": 2}}),
    "expert 2": (2, {"backend": "pytorch-ddp", "parallel": {"expert": 2}}),
    "data 4, expert 2": (4, {"backend": "pytorch-ddp", "parallel": {"expert": 2}}),
    "shard 4, expert 2": (4, {"backend": "fsdp", "parallel": {"expert": 2}}),
}


def trainer_at(place: str, model: Any, pool: RankPool | None, folder: Path, **given: Any) -> Trainer:
    ranks, fields = PLACES[place]
    for module in ("deepspeed", "horovod"):
        if fields["backend"] == module and importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    common = {
        "global_batch_size": 8,
        "optimizer": partial(torch.optim.AdamW, eps=1e-4),
        "learning_rate": 0.01,
        "gradient_clipping": 0.5,
        "checkpoint_dir": str(folder),
        "resume_from_checkpoint": True,
    }
    return make_trainer(model, ranks, pool, **{**common, **fields, **given})


@pytest.mark.parametrize(
    "path",
    [
        ("tensor 2", "serial", "tensor 4"),
        ("serial", "shard 2 x tensor 2", "ddp 2"),
        ("shard 2 x tensor 2", "zero 3", "data 2 x tensor 2"),
        ("data 2 x tensor 2", "horovod 2", "shard 2 x tensor 2"),
        ("zero 1", "tensor 2", "shard 2 x tensor 2"),
    ],
    ids=" -> ".join,
)
def test_a_run_goes_on_from_mesh_to_mesh(path: tuple[str, ...], rank_pool: RankPool, tmp_path: Path) -> None:
    """AdamW on a model with tied and fused weights, stopped within an epoch each time."""
    build = ENTRIES["dilated"].build
    for number, place in enumerate(path):
        model = build()
        trainer_at(place, model, rank_pool, tmp_path).fit(DATA, max_steps=4 * (number + 1))
    expected = train_plainly(build(), DATA, steps=4 * len(path), **OPTIONS)
    assert difference(model, expected.weights) < EXACT


@pytest.mark.parametrize(
    "path",
    [
        ("expert 2", "serial", "data 4, expert 2"),
        ("ddp 2", "shard 4, expert 2", "tensor 2"),
        ("data 4, expert 2", "ddp 2", "expert 2"),
    ],
    ids=" -> ".join,
)
def test_a_run_with_experts_continues_from_mesh_to_mesh(
    path: tuple[str, ...], rank_pool: RankPool, tmp_path: Path
) -> None:
    build = EXPERT_ENTRIES["moe"].build
    for number, place in enumerate(path):
        model = build()
        trainer_at(place, model, rank_pool, tmp_path).fit(DATA, max_steps=4 * (number + 1))
    expected = train_plainly(build(), DATA, steps=4 * len(path), **OPTIONS)
    assert difference(model, expected.weights) < EXACT


def test_experts_are_saved_once_and_resume_with_the_same_bits(rank_pool: RankPool, tmp_path: Path) -> None:
    build = EXPERT_ENTRIES["moe"].build
    whole, parts = build(), build()
    trainer_at("data 4, expert 2", whole, rank_pool, tmp_path / "whole").fit(DATA, max_steps=6)
    trainer_at("data 4, expert 2", build(), rank_pool, tmp_path / "parts").fit(DATA, max_steps=3)
    trainer_at("data 4, expert 2", parts, rank_pool, tmp_path / "parts").fit(DATA, max_steps=6)
    assert difference(parts, dict(whole.named_parameters())) == 0.0
    reader = PortableReader(str(max((tmp_path / "whole").glob("step_*"))))
    assert reader.problems() == []
    stored = sum(entry.nbytes for entry in reader.entries() if entry.key == "model")
    assert stored == sum(p.nbytes for p in whole.parameters())


def test_boxes_are_saved_once_and_as_they_are_cut(rank_pool: RankPool, tmp_path: Path) -> None:
    model = ENTRIES["llama tied"].build()
    trainer_at("data 2 x tensor 2", model, rank_pool, tmp_path).fit(DATA, max_steps=1)
    (folder,) = tmp_path.glob("step_*")
    reader = PortableReader(str(folder))
    assert reader.problems() == []
    entries = reader.entries()
    stored = sum(entry.nbytes for entry in entries if entry.key == "model")
    assert stored == sum(p.nbytes for p in model.parameters())
    # Half of the columns by each of two tensor ranks, half of these rows by each of two copies.
    boxes = [e for e in entries if e.name == "model.layers.0.mlp.down_proj.weight" and e.key == "model"]
    assert sorted((e.offsets, e.lengths) for e in boxes) == [
        ((row, column), (8, 16)) for row in (0, 8) for column in (0, 16)
    ]


def test_ranks_that_share_a_model_draw_the_same_masks_on_every_mesh(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    """Random numbers of two data-parallel ranks differ; resumed by two tensor ranks they must not."""

    def build() -> nn.Module:
        model = ENTRIES["encoder"].build()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.5
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.5
        return model

    trainer_at("ddp 2", build(), rank_pool, tmp_path).fit(DATA, max_steps=2)
    trainer = trainer_at(
        "tensor 2", build(), rank_pool, tmp_path, divergence_check_steps=1, log_every_n_steps=1
    )
    trainer.fit(DATA, max_steps=6)
    # And on the same mesh the run continues with its masks: the same bits as without the interruption.
    whole, parts = build(), build()
    trainer_at("tensor 2", whole, rank_pool, tmp_path / "whole").fit(DATA, max_steps=6)
    trainer_at("tensor 2", build(), rank_pool, tmp_path / "parts").fit(DATA, max_steps=3)
    trainer_at("tensor 2", parts, rank_pool, tmp_path / "parts").fit(DATA, max_steps=6)
    assert difference(parts, dict(whole.named_parameters())) == 0.0


class DiesAmongFour(Callback):
    """Kill rank 3 of four after the fifth step, however often it is started."""

    all_ranks = True

    def on_step_end(self, context: Any) -> None:
        if (context.progress.step, context.world.rank, context.world.size) == (5, 3, 4):
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.starts_processes
def test_fewer_ranks_divide_the_model_as_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of two pairs that divide the model one is left, and not three ranks."""
    build = ENTRIES["dilated"].build
    model = build()
    given = {"elastic": {"min_ranks": 2, "max_restarts": 3}, "checkpoint": {"every_n_steps": 2}}
    trainer = trainer_at("data 2 x tensor 2", model, None, tmp_path, callbacks=[DiesAmongFour()], **given)
    history = trainer.fit(DATA, max_steps=8)
    printed = "".join(capfd.readouterr())
    assert "with as few as 2; tensor 2 does not change" in printed
    assert "continuing with 2 ranks instead of 4" in printed
    assert history.batch["data_parallel_size"] == 1
    assert difference(model, train_plainly(build(), DATA, steps=8, **OPTIONS).weights) < EXACT
