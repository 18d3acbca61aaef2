"""Checkpoints of one mesh continue on every other, and on the backends without axes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from distributed import Callback
from distributed.checkpoint.reader import PortableReader
from distributed.testing.checkpoint_compare import state_distance
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.parallel.expert_models import EXPERT_ENTRIES
from tests.parallel.models import ENTRIES, tokens, train_plainly
from tests.parallel.places import OPTIONS, PLACES, is_installed, trainer_at
from tests.parallel.test_tensor_parallel import difference
from tests.support.training import OnStep

pytest.importorskip("transformers")

DATA = tokens(21)


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
    for place in path:
        if not is_installed(place):
            pytest.skip(f"needs the backend of {place}")
    build = ENTRIES["dilated"].build
    for number, place in enumerate(path):
        model = build()
        history = trainer_at(place, model, rank_pool, tmp_path / "mesh").fit(DATA, max_steps=4 * number + 4)
        assert history.steps["step"] == list(range(4 * number + 1, 4 * number + 5))
    expected = train_plainly(build(), DATA, steps=4 * len(path), **OPTIONS)
    assert difference(model, expected.weights) < EXACT
    # The optimizer's state, too, against a run that was not interrupted.
    serial = trainer_at("serial", build(), None, tmp_path / "serial")
    whole = serial.fit(DATA, max_steps=4 * len(path)).checkpoint
    assert state_distance(str(history.checkpoint), str(whole)) < EXACT


def test_states_of_other_steps_are_not_near(tmp_path: Path) -> None:
    """The comparison of checkpoints can fail."""
    paths = []
    for number, steps in enumerate((4, 4, 5)):
        trainer = trainer_at("serial", ENTRIES["dilated"].build(), None, tmp_path / str(number))
        if number == 1:
            trainer.callbacks = [OnStep(change_state, step=4)]
        paths.append(str(trainer.fit(DATA, max_steps=steps).checkpoint))
    assert state_distance(paths[0], paths[0]) == 0.0
    assert state_distance(*paths[:2]) == pytest.approx(1e-3)
    with pytest.raises(ValueError, match="scalars"):
        state_distance(paths[0], paths[2])


def change_state(context: Any) -> None:
    """One number of AdamW's, not the weights."""
    context.optimizer.state[context.model.norm.weight]["exp_avg_sq"][3] += 1e-3


def test_the_committed_table_has_every_place_and_no_large_distance() -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    part = page.split("<!-- mesh checkpoints -->\n")[1].split("<!-- /mesh checkpoints -->")[0]
    title, _, *rows = [line.strip("| ").split(" | ") for line in part.splitlines()]
    assert title == ["saved by, loaded by", *PLACES]
    assert [row[0] for row in rows] == list(PLACES)
    distances = [float(cell) for row in rows for cell in row[1:]]
    assert len(distances) == len(PLACES) ** 2
    assert max(distances) < EXACT


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
