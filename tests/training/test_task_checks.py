"""Losses, metrics and schedulers that would train something else, or nothing, are refused before a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from distributed import Callback, Trainer
from distributed.errors import UserError
from distributed.testing.oracle import oracle_fit
from distributed.testing.rank_pool import RankPool
from tests.support.refusals import points, refused
from tests.support.training import make_trainer


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are first seen when the first batch is read."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


# -- the default loss ------------------------------------------------------------------------------


def regression() -> tuple[Tensor, Tensor]:
    x, _ = points()
    return x, x.sum(dim=1, keepdim=True)


@pytest.mark.parametrize("kind", [TensorDataset, Pairs])
@pytest.mark.parametrize("one_column", [True, False])
def test_float_targets_need_a_loss(kind: Callable[..., Any], one_column: bool) -> None:
    x, y = regression()
    data = kind(x, y if one_column else y[:, 0])
    remedy = ["loss_fn=nn.MSELoss()", "loss_fn=nn.CrossEntropyLoss()"]
    refused("loss_fn", "floating-point numbers", *remedy, data=(data,), model=nn.Linear(4, 1))


def test_float_targets_of_validation_need_a_loss() -> None:
    x, y = regression()
    refused("loss_fn", "floating-point numbers", data=(points(), (x, y)))


def test_a_validation_step_may_read_float_targets() -> None:
    trainer = make_trainer(nn.Linear(4, 2), batch_size=4, validation_step=errors)
    assert trainer.fit(points(), regression()).epochs[0]["val_error"] > 0


def errors(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"error": ((model(batch[0])[:, :1] - batch[1]).abs().sum(), len(batch[0]))}


def test_float_targets_in_a_loop_of_your_own_need_a_loss() -> None:
    trainer = make_trainer(nn.Linear(4, 1))
    with pytest.raises(UserError, match="floating-point numbers"):
        trainer.train_step(*regression())


@pytest.mark.parametrize("ranks", [1, 2])
def test_regression_and_class_probabilities_with_a_loss_are_the_oracles(
    ranks: int, rank_pool: RankPool
) -> None:
    x, y = regression()
    soft = torch.softmax(x[:, :2], dim=1)
    cases: list[tuple[int, nn.Module, Tensor, Callable[..., Tensor]]] = [
        (1, nn.MSELoss(), y, F.mse_loss),
        (2, nn.CrossEntropyLoss(), soft, F.cross_entropy),
    ]
    for outputs, loss_fn, target, expected in cases:
        torch.manual_seed(0)
        model = nn.Linear(4, outputs)
        reference = nn.Linear(4, outputs)
        reference.load_state_dict(model.state_dict())
        trainer = make_trainer(
            model, ranks, rank_pool, global_batch_size=4, loss_fn=loss_fn, optimizer=SGD, learning_rate=0.1
        )
        history = trainer.fit(Pairs(x, target), max_steps=5)
        seen = oracle_fit(
            reference, SGD(reference.parameters(), lr=0.1), x, target,
            global_batch_size=4, steps=5, loss_fn=expected,
        )  # fmt: skip
        assert history.steps["loss"] == pytest.approx(seen.losses, abs=1e-6)
        assert torch.allclose(model.weight, reference.weight, atol=1e-6)


@pytest.mark.parametrize("loss_fn", [None, nn.CrossEntropyLoss(), F.cross_entropy])
def test_a_cross_entropy_of_one_class_is_refused(loss_fn: Any) -> None:
    x, y = points()
    remedy = ["nn.BCEWithLogitsLoss()", "nn.MSELoss()", "Got 'output of shape (4, 1)'"]
    refused("loss_fn", "always 0", *remedy, data=((x, y * 0),), model=nn.Linear(4, 1), loss_fn=loss_fn)


def test_class_probabilities_of_one_class_are_refused() -> None:
    loss_fn = nn.CrossEntropyLoss()
    refused("loss_fn", "always 0", data=(regression(),), model=nn.Linear(4, 1), loss_fn=loss_fn)


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[:, 0]


def test_samples_are_not_read_as_classes() -> None:
    x, y = regression()
    loss_fn = nn.CrossEntropyLoss()
    refused("loss_fn", "no class axis", "(4,)", data=((x, y[:, 0]),), model=Flat(), loss_fn=loss_fn)


def test_one_class_of_many_positions_is_refused() -> None:
    x = torch.zeros(4, 3, 4)
    y = torch.zeros(4, 3, dtype=torch.long)
    refused("loss_fn", "always 0", data=((x, y),), model=nn.Linear(4, 1))


# -- wrong arguments -------------------------------------------------------------------------------


class OwnLoss(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.MSELoss, OwnLoss])
def test_a_loss_class_is_no_loss(kind: Any) -> None:
    refused("loss_fn", "a loss class", f"loss_fn={kind.__name__}()", loss_fn=kind)


@pytest.mark.parametrize("given", ["mse", 3])
def test_a_name_is_no_loss(given: Any) -> None:
    refused("loss_fn", "not a loss", "loss_fn=nn.MSELoss()", loss_fn=given)


def built_of(width: int) -> nn.Module:
    return nn.Linear(width, 2)


@pytest.mark.parametrize(
    ("factory", "remedy"),
    [
        (nn.Linear, "model=lambda: Linear(in_features=..., out_features=...)"),
        (built_of, "model=lambda: built_of(width=...)"),
    ],
)
def test_a_factory_that_needs_arguments_is_refused(factory: Any, remedy: str) -> None:
    with pytest.raises(UserError, match="by calling this without arguments") as caught:
        Trainer(factory, batch_size=4, device="cpu").fit(points())
    assert remedy in str(caught.value)


def test_a_loop_of_your_own_refuses_a_loss_class() -> None:
    with pytest.raises(UserError, match="a loss class"):
        make_trainer(nn.Linear(4, 2), loss_fn=nn.CrossEntropyLoss).train_step(*points())


def test_a_scheduler_class_that_needs_more_is_refused() -> None:
    remedy = "scheduler=lambda optimizer: StepLR(optimizer, step_size=...)"
    refused("scheduler", remedy, "Got 'StepLR'", scheduler=StepLR)
    refused("scheduler", "lambda optimizer: make(optimizer", scheduler=make)
    refused("scheduler", "not a learning-rate scheduler", scheduler=[1, 2])


def make() -> None:
    """A factory that forgot its optimizer."""


class Plain(LRScheduler):
    """A class that needs nothing but the optimizer."""

    def get_lr(self) -> list[float]:
        return [0.25]


@pytest.mark.parametrize("kind", [Plain, ReduceLROnPlateau])
def test_a_scheduler_class_that_needs_nothing_else_is_built(kind: Any) -> None:
    trainer = make_trainer(
        nn.Linear(4, 2), batch_size=12, scheduler=kind, optimizer=SGD, learning_rate=0.5, epochs=2
    )
    rates = trainer.fit(points(), points()).steps["learning_rate"]
    assert rates == ([0.25, 0.25] if kind is Plain else [0.5, 0.5])


def hits(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output.argmax(dim=1) == target).sum(), len(target)


def share(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=1) == target).float().mean()


def test_metrics_are_functions_by_name() -> None:
    refused("metrics", "'top1' is not a function", "Got 'accuracy'", metrics={"top1": "accuracy"})
    refused("metrics", "not a mapping", "Got 'list'", metrics=[hits])
    refused("metrics", "'error' is not a function", "Got 'MSELoss'", metrics={"error": nn.MSELoss})
    refused("metrics", "would take its place", "Rename the metric", metrics={"loss": hits})


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda output, target: F.cross_entropy(output.detach(), target), "Leave out detach()"),
        (
            lambda output, target: (F.cross_entropy(output, target).detach(), len(target)),
            "Leave out detach()",
        ),
        (lambda output, target: F.cross_entropy(output, target).item(), "without .item()"),
    ],
)
def test_a_loss_without_a_gradient_is_refused(loss: Any, words: str) -> None:
    refused("loss_fn", words, loss_fn=loss)


class Wrapped(nn.Linear):
    """Returns its scores inside of `form`."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__(4, 2)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(super().forward(x))


