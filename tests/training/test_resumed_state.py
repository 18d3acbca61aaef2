"""What a resumed run continues with: optimizers of several, carried state, callbacks, weights alone."""

from __future__ import annotations

import copy
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel

from distributed import Callback, Trainer, UserError
from distributed.interfaces.callback import Context
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer

NUM, SIZE, STEPS, EXACT = 36, 6, 12, 1e-12
X = torch.randn(NUM, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.arange(NUM) % 4
PLACES = [
    ("serial", 1, {}),
    ("pytorch-ddp", 3, {}),
    ("fsdp", 2, {}),
    ("deepspeed", 2, {"zero_stage": 1}),
]
IDS = [f"{name}-{ranks}" for name, ranks, _ in PLACES]
everywhere = pytest.mark.parametrize(("backend", "ranks", "fields"), PLACES, ids=IDS)
without_zero = pytest.mark.parametrize(("backend", "ranks", "fields"), PLACES[:3], ids=IDS[:3])


def new_model(classes: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, classes)).double()


def batches(first: int = 0, last: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    starts = [*range(0, NUM, SIZE)] * 2
    return [(X[i : i + SIZE], Y[i : i + SIZE]) for i in starts[first:last]]


def train(model: nn.Module, optimizer: Optimizer, first: int = 0, last: int = STEPS) -> Optimizer:
    """Steps of plain PyTorch."""
    for x, y in batches(first, last):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return optimizer


def distance(model: nn.Module, oracle: nn.Module) -> float:
    pairs = zip(model.state_dict().values(), oracle.state_dict().values(), strict=True)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


def fit(
    model: Any, pool: RankPool | None, ranks: int, folder: Path, steps: int = STEPS, **given: Any
) -> Trainer:
    """Train two epochs, or the first `steps`; resume if there is a checkpoint."""
    val = given.pop("val", None)
    options = {
        "global_batch_size": SIZE,
        "data": {"shuffle": False},
        "epochs": 2,
        "resume_from_checkpoint": True,
        "max_steps": steps,
        **given,
    }
    run = make_trainer(model, ranks, pool if ranks > 1 else None, folder=folder, **options)
    run.fit((X, Y), val)
    return run


# Optimizers.


@everywhere
def test_an_optimizer_of_another_kind_takes_over_the_state(
    backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool, tmp_path: Path
) -> None:
    """AdamW and Adam have the same state, and another decay."""
    oracle, rates = new_model(), {"lr": 0.05, "weight_decay": 0.5}
    saved = train(oracle, AdamW(oracle.parameters(), **rates), last=5).state_dict()
    optimizer = Adam(oracle.parameters(), **rates)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": saved["state"]})
    train(oracle, optimizer, first=5)
    given = {"backend": backend, "learning_rate": 0.05, "weight_decay": 0.5, **fields}
    fit(new_model(), rank_pool, ranks, tmp_path, 5, optimizer="adamw", **given)
    model = new_model()
    fit(model, rank_pool, ranks, tmp_path, optimizer="adam", **given)
    assert distance(model, oracle) < EXACT


@everywhere
@pytest.mark.parametrize("wins", ["saved", "given"])
def test_which_hyperparameters_win_is_said(
    wins: str,
    backend: str,
    ranks: int,
    fields: dict[str, Any],
    rank_pool: RankPool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture | None,
) -> None:
    def optimizer(rate: float, beta: float) -> Callable[[nn.Module], Optimizer]:
        return lambda model: Adam(model.parameters(), rate, betas=(beta, 0.99))

    oracle = new_model()
    plain = train(oracle, optimizer(0.05, 0.8)(oracle), last=5)
    if wins == "given":
        plain.param_groups[0].update(lr=0.02, betas=(0.5, 0.99))
    train(oracle, plain, first=5)
    options = {"checkpoint": {"hyperparameters": wins}, "backend": backend, **fields}
    fit(new_model(), rank_pool, ranks, tmp_path, 5, optimizer=optimizer(0.05, 0.8), **options)
    model = new_model()
    if caplog is not None:
        caplog.set_level(logging.INFO)
    fit(model, rank_pool, ranks, tmp_path, optimizer=optimizer(0.02, 0.5), **options)
    if caplog is not None and backend == "serial":  # started ranks report in processes of their own
        said = ", in place of" if wins == "given" else " has no effect: the run continues with"
        assert f"lr=0.02{said}" in caplog.text
        assert f"betas=(0.5, 0.99){said}" in caplog.text
        assert "weight_decay" not in caplog.text
    assert distance(model, oracle) < EXACT


def flattened(model: nn.Module) -> LBFGS:
    return LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")


def test_a_history_of_the_whole_model_is_resumed_on_other_backends(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    """LBFGS keeps one vector of all parameters, which no rank of FSDP holds by itself."""
    oracle = new_model()
    optimizer = flattened(oracle)
    for x, y in batches():

        def gradient(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(oracle(x), y)
            loss.backward()
            return loss

        optimizer.step(gradient)
    for last, backend, ranks in ((3, "fsdp", 2), (6, "serial", 1), (9, "fsdp", 3), (STEPS, "pytorch-ddp", 2)):
        model = new_model()
        fit(model, rank_pool, ranks, tmp_path, last, backend=backend, optimizer=flattened)
    assert distance(model, oracle) < EXACT


class Joined(Optimizer):
    """Optimizers of parts of a model, with a ``state_dict`` of all."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers, self.calls = optimizers, 0
        super().__init__([dict(group) for one in optimizers for group in one.param_groups], {"lr": 0.01})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for optimizer in self.optimizers[: 2 if self.calls % 3 else 1]:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"all": [one.state_dict() for one in self.optimizers], "calls": self.calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls = state_dict["calls"]
        for optimizer, state in zip(self.optimizers, state_dict["all"], strict=True):
            optimizer.load_state_dict(state)


class Averaged(SGD):
    """Keeps an average of the weights outside of its state, and pulls them towards it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.2, momentum=0.9)
        self.means = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        held = [p for group in self.param_groups for p in group["params"]]
        for mean, p in zip(self.means, held, strict=True):
            mean.lerp_(p, 0.5)
            p.lerp_(mean, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "means": self.means}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for mean, value in zip(self.means, state_dict["means"], strict=True):
            mean.copy_(value)
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


def joined(model: Any) -> Optimizer:
    return Joined(SGD(model[0].parameters(), 0.2, momentum=0.9), AdamW(model[2].parameters(), 0.05))


def averaged(model: nn.Module) -> Optimizer:
    return Averaged(model.parameters())


@without_zero
def test_joined_optimizers_are_resumed(
    backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool, tmp_path: Path
) -> None:
    oracle = new_model()
    train(oracle, joined(oracle))
    for steps in (5, STEPS):
        model = new_model()
        fit(model, rank_pool, ranks, tmp_path, steps, optimizer=joined, backend=backend, **fields)
    assert distance(model, oracle) < EXACT


@pytest.mark.parametrize(("backend", "ranks", "fields"), PLACES[:2], ids=IDS[:2])
@pytest.mark.parametrize("build", [joined, averaged], ids=lambda build: build.__name__)
def test_the_own_state_of_an_optimizer_object_is_resumed(
    build: Any, backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool, tmp_path: Path
) -> None:
    oracle = new_model()
    train(oracle, build(oracle))
    for steps in (5, STEPS):
        model = new_model()
        fit(model, rank_pool, ranks, tmp_path, steps, optimizer=build(model), backend=backend, **fields)
    assert distance(model, oracle) < EXACT


# Weights alone.


@everywhere
def test_weights_alone_are_taken_where_the_optimizer_does_not_fit(
    backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool, tmp_path: Path
) -> None:
    oracle = new_model()
    train(oracle, AdamW(oracle.parameters(), 0.05, weight_decay=0.0), last=6)
    train(oracle, SGD(oracle.parameters(), 0.2))
    given = {"backend": backend, **fields}
    first = fit(new_model(), rank_pool, ranks, tmp_path / "a", 6, learning_rate=0.05, **given)
    given |= {"optimizer": "sgd", "learning_rate": 0.2}
    with pytest.raises(UserError, match=r"only the weights: set init_from=.* and another checkpoint_dir"):
        fit(new_model(), rank_pool, ranks, tmp_path / "a", **given)
    assert first.history is not None
    for steps in (5, STEPS):  # the same command serves the restart
        model = new_model()
        given["init_from"] = first.history.checkpoint
        fit(model, rank_pool, ranks, tmp_path / "b", steps, **given)
    assert distance(model, oracle) < EXACT


@everywhere
def test_a_head_that_does_not_fit_stays_as_built(
    backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool, tmp_path: Path
) -> None:
    saved, oracle = new_model(), new_model(6)
    train(saved, SGD(saved.parameters(), 0.2), last=6)
    oracle[0].load_state_dict(saved[0].state_dict())
    train(oracle, SGD(oracle.parameters(), 0.2))
    given = {"backend": backend, "optimizer": "sgd", "learning_rate": 0.2, **fields}
    fit(new_model(), rank_pool, ranks, tmp_path / "a", 6, **given)
    model = new_model(6)
    fit(model, rank_pool, ranks, tmp_path / "b", init_from=tmp_path / "a", **given)
    assert distance(model, oracle) < EXACT


def test_what_does_not_fit_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(new_model(), None, 1, tmp_path / "a", 6, backend="serial")
    with caplog.at_level(logging.WARNING):
        fit(new_model(6), None, 1, tmp_path / "b", 6, backend="serial", init_from=tmp_path / "a")
    assert "As they were built: '2.bias', '2.weight'. Not used: '2.bias', '2.weight'" in caplog.text
    for wrong in (tmp_path / "none", tmp_path / "a"):
        with pytest.raises(UserError, match="init_from: no ") as caught:
            fit(nn.Linear(3, 6).double(), None, 1, tmp_path / "c", 6, backend="serial", init_from=wrong)
        assert caught.value.remedy


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, 4)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.second(self.first(x.to(self.head.weight.dtype)).tanh()))
        return result


