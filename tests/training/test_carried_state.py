"""State that a model or its loss carries from one forward pass to the next, wherever it is held."""

from __future__ import annotations

import itertools
import re
from collections import deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distributed import UserError
from distributed.testing.conformance import distance, problem
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer

X, Y = problem(24)
EXACT = 1e-12
SETTINGS = {"serial": (1, 4), "accumulation": (1, 2), "pytorch-ddp": (2, 2)}
"""Setting -> ranks and samples of a micro-batch, of global batches of 4."""
Step = Callable[[nn.Module, Any], Tensor]


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


class Net(nn.Module):
    """A model that carries nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        torch.manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result


class Momentum(Net):
    """Predicts what a momentum encoder computes, and keeps its last output and a count beside it."""

    how = "direct"
    last: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp(1).requires_grad_(False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        with torch.no_grad():
            for own, new in zip(self.encoder.parameters(), self.net.parameters(), strict=True):
                if self.how == "assigned":
                    own.data = own.data * 0.9 + new.data * 0.1
                elif self.how == "data":
                    own.data.mul_(0.9).add_(new.data, alpha=0.1)
                else:
                    own.mul_(0.9).add_(new, alpha=0.1)
            target = self.encoder(x)
        self.last = self.net(x)
        result: Tensor = self.last + target
        return result


class Assigned(Momentum):
    how = "assigned"


class Data(Momentum):
    how = "data"


class Queue(Momentum):
    """Multiplies by similarities with a queue of earlier outputs."""

    how = "assigned"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(8, 3).double())
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        result = out * (out @ self.queue.clone().t()).mean(1, keepdim=True)
        with torch.no_grad():
            self.queue[int(self.place) : int(self.place) + len(x)] = out
            self.place.copy_((self.place + len(x)) % 8)
        return result


class Bank(Net):
    """Reads its memory from the fourth forward pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(3).double())
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        result = out + self.bank if self.calls >= 3 else out
        self.calls += 1
        self.bank.mul_(0.5).add_(out.detach().mean(0))
        return result


Pair = namedtuple("Pair", "first second")


class Box:
    """A plain object."""

    value: Any = None


class Hidden(Net):
    """Adds the mean of the last outputs, which is held by something else than a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Any = self.first()

    def first(self) -> Any:
        return torch.zeros(3).double()

    def read(self) -> Tensor:
        result: Tensor = self.held.clone()
        return result

    def write(self, value: Tensor) -> None:
        self.held.copy_(value)

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x) + self.read()
        self.write(result.detach().mean(0))
        return result


class HiddenByData(Hidden):
    def write(self, value: Tensor) -> None:
        self.held.data = value


class HiddenInDeque(Hidden):
    def first(self) -> Any:
        return deque([torch.zeros(3).double()], maxlen=1)

    def read(self) -> Tensor:
        result: Tensor = self.held[0]
        return result

    def write(self, value: Tensor) -> None:
        self.held.append(value)


class HiddenInTuple(HiddenInDeque):
    def first(self) -> Any:
        return Pair(torch.zeros(3).double(), None)

    def write(self, value: Tensor) -> None:
        self.held = Pair(value, None)


class HiddenInObject(Hidden):
    def first(self) -> Any:
        box = Box()
        box.value = {"mean": torch.zeros(3).double()}
        return box

    def read(self) -> Tensor:
        result: Tensor = self.held.value["mean"]
        return result

    def write(self, value: Tensor) -> None:
        self.held.value["mean"] = value


class HiddenInArray(Hidden):
    def first(self) -> Any:
        return np.zeros(3)

    def read(self) -> Tensor:
        return torch.from_numpy(self.held.copy())

    def write(self, value: Tensor) -> None:
        self.held[...] = value.numpy()


class Annealed(Net):
    """Divides by a number that it counts up."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / (1 + 0.1 * self.calls)


class AnnealedLoss:
    """Weighs the loss by a number that it counts up."""

    calls = 0

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(out, y) * min(1.0, self.calls / 10)


