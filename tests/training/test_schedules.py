"""Schedules as a loop in plain PyTorch steps them, or refused with a remedy that is followed here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_cosine_schedule_with_warmup

from distributed import Callback
from distributed.callbacks import EarlyStopping
from distributed.errors import UserError
from distributed.interfaces.callback import Context
from distributed.testing.conformance import distance
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer

NUM, SIZE, STEPS, EXACT = 48, 12, 4, 1e-12
X = torch.randn(NUM, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] + 0.3 * X[:, 1] > 0).long()
Place = tuple[str, int, dict[str, Any]]
PLACES: list[Place] = [
    ("serial", 1, {}),
    ("pytorch-ddp", 3, {}),
    ("fsdp", 2, {}),
    ("deepspeed", 2, {"zero_stage": 1}),
]
everywhere = pytest.mark.parametrize("place", PLACES, ids=[place[0] for place in PLACES])
BY_STEP = {"scheduler_interval": "step"}


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def two_groups(model: nn.Module) -> Optimizer:
    first, _, last = model.children()
    groups = [{"params": first.parameters()}, {"params": last.parameters(), "lr": 0.05}]
    return SGD(groups, lr=0.2, momentum=0.9)


def trainer_of(
    model: nn.Module, scheduler: Any, place: Place = PLACES[0], pool: RankPool | None = None, **given: Any
) -> Any:
    backend, ranks, fields = place
    run = {"backend": backend, "data": {"shuffle": False}, "global_batch_size": SIZE, **fields, **given}
    run.setdefault("optimizer", two_groups)
    return make_trainer(model, ranks, pool, scheduler=scheduler, **run)


def plain(
    make: Callable[[Optimizer], Any], step: Callable[[Any, int, int, nn.Module], None], epochs: int
) -> tuple[nn.Module, list[float]]:
    """(model, rates) of a loop that calls `step(scheduler, epoch, number, model)` after each step, and with
    number 0 after each epoch."""
    model = new_model()
    optimizer = two_groups(model)
    scheduler, rates, number = make(optimizer), [], 0
    for epoch in range(epochs):
        for i in range(0, NUM, SIZE):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X[i : i + SIZE]), Y[i : i + SIZE]).backward()
            optimizer.step()
            number += 1
            step(scheduler, epoch, number, model)
        step(scheduler, epoch, 0, model)
    return model, rates


def each_step(scheduler: Any, epoch: int, number: int, model: nn.Module) -> None:
    if number:
        scheduler.step()


def each_epoch(scheduler: Any, epoch: int, number: int, model: nn.Module) -> None:
    if not number:
        scheduler.step()


# -- kinds -----------------------------------------------------------------------------------


def one_cycle(optimizer: Optimizer) -> Any:
    return OneCycleLR(optimizer, [0.2, 0.1], total_steps=3 * STEPS)


def warm_restarts(optimizer: Optimizer) -> Any:
    return CosineAnnealingWarmRestarts(optimizer, T_0=3, T_mult=2)


def sequential(optimizer: Optimizer) -> Any:
    parts: list[Any] = [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, T_max=9)]
    return SequentialLR(optimizer, parts, milestones=[3])


def by_group(optimizer: Optimizer) -> Any:
    return LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 1.0 / (step + 1)])


def chained(optimizer: Optimizer) -> Any:
    return ChainedScheduler([ExponentialLR(optimizer, 0.9), StepLR(optimizer, 2, 0.5)], optimizer)


def cosine_of_transformers(optimizer: Optimizer) -> Any:
    return get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=3, num_training_steps=3 * STEPS)


KINDS = [one_cycle, warm_restarts, sequential, by_group, chained, cosine_of_transformers]


@everywhere
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_a_schedule_by_steps_and_resumed(
    make: Callable[[Optimizer], Any], place: Place, rank_pool: RankPool, tmp_path: Path
) -> None:
    """Within the second epoch."""
    oracle, rates = plain(make, each_step, 3)
    given = {**BY_STEP, "epochs": 3, "folder": tmp_path}
    first = trainer_of(new_model(), make, place, rank_pool, **given).fit((X, Y), max_steps=6)
    model = new_model()
    resumed = trainer_of(model, make, place, rank_pool, resume_from_checkpoint=True, **given).fit((X, Y))
    found = first.steps["learning_rate"] + resumed.steps["learning_rate"]
    assert found == pytest.approx(rates, abs=EXACT)
    assert distance(model, oracle) < EXACT


@everywhere
@pytest.mark.parametrize("make", [warm_restarts, by_group, chained], ids=lambda make: make.__name__)
def test_a_loop_of_fits(make: Callable[[Optimizer], Any], place: Place, rank_pool: RankPool) -> None:
    oracle, rates = plain(make, each_epoch, 3)
    model, found = new_model(), []
    trainer = trainer_of(model, make, place, rank_pool)
    for _ in range(3):
        found += trainer.fit((X, Y), epochs=1).steps["learning_rate"]
    assert found == pytest.approx(rates, abs=EXACT)
    assert distance(model, oracle) < EXACT


@pytest.mark.parametrize("place", [PLACES[0], ("pytorch-ddp", 2, {})], ids=["serial", "pytorch-ddp"])
@pytest.mark.parametrize("limit", [{"epochs": 1}, {"max_steps": STEPS}])
def test_a_configured_schedule_in_a_loop_of_fits(
    limit: dict[str, int], place: Place, rank_pool: RankPool
) -> None:
    """On two ranks, the schedule has as many steps as the run has micro-batches, by chance."""
    trainer = trainer_of(new_model(), "cosine", place, rank_pool)
    trainer.fit((X, Y), **limit)
    whole = {name: 2 * value for name, value in limit.items()}
    remedy = "Call fit once with " + ", ".join(f"{name}={value}" for name, value in whole.items())
    with pytest.raises(UserError, match=f"ended with the earlier fit, after 4 steps.*{remedy}"):
        trainer.fit((X, Y), **limit)

    def cosine(optimizer: Optimizer) -> Any:
        return CosineAnnealingLR(optimizer, T_max=2 * STEPS)

    oracle, _ = plain(cosine, each_step, 2)
    models = [new_model(), new_model()]
    trainer_of(models[0], "cosine", place, rank_pool).fit((X, Y), **whole)
    own = trainer_of(models[1], cosine, place, rank_pool, **BY_STEP)
    for _ in range(2):
        own.fit((X, Y), **limit)
    assert max(distance(model, oracle) for model in models) < EXACT


# -- what step() is called with --------------------------------------------------------------


class OfTimm:
    """The form of timm's schedulers."""

    def __init__(self, optimizer: Optimizer, in_epochs: bool = True) -> None:
        self.optimizer, self.in_epochs, self.seen = optimizer, in_epochs, 0

    def _set(self, number: int) -> None:
        self.seen = number
        for group, base in zip(self.optimizer.param_groups, (0.2, 0.05), strict=True):
            group["lr"] = base / (number + 1)

    def step(self, epoch: int, metric: float | None = None) -> None:
        if self.in_epochs:
            self._set(epoch)

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        if not self.in_epochs:
            self._set(num_updates)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def numbers(scheduler: Any, epoch: int, number: int, model: nn.Module) -> None:
    if number:
        scheduler.step_update(number)
    else:
        scheduler.step(epoch + 1)