def test_untied_weights_and_other_dtypes_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rank_pool: RankPool
) -> None:
    fit(Tied(True).double(), None, 1, tmp_path, 5, backend="serial")
    with caplog.at_level(logging.WARNING):
        fit(Tied(True).double(), None, 1, tmp_path, 6, backend="serial")
        assert caplog.text == ""
        fit(Tied(False).float(), None, 1, tmp_path, backend="serial")
    assert "are not in this model: 'second.weight' and 'first.weight' start with the same" in caplog.text
    assert "float64 in the checkpoint and float32 in this model" in caplog.text
    with pytest.raises(UserError, match=r"the model lacks: 'second\.weight'"):
        fit(Tied(True).float(), None, 1, tmp_path, STEPS + 1, backend="serial")


# State of the model.


class Carried(nn.Module):
    """Carries a hidden state from batch to batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell, self.head = nn.RNNCell(3, 5), nn.Linear(5, 4)
        self.kind = kind
        state = torch.zeros(SIZE, 5)
        if kind == "attribute":
            self.state: Any = state
        else:
            self.register_buffer("state", state, persistent=kind == "buffer")

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x, self.state[: len(x)].clone().to(x.dtype))
        if self.kind == "attribute":
            self.state = state.detach()
        else:
            with torch.no_grad():
                self.state[: len(x)] = state
        result: Tensor = self.head(state)
        return result


def carried(kind: str = "buffer") -> nn.Module:
    torch.manual_seed(0)
    return Carried(kind).double()


@pytest.mark.parametrize("kind", ["buffer", "not persistent"])
@pytest.mark.parametrize("backend", ["serial"])
def test_carried_state_is_resumed(kind: str, backend: str, tmp_path: Path) -> None:
    """A validation in between leaves it alone."""
    oracle = carried(kind)
    train(oracle, SGD(oracle.parameters(), 0.2))
    for steps in (4, 9, STEPS):
        model = carried(kind)
        options = {"backend": backend, "optimizer": "sgd", "learning_rate": 0.2, "val": (X, Y)}
        fit(model, None, 1, tmp_path, steps, **options)
    assert distance(model, oracle) < EXACT
    assert torch.equal(model.state, oracle.state)


@everywhere
def test_carried_state_is_refused_where_steps_have_several_micro_batches(
    backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool, tmp_path: Path
) -> None:
    options = {"backend": backend, **fields}
    if ranks == 1:
        options["gradient_accumulation_steps"] = 2
    for kind in ("buffer", "attribute"):
        options.pop("carried_state", None)
        with pytest.raises(UserError, match="carries state from one forward pass to the next") as caught:
            fit(carried(kind), rank_pool, ranks, tmp_path / kind, 2, **options)
        assert "set carried_state=per_rank" in str(caught.value)
        run = fit(
            carried(kind),
            rank_pool,
            ranks,
            tmp_path / "allowed" / kind,
            2,
            carried_state="per_rank",
            **options,
        )
        assert run.history is not None
        assert len(run.history.steps["loss"]) == 2


def test_carried_attributes_are_resumed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"backend": "serial", "optimizer": "sgd", "learning_rate": 0.2}
    oracle = carried("attribute")
    train(oracle, SGD(oracle.parameters(), 0.2))
    for steps in (5, 8, STEPS):
        model = carried("attribute")
        fit(model, None, 1, tmp_path, steps, **options)
    assert distance(model, oracle) < EXACT


class Remembers(nn.Linear):
    """Keeps its last output and a cache, on which nothing depends."""

    output: Any = None

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.cache = torch.ones(len(x)) if len(self.cache) < len(x) else self.cache
        self.output = super().forward(x) * self.cache[: len(x), None]
        return self.output


@everywhere
def test_caches_are_not_carried_state(
    backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Remembers().double()
    oracle = copy.deepcopy(model)
    train(oracle, SGD(oracle.parameters(), 0.2))
    for steps in (5, STEPS):
        own = copy.deepcopy(model)
        options = {"backend": backend, "optimizer": "sgd", "learning_rate": 0.2, **fields}
        fit(own, rank_pool, ranks, tmp_path, steps, **options)
    assert distance(own, oracle) < EXACT


# Callbacks.


class Average(Callback):
    """The moving average of the training page, made at the first step."""

    all_ranks = True
    average: Any = None

    def on_step_end(self, context: Context) -> None:
        with context.whole_model() as model:
            if self.average is None:
                self.average = copy.deepcopy(model)
            for mean, value in zip(self.average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 0.1)

    def values(self) -> list[Tensor]:
        return [*self.average.parameters()]


class Shadows(Callback):
    """An average in a dict, whose rate depends on its number of updates."""

    all_ranks = True

    def __init__(self) -> None:
        self.updates, self.shadows = 0, {}

    def on_step_end(self, context: Context) -> None:
        self.updates += 1
        with context.whole_model() as model:
            for name, value in model.named_parameters():
                before = self.shadows.setdefault(name, value.detach().clone())
                self.shadows[name] = before.lerp(value.detach(), 1 / (1 + self.updates))

    def values(self) -> list[Tensor]:
        return [*self.shadows.values()]


class Module(Callback):
    """torch's averaged model, made before training."""

    all_ranks = True

    def __init__(self) -> None:
        self.average = AveragedModel(new_model())

    def on_step_end(self, context: Context) -> None:
        with context.whole_model() as model:
            self.average.update_parameters(model)

    def values(self) -> list[Tensor]:
        return [*self.average.state_dict().values()]


