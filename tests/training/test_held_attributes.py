"""What training changes beside weights and moments is there in a second fit and in a resumed run."""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import SGD, Optimizer

from distributed import Callback, UserError
from distributed.interfaces.callback import Context
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer

SIZE, PER_EPOCH, EPOCHS, EXACT = 6, 4, 3, 1e-12
X = torch.randn(SIZE * PER_EPOCH, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.arange(len(X)) % 4
BATCHES = [(X[i : i + SIZE], Y[i : i + SIZE]) for i in range(0, len(X), SIZE)]
PLACES = {
    "serial": ("serial", 1, {}),
    "ddp": ("pytorch-ddp", 2, {}),
    "fsdp": ("fsdp", 2, {}),
    "zero": ("deepspeed", 2, {"zero_stage": 1}),
}


class Net(nn.Module):
    """A model with a temperature that a forward pass in training raises, if it `counts`."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last = nn.Linear(3, 5), nn.LeakyReLU(0.01), nn.Linear(5, 4)
        self.counts, self.calls = counts, 0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.counts and self.training
        result: Tensor = self.last(self.act(self.first(x))) / (1 + 0.1 * self.calls)
        return result


class Case:
    """Objects of a script.

    Attributes:
        kept: a module outside of the model, which returns as well.
    """

    def __init__(self, **given: Any) -> None:
        self.model: Any = given.pop("model", None) or Net()
        self.optimizer: Any = given.pop("optimizer", momentum)(self.model)
        self.kept: nn.Module = given.pop("kept", nn.Identity())
        self.callbacks: list[Acts] = given.pop("callbacks", [])
        self.given = given or {"loss_fn": F.cross_entropy}

    def loss(self, batch: Any) -> Any:
        if "training_step" in self.given:
            return self.given["training_step"](self.model, batch)
        return self.given["loss_fn"](self.model(batch[0]), batch[1])

    def train(self) -> Case:
        """Plain PyTorch."""
        for epoch in range(1, EPOCHS + 1):
            for batch in BATCHES:
                self.optimizer.zero_grad()
                self.loss(batch).backward()
                self.optimizer.step()
            for callback in self.callbacks:
                callback.act(self.model, self.optimizer, epoch)
        return self


class Acts(Callback):
    """Does something after each epoch."""

    all_ranks = True

    def __init__(self, act: Any) -> None:
        self.act = act

    def on_epoch_end(self, context: Context, metrics: Any) -> None:
        self.act(context.model, context.optimizer, context.progress.epoch)


def momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), 0.1, momentum=0.9)


def counter() -> Case:
    return Case(model=Net(counts=True))


def slope() -> Case:
    def raise_slope(model: Any, optimizer: Any, epoch: int) -> None:
        if epoch == 1:
            model.act.negative_slope = 0.5

    return Case(callbacks=[Acts(raise_slope)])


def frozen() -> Case:
    def freeze(model: Any, optimizer: Any, epoch: int) -> None:
        if epoch == 1:
            model.first.requires_grad_(False)

    return Case(callbacks=[Acts(freeze)], optimizer=lambda model: SGD(model.parameters(), 0.1))


class WarmsUp(SGD):
    """Counts its steps in an attribute."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1, momentum=0.9)
        self.num_steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        self.param_groups[0]["lr"] = 0.1 * min(1.0, self.num_steps / 9)
        super().step()


def optimizer_counter() -> Case:
    return Case(optimizer=lambda model: WarmsUp(model.parameters()))


class Beside(Optimizer):
    """Keeps momentum in a list and in a dict, beside its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.means: list[Tensor] | None = None
        self.sums: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = self.param_groups[0]["params"]
        if self.means is None:
            self.means = [torch.zeros_like(p) for p in held]
        for p, mean in zip(held, self.means, strict=True):
            total = self.sums.setdefault(p, torch.zeros_like(p))
            mean.lerp_(p.grad, 0.3)
            total.mul_(0.5).add_(mean)
            p.sub_(total, alpha=0.1)


def optimizer_tensors() -> Case:
    return Case(optimizer=lambda model: Beside(model.parameters()))


class Anneals:
    """A loss that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += torch.is_grad_enabled()
        return F.cross_entropy(output, target) * min(1.0, self.calls / 9)


def loss_counter() -> Case:
    return Case(loss_fn=Anneals())


class AnnealsBuffer(nn.Module):
    """The same with a buffer, and one that checkpoints leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64), persistent=False)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        self.scale = self.scale * 0.9
        return F.cross_entropy(output, target) * (self.calls / 9).clamp(max=1) * self.scale


def loss_buffer() -> Case:
    return Case(loss_fn=AnnealsBuffer())


def step_variable() -> Case:
    calls = 0

    def training_step(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return F.cross_entropy(model(batch[0]), batch[1]) * min(1.0, calls / 9)

    return Case(training_step=training_step)


def teacher() -> Case:
    mean = Net().requires_grad_(False)

    def training_step(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            mean.first.weight.data.mul_(0.9).add_(batch[0].mean() * 0 + 0.1)
        return F.mse_loss(model(batch[0]), mean(batch[0]))

    return Case(training_step=training_step, kept=mean)


def hooks() -> Case:
    """A hook of the optimizer averages weights that no gradient has, and one of a module counts."""
    average, calls = nn.Linear(1, 1).double(), [0]

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        average.weight.data.mul_(0.5).add_(optimizer.param_groups[0]["lr"])
        optimizer.param_groups[0]["lr"] = 0.1 * average.weight.abs().item()

    def before_forward(module: Any, args: Any) -> Any:
        calls[0] += 1
        return (args[0] * (1 + 0.1 * calls[0]),)

    def optimizer(model: nn.Module) -> Optimizer:
        found = momentum(model)
        found.register_step_post_hook(after_step)
        return found

    model = Net()
    model.first.register_forward_pre_hook(before_forward)
    with torch.no_grad():
        average.weight.fill_(1.0)
    return Case(model=model, optimizer=optimizer, kept=average)


KINDS: list[Callable[[], Case]] = [
    *(counter, slope, frozen, optimizer_counter, optimizer_tensors),
    *(loss_counter, loss_buffer, step_variable, teacher, hooks),
]
NOT_ON_ZERO = (optimizer_tensors,)


def distance(first: Any, second: Any) -> float:
    states = [
        case.model.state_dict() | {f"kept {k}": v for k, v in case.kept.state_dict().items()}
        for case in (first, second)
    ]
    assert states[0].keys() == states[1].keys()
    return max((value - states[1][name]).abs().max().item() for name, value in states[0].items())


def trainer(case: Case, place: str, pool: RankPool | None, **fields: Any) -> Any:
    backend, ranks, more = PLACES[place]
    options = {"global_batch_size": SIZE, "data": {"shuffle": False}, **more, **case.given, **fields}
    options |= {"optimizer": case.optimizer, "callbacks": case.callbacks}
    return make_trainer(case.model, ranks, pool if ranks > 1 else None, backend=backend, **options)


def resume(build: Callable[[], Case], place: str, pool: RankPool, folder: Path, **fields: Any) -> Case:
    """Train five steps, and the rest with new objects."""
    for steps in (5, EPOCHS * PER_EPOCH):
        case = build()
        fields |= {"epochs": EPOCHS, "max_steps": steps, "resume_from_checkpoint": True}
        trainer(case, place, pool, folder=folder, **fields).fit((X, Y))
    return case


def cases(*left_out: Callable[[], Case]) -> Any:
    pairs = [(kind, place) for place in PLACES for kind in KINDS if place != "zero" or kind not in left_out]
    return pytest.mark.parametrize(
        ("build", "place"), pairs, ids=[f"{kind.__name__}-{place}" for kind, place in pairs]
    )


@cases(*NOT_ON_ZERO)
def test_a_second_fit_continues_with_it(build: Callable[[], Case], place: str, rank_pool: RankPool) -> None:
    case = build()
    run = trainer(case, place, rank_pool)
    run.fit((X, Y), epochs=1)
    run.fit((X, Y), epochs=EPOCHS - 1)
    assert distance(case, build().train()) < EXACT


@cases(*NOT_ON_ZERO)
def test_a_resumed_run_continues_with_it(
    build: Callable[[], Case], place: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    assert distance(resume(build, place, rank_pool, tmp_path), build().train()) < EXACT


# Callbacks.


class Phase(Enum):
    WARM = 1
    LATE = 2


class Drawn:
    """Sets the rate by what it holds, and changes that."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.held: Any = {
            "random": random.Random(3),
            "numpy": np.random.default_rng(3),
            "torch": torch.Generator().manual_seed(3),
            "member": Phase.WARM,
            "data": torch.ones(3, dtype=torch.float64),
            "view": torch.ones(3, dtype=torch.float64),
        }[kind]

    def value(self) -> float:
        if self.kind == "torch":
            return torch.rand((), generator=self.held).item()
        if self.kind == "member":
            self.held = Phase.LATE if self.held is Phase.WARM else Phase.WARM
            return float(self.held.value)
        if self.kind == "data":
            self.held.data.mul_(0.5)
        if self.kind == "view":
            self.held.numpy()[:] *= 0.5
        return self.held.sum().item() if isinstance(self.held, Tensor) else float(self.held.random())

    def act(self, model: Any, optimizer: Any, epoch: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.value())


