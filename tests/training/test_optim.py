"""Optimizers and schedules: what is built, what drives it, and that a second fit goes on (C7)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from distributed import DistributedConfig, Trainer
from distributed.errors import UserError
from distributed.testing.conformance import distance, problem, small_model
from distributed.testing.oracle import oracle_fit
from distributed.testing.rank_pool import RankPool
from distributed.training.optimizers import build_model, build_optimizer, lr_factor
from tests.support.training import make_trainer


def build(given: Any = None, **fields: Any) -> Optimizer:
    return build_optimizer(given, small_model(), DistributedConfig(**fields), learning_rate=0.25)


trainer_of = partial(make_trainer, optimizer=SGD, global_batch_size=4)


# -- what is built -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kind", "expected"),
    [
        ({}, AdamW, {"lr": 0.25, "weight_decay": 0.0}),
        ({"optimizer": "adam", "weight_decay": 0.5}, Adam, {"lr": 0.25, "weight_decay": 0.5}),
        ({"optimizer": "sgd", "momentum": 0.9}, SGD, {"lr": 0.25, "momentum": 0.9}),
    ],
)
def test_an_optimizer_by_name(fields: Any, kind: type, expected: dict[str, float]) -> None:
    built = build(**fields)
    assert type(built) is kind
    assert {name: built.param_groups[0][name] for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        (SGD, 0.25),
        (partial(SGD, momentum=0.9), 0.25),
        (partial(SGD, lr=0.5), 0.5),
        (lambda model: SGD(model[0].parameters(), lr=0.75), 0.75),
    ],
)
def test_an_optimizer_by_class_partial_or_factory(given: Any, rate: float) -> None:
    assert build(given).param_groups[0]["lr"] == rate


def test_frozen_parameters_are_left_out() -> None:
    model = small_model()
    model[0].requires_grad_(False)
    built = build_optimizer(None, model, DistributedConfig(), 0.1)
    assert [id(p) for p in built.param_groups[0]["params"]] == [id(p) for p in model[2].parameters()]


def test_the_default_is_plain_adamw(rank_pool: RankPool) -> None:
    x, y = problem(12)
    for ranks in (1, 2):
        model, reference = small_model(), small_model()
        trainer_of(model, ranks, rank_pool, optimizer=None, learning_rate=0.01).fit((x, y), epochs=2)
        oracle_fit(reference, AdamW(reference.parameters(), lr=0.01, weight_decay=0.0), x, y,
                   global_batch_size=4, steps=6)  # fmt: skip
        assert distance(model, reference) < 1e-8


def test_a_factory_builds_the_same_model_on_every_rank_and_run() -> None:
    first, second = build_model(lambda: nn.Linear(3, 3), 1), build_model(lambda: nn.Linear(3, 3), 1)
    assert distance(first, second) == 0.0
    assert distance(first, build_model(lambda: nn.Linear(3, 3), 2)) > 0.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": lambda model: 3}, "optimizer: not an optimizer"),
        ({"optimizer": 3}, "optimizer: not an optimizer"),
        ({"model": 3}, "model: not something that can be trained"),
        ({"model": lambda: 3}, "model: not something that can be trained"),
        ({"model": nn.Tanh()}, "no trainable parameters"),
        ({"model": nn.Linear(2, 2).requires_grad_(False)}, "2 parameters, all frozen"),
        ({"optimizer": SGD(nn.Linear(2, 2).parameters(), lr=0.1)}, "built over other parameters"),
        ({"optimizer": SGD(nn.Linear(2, 2).parameters(), lr=0.1), "model": lambda: small_model()},
         "cannot belong to a model that is yet to be built"),
        ({"scheduler": ExponentialLR(SGD(nn.Linear(2, 2).parameters(), lr=0.1), 0.5)},
         "drives another optimizer"),
    ],
)  # fmt: skip
def test_mistakes(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Trainer(**{"model": small_model(), **given}).fit(problem(4))


@pytest.mark.parametrize(
    "extra", [{"learning_rate": 0.1}, {"lr_scaling": {"rule": "linear", "base_batch_size": 1}}]
)
def test_an_optimizer_object_keeps_its_own_rate(extra: dict[str, Any]) -> None:
    model = small_model()
    with pytest.raises(UserError, match="an optimizer object carries its own learning rate"):
        Trainer(model, optimizer=SGD(model.parameters(), lr=0.1), **extra).fit(problem(4))


# -- scaling ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_rate_follows_the_global_batch_only_when_asked(
    rule: str, factor: float, rank_pool: RankPool
) -> None:
    scaling = {"rule": rule, "base_batch_size": 2}
    for ranks, accumulation in [(1, 4), (2, 2)]:
        history = trainer_of(
            small_model(), ranks, rank_pool, lr_scaling=scaling, learning_rate=0.01,
            global_batch_size=8, gradient_accumulation_steps=accumulation,
        ).fit(problem(12), epochs=2)  # fmt: skip
        assert history.steps["learning_rate"] == pytest.approx([0.01 * factor] * 4)


@pytest.mark.parametrize("given", [lambda model: SGD(model.parameters(), lr=0.1), partial(SGD, lr=0.1)])
def test_a_rule_that_cannot_act_is_an_error(given: Any) -> None:
    with pytest.raises(UserError, match="sets its own learning rate") as caught:
        build(given, lr_scaling={"rule": "linear", "base_batch_size": 1})
    assert caught.value.field == "lr_scaling.rule"


# -- schedules by formula ----------------------------------------------------------------------


def test_schedules_by_formula() -> None:
    rates = partial(lr_factor, warmup=2, total=10, floor=0.1)
    assert [rates(step, kind="constant") for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert [rates(step, kind="linear") for step in range(12)] == pytest.approx(
        [0.5, 1.0] + [1.0 - 0.9 * k / 8 for k in range(9)] + [0.1])  # fmt: skip
    assert [rates(step, kind="cosine") for step in range(12)] == pytest.approx(
        [0.5, 1.0] + [0.1 + 0.9 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(9)] + [0.1])  # fmt: skip


@pytest.mark.parametrize("limit", [{}, {"max_steps": 4}])
def test_a_decay_ends_with_the_run(limit: dict[str, int]) -> None:
    trainer = Trainer(small_model(), scheduler="linear", learning_rate=0.6, batch_size=4, log_every_n_steps=1,
                      epochs=2, **limit)  # fmt: skip
    rates = trainer.fit(problem(12)).steps["learning_rate"]
    steps = limit.get("max_steps", 6)
    assert rates == pytest.approx([0.6 * (1 - k / steps) for k in range(steps)])


def test_a_decay_over_a_stream_needs_an_end() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return zip(*problem(12), strict=True)

    trainer = Trainer(small_model(), scheduler="cosine", batch_size=4, log_every_n_steps=1, learning_rate=0.1)
    with pytest.raises(UserError, match="needs an end"):
        trainer.fit(Stream())
    assert len(trainer.fit(Stream(), max_steps=5).steps["loss"]) == 5


# -- schedulers of the user's own ----------------------------------------------------------------


def sequential(optimizer: Optimizer) -> LRScheduler:
    return SequentialLR(
        optimizer,
        [LinearLR(optimizer, start_factor=0.1, total_iters=2), CosineAnnealingLR(optimizer, T_max=4)],
        milestones=[2],
    )


def one_cycle(optimizer: Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=0.2, total_steps=40)


def exponential(optimizer: Optimizer) -> LRScheduler:
    return ExponentialLR(optimizer, 0.5)


def expected_rates(make: Any, interval: str, epochs: int, steps: int = 3) -> list[float]:
    """As a plain loop has them: `steps` optimizer steps an epoch."""
    optimizer = SGD([nn.Parameter(torch.zeros(()))], lr=0.1)
    scheduler = make(optimizer)
    rates = []
    for _ in range(epochs):
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if interval == "step":
                scheduler.step()
        if interval == "epoch":
            scheduler.step()
    return rates


@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("make", [sequential, one_cycle, exponential])
@pytest.mark.parametrize("as_object", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_scheduler_goes_on_in_the_next_fit(
    make: Any, interval: str, as_object: bool, ranks: int, rank_pool: RankPool
) -> None:
    model = small_model()
    optimizer: Any = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler: Any = make(optimizer) if as_object else make
    optimizer = optimizer if as_object else partial(SGD, lr=0.1, momentum=0.9)
    given = {"optimizer": optimizer, "scheduler": scheduler, "scheduler_interval": interval}
    trainer = trainer_of(model, ranks, rank_pool, **given)
    # Given max_steps, a schedule may be longer than what is trained of it.
    rates = trainer.fit(problem(12), epochs=2, max_steps=6).steps["learning_rate"]
    rates += trainer.fit(problem(12), epochs=3, max_steps=9).steps["learning_rate"]
    assert rates == pytest.approx(expected_rates(make, interval, 5))


@pytest.mark.parametrize("ranks", [1, 2])
def test_reduce_on_plateau_follows_validation(ranks: int, rank_pool: RankPool) -> None:
    def plateau(optimizer: Optimizer) -> ReduceLROnPlateau:
        return ReduceLROnPlateau(optimizer, factor=0.1, patience=0)

    given = {"scheduler": plateau, "optimizer": partial(SGD, lr=0.1)}
    trainer = trainer_of(small_model(), ranks, rank_pool, **given, validation_step=rising)
    history = trainer.fit(problem(12), problem(7), epochs=5)
    # The first figure is the best, so every later one lowers the rate.
    assert history.steps["learning_rate"][::3] == pytest.approx([0.1, 0.1, 0.01, 0.001, 0.0001])
    history = trainer_of(small_model(), ranks, rank_pool, **given).fit(problem(12), epochs=3)
    assert history.steps["learning_rate"][::3] == pytest.approx([0.1, 0.1, 0.1])


def rising(model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
    if not hasattr(model, "seen"):
        model.seen = 0
    model.seen += 1
    return {"loss": (torch.tensor(float(model.seen * len(batch[0]))), len(batch[0]))}
