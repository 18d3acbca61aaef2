"""Losses against one process that sees the whole global batch at once (C2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed.errors import UserError
from distributed.testing.oracle import oracle_fit
from distributed.testing.rank_pool import RankPool
from distributed.training.objective import Objective, accuracy, align_classes
from tests.support.training import make_trainer

EXACT = 1e-9
STEPS = 8


class Tokens(nn.Module):
    """(N, T, 4) -> (N, T, 3), or with `torch_layout` (N, 3, T)."""

    def __init__(self, torch_layout: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 3).double()
        self.torch_layout = torch_layout

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output.movedim(-1, 1) if self.torch_layout else output


def tokens(length: int = 13, positions: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(length, positions, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (length, positions), generator=generator)


def samples(length: int = 13) -> tuple[Tensor, Tensor]:
    x, y = tokens(length, 1)
    return x[:, 0], y[:, 0]


def masked(y: Tensor, index: int) -> Tensor:
    hidden = torch.rand(y.shape, generator=torch.Generator().manual_seed(3)) < 0.6
    return torch.where(hidden, index, y)


def distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


def flat_mean(output: Tensor, target: Tensor, **options: Any) -> Tensor:
    """torch's own mean over the whole global batch, classes last; zero where nothing counts."""
    output, target = output.reshape(-1, output.shape[-1]), target.reshape(-1)
    return F.cross_entropy(output, target, **options).nan_to_num(0.0)


WEIGHTS = torch.tensor([0.1, 0.02, 0.3], dtype=torch.float64)

CASES: dict[str, tuple[Callable[[], tuple[Tensor, Tensor]], Any, Callable[..., Tensor]]] = {
    "default": (samples, None, flat_mean),
    "default, masked": (lambda: (samples()[0], masked(samples()[1], -100)), None, flat_mean),
    "tokens": (tokens, None, flat_mean),
    "functional": (samples, F.cross_entropy, flat_mean),
    "module, padding 0": (
        lambda: (tokens()[0], masked(tokens()[1], 0)), nn.CrossEntropyLoss(ignore_index=0),
        partial(flat_mean, ignore_index=0)),
    "partial, padding 255": (
        lambda: (tokens()[0], masked(tokens()[1], 255)), partial(F.cross_entropy, ignore_index=255),
        partial(flat_mean, ignore_index=255)),
    "class weights": (
        samples, nn.CrossEntropyLoss(weight=WEIGHTS), partial(flat_mean, weight=WEIGHTS)),
    "class weights, padding 255": (
        lambda: (tokens()[0], masked(tokens()[1], 255)),
        partial(F.cross_entropy, ignore_index=255, weight=WEIGHTS),
        partial(flat_mean, ignore_index=255, weight=WEIGHTS)),
    "label smoothing": (
        tokens, nn.CrossEntropyLoss(label_smoothing=0.2), partial(flat_mean, label_smoothing=0.2)),
    "label smoothing, weights": (
        samples, nn.CrossEntropyLoss(label_smoothing=0.2, weight=WEIGHTS),
        partial(flat_mean, label_smoothing=0.2, weight=WEIGHTS)),
    "probabilities": (
        lambda: (samples()[0], F.one_hot(samples()[1], 3).double() * 0.8 + 0.1), nn.CrossEntropyLoss(),
        F.cross_entropy),
    "nll": (
        samples, nn.NLLLoss(ignore_index=1),
        lambda o, t: F.nll_loss(o, t, ignore_index=1).nan_to_num(0.0)),
    "mse module": (lambda: (samples()[0], samples()[0][:, :3]), nn.MSELoss(), F.mse_loss),
    "mse functional": (lambda: (samples()[0], samples()[0][:, :3]), F.mse_loss, F.mse_loss),
    "batchmean": (
        lambda: (samples()[0], samples()[0][:, :3].softmax(1)), nn.KLDivLoss(reduction="batchmean"),
        partial(F.kl_div, reduction="batchmean")),
    "sum and small counts": (
        samples, lambda o, t: ((F.cross_entropy(o, t, reduction="none") * (t + 1) / 50).sum(),
                               (t + 1).sum().double() / 50),
        lambda o, t: (F.cross_entropy(o, t, reduction="none") * (t + 1)).sum() / (t + 1).sum()),
}  # fmt: skip


trainer_of = partial(
    make_trainer, batch_size=2, max_steps=STEPS, optimizer=torch.optim.SGD, learning_rate=0.3
)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_loss_against_the_whole_batch(case: str, ranks: int, rank_pool: RankPool) -> None:
    make, loss_fn, expected = CASES[case]
    x, y = make()
    model, reference = Tokens(), Tokens()
    history = trainer_of(model, ranks, rank_pool, loss_fn=loss_fn, gradient_accumulation_steps=2).fit((x, y))
    seen = oracle_fit(
        reference, torch.optim.SGD(reference.parameters(), lr=0.3), x, y,
        global_batch_size=4 * ranks, steps=STEPS, loss_fn=expected,
    )  # fmt: skip
    assert history.steps["loss"] == pytest.approx(seen.losses, abs=EXACT)
    assert distance(model, reference) < EXACT


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(WEIGHTS), partial(F.cross_entropy, weight=WEIGHTS)])
def test_class_weights_follow_the_model_to_its_device(loss_fn: Any) -> None:
    objective = Objective(loss_fn, device="meta")
    batch = torch.zeros(2, 3, device="meta"), torch.zeros(2, dtype=torch.long, device="meta")
    total, count = objective(lambda x: x, batch, 2)
    assert {total.device.type, torch.as_tensor(count).device.type} == {"meta"}
    assert objective._class_weights is not None
    assert objective._class_weights.is_meta