@pytest.mark.parametrize(
    ("form", "got"),
    [
        (lambda out: (out, out), "(Tensor, Tensor)"),
        (lambda out: {"out": out}, "of out"),
        (lambda out: None, "None"),
    ],
)
def test_an_output_that_the_loss_cannot_read_is_refused(form: Any, got: str) -> None:
    refused("model", "the model returned something else", got, model=Wrapped(form))


def test_a_plateau_has_no_metric_at_a_step() -> None:
    refused(
        "scheduler_interval", "ReduceLROnPlateau needs a metric", scheduler=ReduceLROnPlateau,
        scheduler_interval="step",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "words"),
    [(Callback(), "Got 'Callback'"), (Callback, "Got 'Callback'"), ([Callback], "callbacks=[Callback()]")],
)
def test_callbacks_are_a_list_of_objects(given: Any, words: str) -> None:
    with pytest.raises(UserError, match="callbacks: not a list of callbacks") as caught:
        make_trainer(nn.Linear(4, 2), callbacks=given)
    assert words in str(caught.value)


def test_a_metric_is_a_pair() -> None:
    trainer = make_trainer(nn.Linear(4, 2), batch_size=4, metrics={"share": share})
    with pytest.raises(UserError, match=r"metric 'share' is not a pair.*shape \(\)"):
        trainer.fit(points(), points())
    trainer = make_trainer(nn.Linear(4, 2), batch_size=4, validation_step=lambda m, b: {"share": 0.5})
    with pytest.raises(UserError, match="metric 'share' is not a pair") as caught:
        trainer.fit(points(), points())
    assert caught.value.field == "validation_step"


def test_a_metric_may_be_one_tensor_of_both() -> None:
    both = {"both": lambda output, target: torch.tensor([3.0, 4.0])}
    history = make_trainer(nn.Linear(4, 2), batch_size=4, metrics=both).fit(points(), points())
    assert history.epochs[0]["val_both"] == 0.75


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def measures(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"hits": hits(model(batch[0]), batch[1])}


@pytest.mark.parametrize("given", [{"training_step": loss_of}, {"validation_step": measures}], ids=list)
def test_metrics_that_would_be_ignored_are_refused(given: Any) -> None:
    refused("metrics", "would be ignored", "validation_step=lambda", metrics={"hits": hits}, **given)


def test_a_loss_that_would_be_ignored_is_refused() -> None:
    words = ["would be ignored", "Got 'cross_entropy'", "Leave one of them out"]
    refused("loss_fn", *words, loss_fn=F.cross_entropy, training_step=loss_of)


def test_metrics_beside_a_loss_are_computed() -> None:
    trainer = Trainer(nn.Linear(4, 2), batch_size=4, device="cpu", metrics={"hits": hits})
    history = trainer.fit(DataLoader(TensorDataset(*points()), batch_size=4), points())
    assert 0 <= history.epochs[0]["val_hits"] <= 1