class Draws(Acts):
    def __init__(self, kind: str) -> None:
        self.drawn = Drawn(kind)

    def act(self, model: Any, optimizer: Any, epoch: int) -> None:
        self.drawn.act(model, optimizer, epoch)


@pytest.mark.parametrize("place", ["serial", "ddp"])
@pytest.mark.parametrize("kind", ["random", "numpy", "torch", "member", "data", "view"])
def test_generators_members_and_tensors_of_callbacks_are_resumed(
    kind: str, place: str, rank_pool: RankPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def build() -> Case:
        return Case(callbacks=[Draws(kind)])

    assert distance(resume(build, place, rank_pool, tmp_path), build().train()) < EXACT
    assert "cannot hold" not in caplog.text


def pruned() -> Case:
    def cut(model: Any, optimizer: Any, epoch: int) -> None:
        if epoch == 1:
            prune.l1_unstructured(model.first, "weight", 0.4)

    return Case(callbacks=[Acts(cut)])


@pytest.mark.parametrize("place", ["serial", "ddp"])
def test_parts_that_a_callback_replaces_return(place: str, rank_pool: RankPool) -> None:
    case, oracle = pruned(), pruned().train()
    weight, run = case.model.first.weight, trainer(case, place, rank_pool)
    run.fit((X, Y), epochs=2)
    assert case.model.first.weight_orig is weight
    run.fit((X, Y), epochs=1)
    assert distance(case, oracle) < EXACT
    prune.remove(case.model.first, "weight")
    prune.remove(oracle.model.first, "weight")
    assert distance(case, oracle) < EXACT


# What a script says.


@pytest.mark.parametrize("place", ["serial", "ddp"])
def test_what_training_has_not_changed_is_as_the_script_says(
    place: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    """A resumed run, with another slope and another frozen layer, and the count of the first run."""

    def changed(case: Case) -> Case:
        case.model.act.negative_slope = 0.5
        case.model.first.requires_grad_(False)
        return case

    oracle, case = counter(), counter()
    trainer(oracle, "serial", None, folder=tmp_path / "a").fit((X, Y), epochs=1)
    trainer(case, place, rank_pool, folder=tmp_path / "b").fit((X, Y), epochs=1)
    changed(oracle)
    for batch in BATCHES * 2:
        oracle.optimizer.zero_grad()
        oracle.loss(batch).backward()
        oracle.optimizer.step()
    case = changed(counter())
    fields = {"epochs": EPOCHS, "resume_from_checkpoint": True}
    trainer(case, place, rank_pool, folder=tmp_path / "b", **fields).fit((X, Y))
    assert distance(case, oracle) < EXACT


def counting_model() -> nn.Module:
    return Net(counts=True)


def warming(model: nn.Module) -> Optimizer:
    return WarmsUp(model.parameters())


@pytest.mark.parametrize("place", ["serial", "ddp", "fsdp"])
def test_what_ranks_build_is_continued_by_a_second_fit(
    place: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    case, oracle = counter(), Case(model=Net(counts=True), optimizer=warming).train()
    case.model, case.optimizer = counting_model, warming
    run = trainer(case, place, rank_pool, folder=tmp_path)
    run.fit((X, Y), epochs=1)
    run.fit((X, Y), epochs=1)
    run = trainer(case, place, rank_pool, folder=tmp_path, epochs=EPOCHS, resume_from_checkpoint=True)
    run.fit((X, Y))  # resumes what the second fit has saved
    resumed = counter()
    case.model = resumed.model
    run = trainer(case, "serial", None, folder=tmp_path, epochs=EPOCHS, resume_from_checkpoint=True)
    run.fit((X, Y))
    assert distance(resumed, oracle) < EXACT


class Nested(Beside):
    """Keeps momentum in a nested list, in which no tensor is assigned to a parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.means, self.pairs = None, [(p.clone(), 1) for p in self.param_groups[0]["params"]]


def test_tensors_that_have_no_place_are_refused(rank_pool: RankPool) -> None:
    case = Case()
    # A class calls hooks in its step once it has objects, here inside of that of Nested.
    case.optimizer = lambda model: [kind(model.parameters()) for kind in (Beside, Nested)][1]
    with pytest.raises(UserError, match="in its attribute 'pairs'") as caught:
        trainer(case, "fsdp", rank_pool).fit((X, Y), epochs=1)
    assert caught.value.remedy.startswith("Keep them in self.state[parameter]")
    trainer(case, "ddp", rank_pool).fit((X, Y), epochs=1)


class Opaque(Anneals):
    """Keeps an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = iter(range(1000))

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        next(self.rates)
        return super().__call__(output, target)


def test_what_a_checkpoint_cannot_hold_of_a_loss_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resume(lambda: Case(loss_fn=Opaque()), "serial", None, tmp_path, checkpoint={"every_n_steps": 1})  # type: ignore[arg-type]
    assert caplog.text.count("loss_fn.rates is of a kind that a checkpoint cannot hold") == 2