@everywhere
@pytest.mark.parametrize("in_epochs", [True, False])
def test_a_scheduler_that_takes_the_epoch(
    in_epochs: bool, place: Place, rank_pool: RankPool, tmp_path: Path
) -> None:
    make = partial(OfTimm, in_epochs=in_epochs)
    oracle, rates = plain(make, numbers, 3)
    given = {"epochs": 3, "folder": tmp_path}
    first = trainer_of(new_model(), make, place, rank_pool, **given).fit((X, Y), max_steps=6)
    model = new_model()
    resumed = trainer_of(model, make, place, rank_pool, resume_from_checkpoint=True, **given).fit((X, Y))
    assert first.steps["learning_rate"] + resumed.steps["learning_rate"] == pytest.approx(rates, abs=EXACT)
    assert distance(model, oracle) < EXACT


class Unknown(OfTimm):
    step_update = None  # type: ignore[assignment]

    def step(self, temperature: float) -> None:  # type: ignore[override]
        raise NotImplementedError


def test_an_argument_of_step_that_nobody_knows() -> None:
    with pytest.raises(UserError, match="takes the argument 'temperature'"):
        trainer_of(new_model(), Unknown).fit((X, Y))


# -- the metric ------------------------------------------------------------------------------


def plateau(optimizer: Optimizer, mode: str = "max") -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, mode=mode, patience=0, factor=0.5)  # type: ignore[arg-type]