@everywhere
@pytest.mark.parametrize("kind", [Average, Shadows, Module])
def test_an_average_without_a_state_of_its_own_is_resumed(
    kind: Any, backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool, tmp_path: Path
) -> None:
    found = []
    for folder, parts in (("whole", (STEPS,)), ("parts", (5, 8, STEPS))):
        for steps in parts:
            callback = kind()
            options = {"backend": backend, "callbacks": [callback], **fields}
            fit(new_model(), rank_pool, ranks, tmp_path / folder, steps, **options)
        found.append(callback.values())
    assert all((a - b).abs().max() < EXACT for a, b in zip(*found, strict=True))


class Meter:
    """Counts, as meters of training loops do."""

    def __init__(self) -> None:
        self.total, self.last = 0.0, [0.0]

    def add(self, value: float) -> None:
        self.total += value
        self.last.append(value)


class Collected(Callback):
    """What callbacks keep in containers and objects of their own, of which other names stay known."""

    def __init__(self) -> None:
        self.window, self.meter = deque([0.0], maxlen=3), Meter()
        self.kinds: Any = defaultdict(int)
        self.seen, self.array = {0}, np.zeros(2)
        self.all, self.nested = [0.0], {"meter": [0.0]}

    def on_run_start(self, context: Context) -> None:
        self.lock = threading.Lock()  # which no checkpoint can hold, and which is made again

    def on_step_end(self, context: Context) -> None:
        step = context.progress.step
        self.window.append(sum(self.window) + step)
        self.meter.add(self.meter.total + step)
        self.kinds[step % 4] += 1
        self.seen.add(step)
        self.array += step
        self.all.append(float(step))
        self.nested["meter"].append(self.array.sum())

    def values(self) -> list[Any]:
        return [*self.held(), self.meter.total, self.seen, self.array.tolist(), self.nested]

    def held(self) -> list[Any]:
        return [self.window, self.kinds, self.all, self.meter.last]