def test_torchs_layout_and_classes_last_are_the_same_training(rank_pool: RankPool) -> None:
    found = []
    for torch_layout in (False, True):
        model = Tokens(torch_layout)
        trainer_of(model, 1, rank_pool).fit(tokens())
        found.append(model)
    assert distance(*found) < EXACT
    assert distance(found[0], Tokens()) > 0.01


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("weight", [None, WEIGHTS])
def test_a_global_batch_of_masked_tokens_moves_nothing(
    ranks: int, weight: Tensor | None, rank_pool: RankPool
) -> None:
    x, y = tokens(8)
    y[4:] = -100
    model = Tokens()
    history = trainer_of(
        model, ranks, rank_pool, gradient_accumulation_steps=2 // ranks, gradient_clipping=1.0,
        data={"shuffle": False}, max_steps=2, loss_fn=nn.CrossEntropyLoss(weight),
    ).fit((x, y))  # fmt: skip
    reference = Tokens()
    oracle_fit(reference, torch.optim.SGD(reference.parameters(), lr=0.3), x, y, global_batch_size=4, steps=1,
               max_norm=1.0, loss_fn=partial(flat_mean, weight=weight), shuffle=False)  # fmt: skip
    assert history.steps["loss"][1] == 0.0
    assert history.logs[1]["grad_norm"] == 0.0
    assert distance(model, reference) < EXACT


# -- steps of the user's own ---------------------------------------------------------------------


def mean_step(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def counted_step(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return F.mse_loss(model(batch["x"]), batch["y"], reduction="sum") / 3, len(batch["x"])


def errors(model: nn.Module, batch: Any) -> dict[str, Any]:
    off = (model(batch["x"]) - batch["y"]).abs()
    return {"loss": ((off**2).sum(), off.numel()), "worst": (off.sum(), off.numel())}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("step", [mean_step, counted_step])
def test_training_and_validation_step(ranks: int, step: Any, rank_pool: RankPool) -> None:
    x, _ = samples()
    y = x[:, :3] * 2
    data = [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]
    model, reference = Tokens(), Tokens()
    trainer = make_trainer(model, ranks, rank_pool, batch_size=3, optimizer=torch.optim.SGD,
                           learning_rate=0.1, training_step=step, validation_step=errors)  # fmt: skip
    history = trainer.fit(data, data, max_steps=STEPS, epochs=9)
    oracle_fit(reference, torch.optim.SGD(reference.parameters(), lr=0.1), x, y, loss_fn=F.mse_loss,
               global_batch_size=3 * ranks, steps=STEPS)  # fmt: skip
    assert distance(model, reference) < EXACT
    off = (reference(x) - y).detach().abs()
    assert history.epochs[-1]["val_loss"] == pytest.approx(float((off**2).mean()), abs=EXACT)
    assert history.epochs[-1]["val_worst"] == pytest.approx(float(off.mean()), abs=EXACT)
    assert history.best_accuracy is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_validation_figures_are_those_of_the_whole_set(ranks: int, rank_pool: RankPool) -> None:
    x, y = tokens(11)
    y = masked(y, -100)
    model = Tokens()
    metrics = {"accuracy": accuracy, "share_of_zeros": lambda o, t: ((t == 0).sum(), t.numel())}
    trainer = make_trainer(model, ranks, rank_pool, batch_size=3, learning_rate=0.1, metrics=metrics)
    history = trainer.fit(tokens(), (x, y))
    output = model(x)
    val_loss = float(flat_mean(output, y).detach())
    assert history.epochs[0]["val_loss"] == pytest.approx(val_loss, abs=EXACT)
    kept = y != -100
    right = (output.argmax(-1) == y)[kept].double().mean()
    assert history.best_accuracy == history.epochs[0]["val_accuracy"] == pytest.approx(float(right))
    assert history.epochs[0]["val_share_of_zeros"] == pytest.approx(float((y == 0).double().mean()))


# -- mistakes ----------------------------------------------------------------------------------


def test_two_possible_class_axes_are_an_error() -> None:
    with pytest.raises(UserError, match="second or the last"):
        align_classes(torch.zeros(2, 5, 5), torch.zeros(2, 5, dtype=torch.long))


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("make", [nn.CrossEntropyLoss, nn.MSELoss, partial(partial, F.cross_entropy)])
def test_only_means_can_be_weighed(make: Any, reduction: str) -> None:
    with pytest.raises(UserError, match=r"micro-batch mean") as caught:
        Objective(make(reduction=reduction))
    assert caught.value.field == "loss_fn"


@pytest.mark.parametrize(
    ("given", "field"),
    [({"loss_fn": lambda o, t: (o[:, 0] - t) ** 2}, "loss_fn"),
     ({"training_step": lambda m, b: 1.0}, "training_step")],
)  # fmt: skip
def test_a_loss_is_one_number(given: Any, field: str, rank_pool: RankPool) -> None:
    with pytest.raises(UserError, match="a loss must be one number") as caught:
        trainer_of(Tokens(), 1, rank_pool, **given).fit(samples())
    assert caught.value.field == field


def test_a_batch_without_target_is_an_error(rank_pool: RankPool) -> None:
    with pytest.raises(UserError, match="cannot separate inputs and target"):
        trainer_of(Tokens(), 1, rank_pool).fit(torch.zeros(4, 4))
