"""Losses that a function or a model returns as one number, against the mean over the whole global batch."""

from __future__ import annotations

import logging
from collections import UserDict, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from distributed import UserError
from distributed.testing.oracle import oracle_fit
from distributed.testing.rank_pool import RankPool
from distributed.training.batch_transfer import move
from distributed.training.mean_losses import MeanLosses
from tests.support.training import make_trainer
from tests.training.test_objective import Tokens, distance, masked, samples, tokens

EXACT = 1e-9
STEPS = 8


def padded() -> tuple[Tensor, Tensor]:
    """Tokens of which most are masked, other numbers in each sample."""
    x, y = tokens()
    return x, masked(y, -100)


def flat(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return output.flatten(0, -2), target.flatten()


def whole_mean(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(*flat(output, target)).nan_to_num(0.0)


def chosen_mean(output: Tensor, target: Tensor) -> Tensor:
    """The mean over elements of samples of class 0; zero without one."""
    return F.mse_loss(output[target == 0], output.detach()[target == 0] * 2).nan_to_num(0.0)


class Passed(torch.autograd.Function):
    """The identity, as wrappers of modules apply it to outputs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


def with_penalty(output: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(output, target)
    loss += 0.1 * (output**2).mean()
    return loss


SCALARS: dict[str, tuple[Callable[[], tuple[Tensor, Tensor]], Callable[..., Tensor], Any]] = {
    "functional": (padded, lambda o, t: F.cross_entropy(*flat(o, t)), whole_mean),
    "imported by name": (padded, lambda o, t: cross_entropy(*flat(o, t)), whole_mean),
    "module": (padded, lambda o, t: nn.CrossEntropyLoss()(*flat(o, t)), whole_mean),
    "nll": (padded, lambda o, t: F.nll_loss(*flat(o.log_softmax(-1), t)), whole_mean),
    "mean of the mean": (padded, lambda o, t: F.cross_entropy(*flat(o, t)).mean().float(), whole_mean),
    "through a wrapper": (padded, lambda o, t: Passed.apply(F.cross_entropy(*flat(o, t))), whole_mean),
    "changed in place": (samples, with_penalty, with_penalty),
    "elements of a selection": (
        samples, lambda o, t: F.mse_loss(o[t == 0], o.detach()[t == 0] * 2), chosen_mean),
    "by hand, per sample": (
        samples, lambda o, t: ((o - 1.0) ** 2).mean(), lambda o, t: ((o - 1.0) ** 2).mean()),
}  # fmt: skip


@pytest.mark.parametrize("given", ["loss_fn", "training_step"])
@pytest.mark.parametrize("case", SCALARS)
def test_one_number_is_weighed_by_what_it_is_the_mean_of(case: str, given: str, rank_pool: RankPool) -> None:
    make, loss, expected = SCALARS[case]
    x, y = make()

    def step(model: nn.Module, batch: Any) -> Tensor:
        return loss(model(batch[0]), batch[1])

    options: Any = {"loss_fn": loss} if given == "loss_fn" else {"training_step": step}
    history, trained = fit((x, y), rank_pool, **options)
    reference = Tokens()
    seen = plain(reference, x, y, expected)
    exact = 1e-6 if case == "mean of the mean" else EXACT
    assert history.steps["loss"] == pytest.approx(seen, abs=exact)
    assert distance(trained, reference) < exact


def fit(
    source: Any, rank_pool: RankPool, model: nn.Module | None = None, **options: Any
) -> tuple[Any, nn.Module]:
    trainer = make_trainer(
        model or Tokens(), 2, rank_pool, batch_size=2, gradient_accumulation_steps=2, max_steps=STEPS,
        optimizer=SGD, learning_rate=0.3, **options,
    )  # fmt: skip
    return trainer.fit(source), trainer.model


def plain(model: nn.Module, x: Tensor, y: Tensor, loss: Any) -> list[float]:
    optimizer = SGD(model.parameters(), lr=0.3)
    return oracle_fit(model, optimizer, x, y, global_batch_size=8, steps=STEPS, loss_fn=loss).losses


# -- models that compute their own loss ------------------------------------------------------------


class Named(nn.Module):
    """A model that takes its batch by name, and returns its loss in one of the usual ways."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.tokens, self.form = Tokens(), form

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.tokens(inputs)
        loss = None if labels is None else F.cross_entropy(*flat(logits, labels))
        return {
            "object": SimpleNamespace(loss=loss, logits=logits),
            "mapping": {"loss": loss, "logits": logits},
            "tuple": (loss, logits),
            "number": loss,
        }[self.form]


class Rows(list[dict[str, Tensor]]):
    """Samples by name."""


def rows(x: Tensor, y: Tensor, label: str = "labels") -> Rows:
    return Rows({"inputs": a, label: b} for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("form", ["object", "mapping", "tuple", "number"])
def test_a_mapping_is_passed_by_name_and_its_targets_are_counted(form: str, rank_pool: RankPool) -> None:
    x, y = padded()
    data = rows(x, y)
    history, trained = fit(data, rank_pool, Named(form))
    reference = Tokens()
    assert history.steps["loss"] == pytest.approx(plain(reference, x, y, whole_mean), abs=EXACT)
    assert isinstance(trained, Named)
    assert distance(trained.tokens, reference) < EXACT
    trainer = make_trainer(
        trained, 2, rank_pool, batch_size=2, max_steps=1, optimizer=SGD, learning_rate=1e-12
    )
    after = trainer.fit(data, data).epochs[-1]
    assert after["val_loss"] == pytest.approx(float(whole_mean(reference(x), y).detach()), abs=EXACT)


def test_a_loss_function_reads_the_logits_of_an_output(rank_pool: RankPool) -> None:
    class Output(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = Tokens()

        def forward(self, x: Tensor) -> Any:
            return SimpleNamespace(logits=self.tokens(x), loss=None)

    x, y = samples()
    history, _ = fit((x, y), rank_pool, Output())
    assert history.steps["loss"] == pytest.approx(plain(Tokens(), x, y, F.cross_entropy), abs=EXACT)


NOT_TRAINED: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "a name that the model does not take": (
        rows(*samples(), label="label"), {}, "train_loader", "unexpected keyword argument 'label'"),
    "no labels": ([{"inputs": row} for row in samples()[0]], {}, "model", "there is no loss"),
    "a loss function": (rows(*samples()), {"loss_fn": F.mse_loss}, "loss_fn", "would be ignored"),
    "metrics": (rows(*samples()), {"metrics": {"m": lambda o, t: (1, 1)}}, "metrics", "would be ignored"),
    "a tuple without a loss": (
        samples(), {"training_step": lambda m, b: (m(b[0]), b[1])}, "training_step", "there is no loss"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_TRAINED)
def test_what_has_no_loss_is_refused_before_the_first_step(case: str) -> None:
    data, options, field, words = NOT_TRAINED[case]
    model = Tokens() if "training_step" in options else Named("object")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UserError, match=words) as caught:
        make_trainer(model, batch_size=4, optimizer=SGD, learning_rate=0.5, **options).fit(data)
    assert caught.value.field == field
    assert caught.value.remedy
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


# -- means that cannot be weighed ------------------------------------------------------------------


def in_turns(model: nn.Module, batch: Any) -> Tensor:
    """A mean over elements or by hand, by the first target."""
    output, target = model(batch[0]), batch[1]
    return F.mse_loss(output, output.detach() * 2) if int(target[0]) else (output**2).mean()


def test_different_means_in_one_global_batch_are_refused(rank_pool: RankPool) -> None:
    x, y = samples()
    model = Tokens()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UserError, match="means over different things"):
        fit(
            (x, torch.arange(len(y)) // 2 % 2),
            rank_pool,
            model,
            training_step=in_turns,
            data={"shuffle": False},
        )
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_ranks_with_different_means_are_stopped(rank_pool: RankPool) -> None:
    """Rank 0 gets the samples of one kind in each window, rank 1 those of the other."""
    x, _ = samples(16)
    with pytest.raises(UserError, match="what the loss is a mean of"):
        fit(
            (x, torch.arange(16) // 4 % 2), rank_pool,
            training_step=in_turns, data={"shuffle": False}, log_every_n_steps=1,
        )  # fmt: skip


def weighed(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(*flat(model(batch[0]), batch[1])) * 0.5


def halved_in_place(model: nn.Module, batch: Any) -> Tensor:
    loss = F.cross_entropy(*flat(model(batch[0]), batch[1]))
    loss *= 0.5
    return loss


def ragged() -> tuple[Tensor, Tensor]:
    x, y = tokens(8)
    y[::2, 3:] = -100
    return x, y


@pytest.mark.parametrize("step", [weighed, halved_in_place])
@pytest.mark.parametrize(("make", "expected"), [(ragged, 1), (samples, 0)])
def test_a_mean_of_unknown_weight_is_reported_once(
    step: Any, make: Callable[[], tuple[Tensor, Tensor]], expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(
        Tokens(), batch_size=2, gradient_accumulation_steps=2, training_step=step, max_steps=4
    )
    with caplog.at_level(logging.WARNING):
        trainer.fit(make())
    assert sum("is weighted by its" in record.getMessage() for record in caplog.records) == expected


class ByHand(Named):
    """Computes its loss without torch's function."""

    factor: float | None = None

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        assert labels is not None
        kept = labels != -100
        chosen = self.tokens(inputs).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        loss = -(chosen * kept).sum() / kept.sum().clamp(min=1)
        return loss if self.factor is None else loss * self.factor


@pytest.mark.parametrize(("factor", "expected"), [(0.5, 1), (None, 0)])
def test_labels_of_unknown_weight_are_reported(
    factor: float | None, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A factor may be a count; a sum that is divided by one is weighted by it."""
    model = ByHand("number")
    model.factor = factor
    trainer = make_trainer(model, batch_size=2, gradient_accumulation_steps=2, max_steps=2)
    with caplog.at_level(logging.WARNING):
        trainer.fit(rows(*ragged()))
    assert caplog.text.count("computed from 10 targets") == expected


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch[0]).flatten(1) @ model(batch[0]).flatten(1).t()
    return F.cross_entropy(scores, torch.arange(len(scores)))


@pytest.mark.parametrize(("accumulation", "expected"), [(2, 1), (1, 0)])
def test_negatives_of_the_micro_batch_are_reported_once(
    accumulation: int, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(
        Tokens(),
        batch_size=4,
        gradient_accumulation_steps=accumulation,
        training_step=contrastive,
        max_steps=2,
    )
    with caplog.at_level(logging.WARNING):
        trainer.fit(samples())
    found = [record.getMessage() for record in caplog.records if "with each other" in record.getMessage()]
    assert len(found) == expected
    assert all("4 x 4 scores" in message for message in found)


def clamped() -> Tokens:
    model = Tokens()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return model


def test_a_hook_gets_the_gradient_of_the_mean_in_one_process_too() -> None:
    """The loss of a training_step is divided by its count after backward."""
    x, y = padded()
    model, reference = clamped(), clamped()
    make_trainer(
        model, batch_size=8, max_steps=STEPS, optimizer=SGD, learning_rate=0.3,
        training_step=lambda m, b: F.cross_entropy(*flat(m(b[0]), b[1])),
    ).fit((x, y))  # fmt: skip
    plain(reference, x, y, whole_mean)
    assert distance(model, reference) < EXACT


def test_torch_is_left_as_it_was() -> None:
    before = F.cross_entropy
    first, second = MeanLosses(), MeanLosses()
    with first.recording():
        with second.recording():
            assert F.cross_entropy is not before
        assert F.cross_entropy is not before
        loss = F.cross_entropy(torch.ones(2, 3), torch.zeros(2, dtype=torch.long))
    assert F.cross_entropy is before
    mean = first.of(loss)
    assert mean is not None
    assert int(mean.count) == 2
    assert second.of(loss) is None


# -- batches on another device ---------------------------------------------------------------------


Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: Tensor
    names: list[str]


def test_batches_of_any_form_move_with_their_tensors() -> None:
    x = torch.ones(2)
    for batch in (Pair(x, [x]), UserDict(x=x), Sample(x, ["a"]), {"x": (x, 1)}):
        moved = move(batch, "meta")
        assert type(moved) is type(batch)
        found = moved["x"] if isinstance(moved, Mapping) else moved.x
        assert (found[0] if isinstance(found, tuple) else found).device.type == "meta"