class Centred(nn.Module):
    """Subtracts the mean of earlier outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3).double())

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(out - self.centre, y)
        self.centre = 0.9 * self.centre + 0.1 * out.detach().mean(0)
        return loss


class CentredPlain:
    """As `Centred`, without a module."""

    def __init__(self) -> None:
        self.centre = torch.zeros(3).double()

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(out - self.centre, y)
        self.centre.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
        return loss


def annealed_step() -> Step:
    state = {"calls": 0}

    def step(model: nn.Module, batch: Any) -> Tensor:
        state["calls"] += 1
        return F.cross_entropy(model(batch[0]), batch[1]) * min(1.0, state["calls"] / 10)

    return step


def attribute_step() -> Step:
    def step(model: nn.Module, batch: Any) -> Tensor:
        step.calls = getattr(step, "calls", 0) + 1  # type: ignore[attr-defined]
        return F.cross_entropy(model(batch[0]), batch[1]) * min(1.0, step.calls / 10)  # type: ignore[attr-defined]

    return step


def drawing_step() -> Step:
    more = itertools.cycle(torch.arange(1.0, 9.0).tolist())
    kept = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        kept.append(loss.item())
        return loss * next(more)

    return step


def teacher_step() -> Step:
    teacher = mlp(1)

    def step(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            for own, new in zip(teacher.parameters(), model.parameters(), strict=True):
                own.data.mul_(0.9).add_(new.data, alpha=0.1)
            target = teacher(batch[0])
        return F.mse_loss(model(batch[0]), target)

    return step


def collecting_step() -> Step:
    seen: list[float] = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        seen.append(loss.item())
        return loss

    return step


def spectral(new: bool = False) -> nn.Module:
    model = Net()
    norm = nn.utils.parametrizations.spectral_norm if new else nn.utils.spectral_norm
    norm(model.net[0])
    return model


def spectral_parametrization() -> nn.Module:
    return spectral(new=True)


class Caching(Net):
    """Keeps outputs, a cache that grows, counters and an average that only an evaluation would read."""

    output: Any = None
    samples = 0

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(3).double()
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.norms: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.cache = torch.ones(len(x)) if len(self.cache) < len(x) else self.cache
        self.output = super().forward(x) * self.cache[: len(x), None]
        self.samples += len(x)
        self.norms.append(self.output.norm().item())
        self.average.lerp_(self.output.detach().mean(0), 0.1)
        return self.output


class Drawing(Net):
    """Draws from generators of its own, beside an output that it keeps, and writes weights as an array."""

    output: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.array_generator = torch.Generator().manual_seed(5), np.random.default_rng(5)
        self.frozen = mlp(1).requires_grad_(False)
        self.calls: deque[int] = deque(maxlen=3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(self.calls))
        self.frozen[0].weight.numpy()[...] *= 1.01
        self.net[0].weight.detach().numpy()[...] *= 0.99
        kept = torch.rand(x.shape, generator=self.generator) < 0.7
        scale = 1 + 0.1 * self.array_generator.random()
        self.output = super().forward(x * kept) * scale + self.frozen(x)
        return self.output


def trained(model: nn.Module, loss: Any = F.cross_entropy, step: Any = None) -> nn.Module:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3, momentum=0.9)
    for start in range(0, 24, 4):
        batch = X[start : start + 4], Y[start : start + 4]
        optimizer.zero_grad()
        (step(model, batch) if step is not None else loss(model(batch[0]), batch[1])).backward()
        optimizer.step()
    return model


def fit(model: Any, setting: str, pool: RankPool, **given: Any) -> nn.Module:
    ranks, size = SETTINGS[setting]
    options: dict[str, Any] = {
        "global_batch_size": 4,
        "batch_size": size,
        "data": {"shuffle": False},
        **given,
    }
    if "training_step" not in given:
        options.setdefault("loss_fn", F.cross_entropy)
    trainer = make_trainer(
        model,
        ranks,
        pool if ranks > 1 else None,
        optimizer=lambda m: torch.optim.SGD(
            [p for p in m.parameters() if p.requires_grad], lr=0.3, momentum=0.9
        ),
        **options,
    )
    trainer.fit((X, Y))
    result: nn.Module = trainer.model
    return result


ALONE, BOTH = {"accumulation"}, {"accumulation", "pytorch-ddp"}
KINDS: list[tuple[Callable[[], nn.Module], dict[str, Callable[[], Any]], str, set[str]]] = [
    (Momentum, {}, "encoder.0.weight", ALONE),
    (Assigned, {}, "encoder.0.weight", ALONE),
    (Data, {}, "encoder.0.weight", ALONE),
    (Queue, {}, "encoder.0.weight|queue", BOTH),
    (Bank, {}, "bank", BOTH),
    (Hidden, {}, "held", BOTH),
    (HiddenByData, {}, "held", BOTH),
    (HiddenInDeque, {}, "held.0", BOTH),
    (HiddenInTuple, {}, "held.0", BOTH),
    (HiddenInObject, {}, "held.value.mean", BOTH),
    (HiddenInArray, {}, "held", BOTH),
    (Annealed, {}, "calls", ALONE),
    (Net, {"loss_fn": AnnealedLoss}, "loss_fn.calls", ALONE),
    (Net, {"loss_fn": Centred}, "loss_fn.centre", BOTH),
    (Net, {"loss_fn": CentredPlain}, "loss_fn.centre", BOTH),
    (Net, {"training_step": annealed_step}, "training_step.state.calls", ALONE),
    (Net, {"training_step": attribute_step}, "training_step.calls", ALONE),
    (Net, {"training_step": drawing_step}, "training_step.more", BOTH),
    (Net, {"training_step": teacher_step}, "training_step.teacher.0.weight", ALONE),
    (spectral, {}, "net.0.weight_u", ALONE),
    (spectral_parametrization, {}, "net.0.parametrizations.weight.0._u", ALONE),
]


@pytest.mark.parametrize(
    ("build", "parts", "name", "refused"),
    KINDS,
    ids=lambda v: v.__name__ if callable(v) else v if isinstance(v, str) else "",
)
def test_exact_or_refused(
    build: Callable[[], nn.Module],
    parts: dict[str, Callable[[], Any]],
    name: str,
    refused: set[str],
    rank_pool: RankPool,
) -> None:
    made = {part: make() for part, make in parts.items()}
    oracle = trained(build(), made.get("loss_fn", F.cross_entropy), made.get("training_step"))
    for setting in SETTINGS:
        given = {part: make() for part, make in parts.items()}
        model = build if build is spectral_parametrization else build()  # a parametrized model has no pickle
        if setting not in refused:
            assert distance(fit(model, setting, rank_pool, **given), oracle) < EXACT, setting
            continue
        with pytest.raises(UserError, match="carries state from one forward pass to the next") as caught:
            fit(model, setting, rank_pool, **given)
        assert re.search(rf"\('({name})'", str(caught.value)), setting
        assert "set carried_state=per_rank" in caught.value.remedy
        fit(build, setting, rank_pool, carried_state="per_rank", **given)


@pytest.mark.parametrize(("build", "parts"), [(Caching, {}), (Net, {"training_step": collecting_step})])
def test_state_on_which_the_loss_does_not_depend_is_allowed(
    build: Any, parts: dict[str, Any], rank_pool: RankPool, tmp_path: Path
) -> None:
    oracle = trained(build(), step=parts["training_step"]() if parts else None)
    for setting in SETTINGS:
        given = {part: make() for part, make in parts.items()}
        folder = str(tmp_path / setting)
        assert distance(fit(build(), setting, rank_pool, checkpoint_dir=folder, **given), oracle) < EXACT
    if build is Caching:
        assert len(fit(Caching(), "accumulation", rank_pool).norms) == 12


def test_the_search_leaves_everything_as_it_was(rank_pool: RankPool) -> None:
    """Of what the loss depends on, it is searched for `output` alone; with per_rank there is no search."""
    model, oracle = Drawing(), Drawing()
    fit(oracle, "pytorch-ddp", rank_pool, carried_state="per_rank")
    fit(model, "pytorch-ddp", rank_pool)
    assert distance(model, oracle) == 0.0
    assert model.calls == oracle.calls
    assert torch.equal(model.generator.get_state(), oracle.generator.get_state())
    assert model.array_generator.bit_generator.state == oracle.array_generator.bit_generator.state


@pytest.mark.parametrize("kind", [Momentum, Assigned, Data])
def test_weights_that_shards_would_lose_are_refused(kind: Any, rank_pool: RankPool) -> None:
    with pytest.raises(UserError, match=r"'encoder\.0\.weight' was changed outside the optimizer"):
        fit(kind(), "pytorch-ddp", rank_pool, backend="fsdp")