def test_containers_and_objects_of_callbacks_are_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for folder, parts in (("whole", (STEPS,)), ("parts", (5, 8, STEPS))):
        for steps in parts:
            callback = Collected()
            names = callback.held()
            fit(new_model(), None, 1, tmp_path / folder, steps, backend="serial", callbacks=[callback])
            assert all(a is b for a, b in zip(names, callback.held(), strict=True))
        found.append(callback.values())
    assert found[0] == found[1]
    assert "cannot hold" not in caplog.text


class Opaque(Callback):
    """Keeps what a checkpoint cannot hold, and changes it."""

    def __init__(self) -> None:
        self.numbers = iter(range(1000))

    def on_step_end(self, context: Context) -> None:
        next(self.numbers)


def test_an_attribute_that_a_checkpoint_cannot_hold_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(new_model(), None, 1, tmp_path, backend="serial", callbacks=[Opaque()])
    assert caplog.text.count("Opaque.numbers is of a kind that a checkpoint cannot hold") == 1


class Other(Callback):
    """Makes a module of another kind than the model."""

    head: Any = None

    def on_step_end(self, context: Context) -> None:
        if self.head is None:
            self.head = nn.Linear(7, 2)


class Initial(Other):
    """Makes it in __init__, as the remedy says."""

    def __init__(self) -> None:
        self.head = nn.Linear(7, 2)

    def on_step_end(self, context: Context) -> None:
        with torch.no_grad():
            self.head.weight += 1.0


