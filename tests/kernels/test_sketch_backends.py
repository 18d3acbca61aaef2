"""Sketched layers under every way of cooperating: what one process trains, ranks train too."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_kernels import GivenSketch, SketchedMLP, SKLinear, sketch_checksums
from distributed_plugins.sketch_sync import SynchronizeSketches
from torch import nn

from distributed import Callback, UserError
from distributed.interfaces.callback import Context
from distributed.testing.rank_pool import RankPool
from distributed.testing.reference_problem import distance, problem
from tests.support.training import make_trainer

EXACT = 1e-9
STEPS = 9
PLACES: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "pytorch-ddp": {"backend": "pytorch-ddp"},
    "fsdp": {"backend": "fsdp", "fsdp.wrap": "size", "fsdp.min_params": 60},
    "zero-3": {"backend": "deepspeed", "zero_stage": 3},
    "horovod": {"backend": "horovod"},
}
MODES = pytest.mark.parametrize("train_both", [True, False], ids=["both", "frozen"])
_adamw = partial(torch.optim.AdamW, lr=0.01, eps=1e-4)


def by_hand(made: SketchedMLP) -> SketchedMLP:
    """`made` with its first two sketches as matrices of its own."""
    cpu = torch.device("cpu")
    for layer in layers(made)[:2]:
        frozen_in, frozen_out = layer.sketch.whole(cpu, torch.float64)
        layer.sketch = GivenSketch(frozen_out.T + 0.1, frozen_in.T - 0.1, dtype=torch.float64)
    return made


def model(train_both: bool = False, seed: int = 3) -> SketchedMLP:
    """6 -> 16 -> 16 -> 3 of ranks 4, 6 and 2; the same trained weights for every seed of the sketches."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = SketchedMLP(6, [16, 16], 3, [0.7, 0.4, 0.13], train_both=train_both, dtype=torch.float64)
    for i, layer in enumerate(layers(made)):
        if layer.sketch is not None:
            layer.sketch.set_extra_state({**layer.sketch.get_extra_state(), "seed": seed + i})
    return made


def layers(net: nn.Module) -> list[SKLinear]:
    return [module for module in net.modules() if isinstance(module, SKLinear)]


def optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return _adamw([p for p in net.parameters() if p.requires_grad])


def train(net: Any, place: str, pool: RankPool | None, steps: int = STEPS, **given: Any) -> None:
    fields = {"global_batch_size": 10, "log_every_n_steps": 3, "gradient_clipping": 0.5, **PLACES[place]}
    fields |= {"optimizer": optimizer, **given}
    trainer = make_trainer(net, 1 if place == "serial" else 2, pool, **fields)
    trainer.fit(problem(25), max_steps=steps)


class SketchesAreEqual(Callback):
    """Fails where a rank has another sketch than the first, before or after training."""

    all_ranks = True

    def on_run_start(self, context: Context) -> None:
        seen = context.backend.gather_objects(sketch_checksums(context.model))
        assert len(seen[0]) == 3
        assert all(other == seen[0] for other in seen)

    def on_run_end(self, context: Context, status: str) -> None:
        if status == "finished":
            self.on_run_start(context)


@MODES
@pytest.mark.parametrize("place", list(PLACES)[1:])
def test_two_ranks_train_what_one_process_trains(train_both: bool, place: str, rank_pool: RankPool) -> None:
    alone, together = model(train_both), model(train_both)
    train(alone, "serial", None)
    train(together, place, rank_pool, callbacks=[] if train_both else [SketchesAreEqual()])
    assert distance(alone, together) < EXACT
    assert distance(alone, model(train_both)) > 1e-2


@pytest.mark.parametrize("place", list(PLACES)[1:])
def test_matrices_given_by_hand(place: str, rank_pool: RankPool, tmp_path: Path) -> None:
    """Two ranks for the first half, then one process with matrices of another seed: the saved ones count."""
    alone, together = by_hand(model()), by_hand(model())
    train(alone, "serial", None)
    assert distance(alone, model()) > 1e-2
    resumable: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "resume_from_checkpoint": True}
    train(together, place, rank_pool, 5, callbacks=[SketchesAreEqual()], **resumable)
    together = by_hand(model(seed=50))
    train(together, "serial", None, **resumable)
    assert distance(alone, together) < EXACT


def test_a_checkpoint_brings_its_sketch_to_the_next_backend(rank_pool: RankPool, tmp_path: Path) -> None:
    """Every backend goes on from the one before it, with a model whose own sketch is another."""
    alone = model()
    train(alone, "serial", None, 12)
    for number, place in enumerate(("pytorch-ddp", "fsdp", "zero-3", "horovod", "pytorch-ddp"), 1):
        together = model(seed=3 if number == 1 else 100 * number)
        train(
            together, place, rank_pool, min(3 * number, 12), checkpoint_dir=str(tmp_path),
            resume_from_checkpoint=True, checkpoint={"every_n_steps": 3}, callbacks=[SketchesAreEqual()],
        )  # fmt: skip
    assert distance(alone, together) < EXACT
    x = problem(4)[0]
    assert [layer.sketch.seed for layer in layers(together)] == [3, 4, 5]
    torch.testing.assert_close(together(x), alone(x))


# -- sketches that differ -------------------------------------------------------------------------


def of_its_own_seed() -> SketchedMLP:
    """What a rank builds that takes its seed from its number."""
    return model(seed=3 + 10 * int(os.environ.get("RANK", "0")))


@pytest.mark.parametrize("place", ["pytorch-ddp", "fsdp", "zero-3", "horovod"])
def test_the_callback_gives_all_ranks_the_first_ones(place: str, rank_pool: RankPool, tmp_path: Path) -> None:
    alone = model()
    train(alone, "serial", None)
    callbacks = [SynchronizeSketches(every_n_steps=4), SketchesAreEqual()]
    train(of_its_own_seed, place, rank_pool, callbacks=callbacks, checkpoint_dir=str(tmp_path))
    together = model()
    train(together, "serial", None, checkpoint_dir=str(tmp_path), resume_from_checkpoint=True)
    assert distance(alone, together) < EXACT


class Meddles(Callback):
    """Gives rank 1 another seed after two steps; fails where it has not `seed` after six."""

    all_ranks = True

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_step_end(self, context: Context) -> None:
        sketch = layers(context.model)[1].sketch
        if context.progress.step == 2 and context.world.rank == 1:
            sketch.set_extra_state({**sketch.get_extra_state(), "seed": 77})
        if context.progress.step in (3, 6):
            seeds = context.backend.gather_objects(sketch.seed)
            assert seeds == [4, 77 if context.progress.step == 3 else self.seed]


@pytest.mark.parametrize(("every", "seed"), [(5, 4), (7, 77)])
def test_every_n_steps(every: int, seed: int, rank_pool: RankPool) -> None:
    callbacks = [Meddles(seed), SynchronizeSketches(every_n_steps=every)]
    train(model(), "pytorch-ddp", rank_pool, callbacks=callbacks)


def test_alone_there_is_nothing_to_do() -> None:
    train(model(), "serial", None, callbacks=[SynchronizeSketches(1)])
    with pytest.raises(UserError, match=r"every_n_steps: must be a positive integer. Got 0. Allowed: 1 "):
        SynchronizeSketches(0)
