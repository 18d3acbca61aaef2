"""Several validation sets by name: metrics of each, and of all samples together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from distributed.errors import UserError
from distributed.interfaces.callback import Callback, Context
from distributed.testing.rank_pool import RankPool
from distributed.testing.reference_problem import problem, small_model
from tests.support.training import make_trainer

EXACT = 1e-9


def part(length: int, start: int) -> tuple[Tensor, Tensor]:
    x, y = problem(start + length)
    return x[start:], y[start:]


def accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output.argmax(1) == target).sum(), len(target)


def figures(model: nn.Module, *parts: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """(loss, accuracy) over all samples of `parts`, by plain PyTorch."""
    x, y = (torch.cat(column) for column in zip(*parts, strict=True))
    with torch.no_grad():
        output = model.eval()(x)
    return float(F.cross_entropy(output, y)), float((output.argmax(1) == y).double().mean())


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_set_and_all_samples_are_measured(ranks: int, rank_pool: RankPool) -> None:
    model, clean, noisy = small_model(), part(7, 24), part(16, 31)
    trainer = make_trainer(model, ranks, rank_pool, batch_size=4, metrics={"accuracy": accuracy})
    sets = {"clean": clean, "noisy-2": DataLoader(TensorDataset(*noisy), batch_size=5)}
    (epoch,) = trainer.fit(problem(24), sets, epochs=1).epochs
    for name, parts in (("", [clean, noisy]), ("clean_", [clean]), ("noisy-2_", [noisy])):
        loss, hits = figures(model, *parts)
        assert epoch[f"val_{name}loss"] == pytest.approx(loss, abs=EXACT)
        assert epoch[f"val_{name}accuracy"] == pytest.approx(hits, abs=EXACT)
    assert trainer.best_accuracy == epoch["val_accuracy"]


def test_a_single_set_has_the_names_that_it_always_had(rank_pool: RankPool) -> None:
    (epoch,) = make_trainer(small_model(), batch_size=4).fit(problem(24), part(7, 24), epochs=1).epochs
    assert {name for name in epoch if name.startswith("val_")} == {"val_loss", "val_accuracy"}


class Seen(Callback):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def on_validation_end(self, context: Context, metrics: Any) -> None:
        self.names |= set(metrics)


def test_callbacks_see_the_metrics_of_each_set() -> None:
    seen = Seen()
    trainer = make_trainer(small_model(), batch_size=4, callbacks=[seen])
    trainer.fit(problem(24), {"a": part(4, 24), "b": part(4, 28)}, epochs=1)
    assert {"val_loss", "val_a_loss", "val_b_loss"} <= seen.names


@pytest.mark.parametrize(
    ("sets", "field", "words"),
    [
        ({"a b": part(4, 24)}, "val_loader", "letters, digits"),
        ({"a": part(4, 24), "b": None}, "val_loader['b']", "not a readable data source"),
        ({"x": problem(4)[0], "y": problem(4)[1]}, "val_loader", "not a readable data source"),
        ([DataLoader(TensorDataset(*problem(4)))] * 2, "val_loader", "by name: {'name': loader}"),
    ],
)
def test_what_is_no_set_of_sets_is_refused(sets: Any, field: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        make_trainer(small_model(), batch_size=4).fit(problem(24), sets, epochs=1)
    assert caught.value.field == field
    assert words in str(caught.value)