def score(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (-output[:, 1] * target).sum(), len(target)


def follow_accuracy(scheduler: Any, epoch: int, number: int, model: nn.Module) -> None:
    if not number:
        scheduler.step((model(X).argmax(1) == Y).double().mean().item())


def follow_score(scheduler: Any, epoch: int, number: int, model: nn.Module) -> None:
    if not number:
        scheduler.step((score(model(X), Y)[0] / NUM).item())


@everywhere
def test_the_metric_of_a_plateau(place: Place, rank_pool: RankPool) -> None:
    for given, step in (
        ({}, follow_accuracy),
        ({"scheduler_metric": "accuracy"}, follow_accuracy),
        ({"metrics": {"score": score}}, follow_score),
        ({"metrics": {"score": score, "other": score}, "scheduler_metric": "val_score"}, follow_score),
    ):
        oracle, rates = plain(plateau, step, 6)
        model = new_model()
        history = trainer_of(model, plateau, place, rank_pool, **given).fit((X, Y), (X, Y), epochs=6)
        assert len(set(rates)) > 1
        assert history.steps["learning_rate"] == pytest.approx(rates, abs=EXACT)
        assert distance(model, oracle) < EXACT


@pytest.mark.parametrize(
    ("given", "val", "message"),
    [
        ({}, None, "no validation data is given"),
        ({"metrics": {"a": score, "b": score}}, (X, Y), "val_a, val_b could be meant"),
        ({"metrics": {"error": score}}, (X, Y), "only losses could be meant"),
        ({"scheduler_metric": "f1"}, (X, Y), "no such metric"),
    ],
)
@pytest.mark.parametrize("place", PLACES[:1], ids=["serial"])
def test_a_plateau_without_its_metric(given: dict[str, Any], val: Any, message: str, place: Place) -> None:
    """Its remedies are followed above."""
    with pytest.raises(UserError, match=message) as caught:
        trainer_of(new_model(), plateau, place, **given).fit((X, Y), val, epochs=2)
    assert caught.value.field == "scheduler_metric"


# -- interval and length ---------------------------------------------------------------------


def rising(optimizer: Optimizer) -> Any:
    return LambdaLR(optimizer, lambda step: (step + 1) / 100)


def from_zero(optimizer: Optimizer) -> Any:
    return LambdaLR(optimizer, lambda step: min(1.0, step / 2))


def to_the_end(optimizer: Optimizer) -> Any:
    return CosineAnnealingLR(optimizer, T_max=3 * STEPS)


NUM_STEPS = 3 * STEPS


def of_the_script(optimizer: Optimizer) -> Any:
    return LambdaLR(optimizer, lambda step: 1.0 - step / NUM_STEPS)


@pytest.mark.parametrize("place", PLACES[1:2], ids=["pytorch-ddp"])
@pytest.mark.parametrize(
    "make", [rising, from_zero, to_the_end, of_the_script, one_cycle, cosine_of_transformers]
)
def test_steps_counted_by_epochs(make: Callable[[Optimizer], Any], place: Place, rank_pool: RankPool) -> None:
    with pytest.raises(UserError, match="Set scheduler_interval=step, or scheduler_interval=epoch") as caught:
        trainer_of(new_model(), make, place, rank_pool, epochs=3).fit((X, Y))
    assert caught.value.field == "scheduler_interval"
    for interval, step in (("step", each_step), ("epoch", each_epoch)):
        if (make, interval) == (one_cycle, "epoch"):
            continue  # is too long, and says so
        oracle, _ = plain(make, step, 3)
        model = new_model()
        given = {"scheduler_interval": interval, "epochs": 3}
        trainer_of(model, make, place, rank_pool, **given).fit((X, Y))
        assert distance(model, oracle) < EXACT


@pytest.mark.parametrize("make", [warm_restarts, by_group, chained, from_zero, partial(StepLR, step_size=30)])
def test_a_schedule_of_epochs_is_not_asked(make: Callable[[Optimizer], Any]) -> None:
    """Of one step per epoch, step and epoch are the same."""
    given = {"global_batch_size": NUM} if make is from_zero else {}
    trainer_of(new_model(), make, epochs=5, **given).fit((X, Y))


def of_length(kind: str, length: int, optimizer: Optimizer) -> Any:
    if kind == "one_cycle":
        return OneCycleLR(optimizer, [0.2, 0.1], total_steps=length)
    if kind == "cosine":
        return CosineAnnealingLR(optimizer, T_max=length)
    if kind == "transformers":
        return get_cosine_schedule_with_warmup(optimizer, 1, length)
    return LambdaLR(optimizer, lambda step: 1.0 - step / length)


@pytest.mark.parametrize("kind", ["one_cycle", "cosine", "transformers", "lambda"])
@pytest.mark.parametrize(
    "place",
    [("serial", 1, {"gradient_accumulation_steps": 2}), ("pytorch-ddp", 2, {})],
    ids=["serial", "ddp"],
)
def test_a_schedule_of_the_batches_of_a_loader(kind: str, place: Place, rank_pool: RankPool) -> None:
    """Both remedies are followed: the right length, and a part of the schedule."""
    loader = DataLoader(TensorDataset(X, Y), SIZE // 2)
    given = {**BY_STEP, "global_batch_size": None, "epochs": 3}
    long, right = (partial(of_length, kind, length) for length in (3 * len(loader), 3 * STEPS))
    message = "ends after 24 steps and the run takes 12.*12, or max_steps=12 to train a part"
    with pytest.raises(UserError, match=message):
        trainer_of(new_model(), long, place, rank_pool, **given).fit(loader)
    for make, limit in ((right, {}), (long, {"max_steps": 12})):
        oracle, _ = plain(make, each_step, 3)
        model = new_model()
        trainer_of(model, make, place, rank_pool, **given, **limit).fit(loader)
        assert distance(model, oracle) < EXACT


@pytest.mark.parametrize(("length", "epochs"), [(8, 3), (16, 3), (12, 2), (12, 4)])
def test_a_schedule_of_another_length(length: int, epochs: int) -> None:
    make = partial(of_length, "one_cycle", length)
    with pytest.raises(
        UserError, match=f"after {length} steps and .* {4 * epochs}.*total_steps={4 * epochs}"
    ):
        trainer_of(new_model(), make, **BY_STEP, epochs=epochs).fit((X, Y))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_schedule_that_a_loop_of_the_script_has_begun() -> None:
    model = new_model()
    optimizer = two_groups(model)
    scheduler = one_cycle(optimizer)
    for _ in range(4):
        scheduler.step()
    given = {**BY_STEP, "optimizer": optimizer}
    rates = trainer_of(model, scheduler, **given).fit((X, Y), epochs=2).steps["learning_rate"]
    assert rates == pytest.approx(plain(one_cycle, each_step, 3)[1][4:], abs=EXACT)
    trainer = trainer_of(new_model(), one_cycle, **BY_STEP)
    trainer.fit((X, Y), epochs=3)
    with pytest.raises(UserError, match="after 12 steps and the run takes 24"):
        trainer.fit((X, Y), epochs=3)


# -- an epoch that the run cuts --------------------------------------------------------------


class Epochs(Callback):
    all_ranks = True

    def __init__(self) -> None:
        self.complete: list[int] = []
        self.incomplete: list[int] = []

    def on_epoch_end(self, context: Context, metrics: Mapping[str, float]) -> None:
        self.complete.append(context.progress.step)

    def on_incomplete_epoch(self, context: Context, metrics: Mapping[str, float]) -> None:
        assert "val_loss" in metrics
        self.incomplete.append(context.progress.step)


@everywhere
def test_an_epoch_that_the_run_cuts_counts_once(place: Place, rank_pool: RankPool, tmp_path: Path) -> None:
    """Early stopping and the best checkpoint of a run in two parts are those of the run in one."""

    def part(folder: str, limit: dict[str, int], **given: Any) -> tuple[Any, Epochs, EarlyStopping]:
        seen, stopping = Epochs(), EarlyStopping("val_accuracy", patience=50)
        run = {"callbacks": [seen, stopping], "checkpoint": {"metric": "accuracy"}, **given}
        trainer = trainer_of(new_model(), None, place, rank_pool, folder=tmp_path / folder, epochs=3, **run)
        return trainer.fit((X, Y), (X, Y), **limit), seen, stopping

    whole, seen, stopping = part("whole", {})
    assert (seen.complete, seen.incomplete) == ([4, 8, 12], [])
    first, seen, _ = part("parts", {"max_steps": 6})
    assert (seen.complete, seen.incomplete) == ([4], [6])
    assert first.epochs[-1]["val_loss"] > 0
    second, seen, again = part("parts", {}, resume_from_checkpoint=True)
    assert (seen.complete, seen.incomplete) == ([4, 8, 12], [6])
    assert again.state_dict() == stopping.state_dict()
    assert second.best_accuracy == whole.best_accuracy
    assert Path(second.best_checkpoint or "").name == Path(whole.best_checkpoint or "").name