def test_an_object_that_cannot_be_made_again_is_refused(tmp_path: Path) -> None:
    fit(new_model(), None, 1, tmp_path / "a", 5, backend="serial", callbacks=[Other()])
    with pytest.raises(UserError, match=r"Other\.head cannot be restored.*Make it in __init__"):
        fit(new_model(), None, 1, tmp_path / "a", backend="serial", callbacks=[Other()])
    weights = []
    for steps in (5, STEPS):
        callback = Initial()
        fit(new_model(), None, 1, tmp_path / "b", steps, backend="serial", callbacks=[callback])
        weights.append(callback.head.weight.detach().clone())
    assert torch.allclose(weights[1] - weights[0], torch.tensor(7.0))


# Losses.


class TwoTerms(nn.Module):
    """Weighs two terms by parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        terms = torch.stack([F.cross_entropy(output, target), (output**2).mean()])
        return (torch.exp(-self.scale) * terms + self.scale).sum()


class SeesTheModel(Callback):
    """Compares the model that a callback gets with the user's."""

    all_ranks = True

    def on_step_end(self, context: Context) -> None:
        with context.whole_model() as model:
            assert model.state_dict().keys() == new_model().state_dict().keys()


@everywhere
@pytest.mark.parametrize("given", ["name", "class", "object", "object without them"])
def test_parameters_of_a_loss_are_trained_and_resumed(
    given: str, backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool, tmp_path: Path
) -> None:
    def optimizer(model: nn.Module, loss: nn.Module) -> Optimizer:
        own = [] if given == "object without them" else loss.parameters()
        return SGD([*model.parameters(), *own], 0.2, momentum=0.9)

    oracle, right = new_model(), TwoTerms()
    plain = optimizer(oracle, right)
    for x, y in batches():
        plain.zero_grad()
        right(oracle(x), y).backward()
        plain.step()
    for steps in (5, STEPS):
        model, loss = new_model(), TwoTerms()
        named: Any = {"optimizer": "sgd", "learning_rate": 0.2, "momentum": 0.9}
        if given != "name":
            named = {"optimizer": optimizer(model, loss)}
        if given == "class":
            named = {"optimizer": lambda both: SGD(both.parameters(), 0.2, momentum=0.9)}
        options = {"backend": backend, "loss_fn": loss, "callbacks": [SeesTheModel()], **named, **fields}
        fit(model, rank_pool, ranks, tmp_path, steps, **options)
    assert distance(model, oracle) < EXACT
    assert (loss.scale - right.scale).abs().max() < EXACT


def penalized(model: Any, batch: Any) -> Tensor:
    x = batch[0].clone().requires_grad_(True)
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return F.cross_entropy(output, batch[1]) + 0.1 * ((slope.norm(dim=1) - 1) ** 2).mean()


def measured(model: Any, batch: Any) -> dict[str, Any]:
    return {"loss": (penalized(model, batch) * len(batch[0]), len(batch[0]))}


@everywhere
@pytest.mark.parametrize("step", [None, measured], ids=["training_step", "validation_step"])
def test_a_validation_may_differentiate(
    step: Any, backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool, tmp_path: Path
) -> None:
    oracle = new_model()
    optimizer = SGD(oracle.parameters(), 0.2)
    for x, y in batches():
        optimizer.zero_grad()
        penalized(oracle, (x, y)).backward()
        optimizer.step()
    model = new_model()
    options = {"backend": backend, "training_step": penalized, "validation_step": step, **fields}
    options |= {"optimizer": "sgd", "learning_rate": 0.2, "val": (X[:13], Y[:13])}
    run = fit(model, rank_pool, ranks, tmp_path, **options)
    assert distance(model, oracle) < EXACT
    assert run.history is not None
    assert abs(run.history.epochs[-1]["val_loss"] - penalized(oracle, (X[:13], Y[:13])).item()) < EXACT


@everywhere
def test_a_finished_run_has_empty_series(
    backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool, tmp_path: Path
) -> None:
    for _ in range(2):
        run = fit(new_model(), rank_pool, ranks, tmp_path, 5, backend=backend, **fields)
    assert run.history is not None
    assert run.history.steps == {"step": [], "loss": [], "learning_rate": []}
