"""Optimizers with modes or closures, and parameters that training adds, as plain PyTorch has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from distributed import Callback
from distributed.checkpoint.reader import PortableReader
from distributed.checkpoint.torch_state import load_full_model
from distributed.errors import UserError
from distributed.interfaces.callback import Context
from distributed.testing.conformance import distance
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer

NUM, SIZE, EXACT = 30, 12, 1e-12
X = torch.randn(NUM, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True).sin()
PLAIN = [("serial", 1, {}), ("pytorch-ddp", 3, {}), ("fsdp", 2, {})]
ACCUMULATING = ("pytorch-ddp", 2, {"gradient_accumulation_steps": 2})
ZERO = [("deepspeed", 2, {"zero_stage": stage}) for stage in (0, 1, 3)]
Place = tuple[str, int, dict[str, Any]]


def on(*places: Place) -> Any:
    names = [f"{name}-{ranks}{''.join(f'-{v}' for v in fields.values())}" for name, ranks, fields in places]
    return pytest.mark.parametrize("place", places, ids=names)


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def fit(
    model: nn.Module, place: Place, pool: RankPool | None, optimizer: Any, epochs: int = 2, **given: Any
) -> Any:
    backend, ranks, fields = place
    run = {"backend": backend, "data": {"shuffle": False}, "loss_fn": nn.MSELoss(), **fields, **given}
    trainer = make_trainer(model, ranks, pool, optimizer=optimizer, global_batch_size=SIZE, **run)
    trainer.fit((X, Y), (X, Y), epochs=epochs)
    return trainer


def train_epoch(model: nn.Module, optimizer: Any, clip: float | None = None, closure: bool = False) -> None:
    """An epoch of plain PyTorch."""
    for i in range(0, NUM, SIZE):

        def gradient(i: int = i) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(X[i : i + SIZE]), Y[i : i + SIZE])
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            return loss

        gradient()
        optimizer.step(*([gradient] if closure else []))


# -- modes -----------------------------------------------------------------------------------


class ScheduleFree(Optimizer):
    """SGD whose gradients are taken between the iterate and its average, which is evaluated (Defazio et al.,
    The Road Less Scheduled, 2024)."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _move(self, train_mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train_mode:
                weight = 1 - group["beta"] if train_mode else 1 - 1 / group["beta"]
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(end=self.state[p]["z"], weight=weight)
                group["train_mode"] = train_mode

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("the optimizer is not in training mode")
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(end=z, weight=1 / group["k"])
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1))
                z.sub_(p.grad, alpha=group["lr"])


def averaging(model: nn.Module) -> ScheduleFree:
    return ScheduleFree(model.parameters())


def evaluated_losses(epochs: int) -> tuple[nn.Module, list[float]]:
    model = new_model()
    optimizer, losses = averaging(model), []
    for _ in range(epochs):
        optimizer.train()
        train_epoch(model, optimizer)
        optimizer.eval()
        losses.append(nn.functional.mse_loss(model(X), Y).item())
    return model, losses


@on(*PLAIN, ACCUMULATING, ZERO[0])
def test_modes_of_an_optimizer(place: Place, rank_pool: RankPool) -> None:
    oracle, losses = evaluated_losses(4)
    model = new_model()
    trainer = fit(model, place, rank_pool, averaging, epochs=3)
    assert [e["val_loss"] for e in trainer.history.epochs] == pytest.approx(losses[:3], abs=EXACT)
    assert distance(model, evaluated_losses(3)[0]) < EXACT
    trainer.fit((X, Y), epochs=1)
    assert distance(model, oracle) < EXACT


@on(*PLAIN)
def test_an_optimizer_with_modes_is_resumed(place: Place, rank_pool: RankPool, tmp_path: Path) -> None:
    """The checkpoint within an epoch has the weights to evaluate."""
    oracle, _ = evaluated_losses(2)
    every = {"folder": tmp_path, "checkpoint": {"every_n_steps": 2}}
    fit(new_model(), place, rank_pool, averaging, max_steps=5, **every)
    model = new_model()
    fit(model, place, rank_pool, averaging, resume_from_checkpoint=True, **every)
    assert distance(model, oracle) < EXACT
    saved = new_model()
    optimizer = averaging(saved)
    optimizer.train()
    train_epoch(saved, optimizer)
    optimizer.eval()
    fresh = new_model()
    load_full_model(PortableReader(str(tmp_path / "step_00000003")), fresh)
    assert distance(fresh, saved) < EXACT


@on(*ZERO[1:])
def test_zero_refuses_modes(place: Place, rank_pool: RankPool) -> None:
    """The remedy is tested above."""
    given = {"deepspeed_config": {"zero_allow_untested_optimizer": True}}
    with pytest.raises(UserError, match=r"has train\(\) and eval\(\).*Set zero_stage=0"):
        fit(new_model(), place, rank_pool, averaging, **given)


# -- closures --------------------------------------------------------------------------------


class SharpnessAware(SGD):
    """Takes the gradient at the weights moved along the gradient (Foret et al., 2021)."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        parameters = [p for group in self.param_groups for p in group["params"]]
        loss = torch.enable_grad()(closure)()
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        moves = [0.5 * p.grad / norm for p in parameters]
        for p, move in zip(parameters, moves, strict=True):
            p.data.add_(move)
        torch.enable_grad()(closure)()
        for p, move in zip(parameters, moves, strict=True):
            p.data.sub_(move)
        super().step()
        return loss


class NeedsClosure(SharpnessAware):
    def step(self, closure: Any) -> Any:
        return super().step(closure)


class LossSized(SGD):
    """A step as long as the loss."""

    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise RuntimeError("needs a closure")
        loss = closure()
        for group in self.param_groups:
            group["lr"] = 0.1 * loss.item()
        super().step()
        return loss


class MovesFirst(Optimizer):
    """Uses the gradient that is there, moves the weights, computes another one, and assigns the weights that
    it has kept (github.com/davda54/sam)."""

    def __init__(self, params: Any, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base = SGD(self.param_groups, 0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "it needs a closure"
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.norm(torch.stack([p.grad.norm() for p in held]))
        for p in held:
            self.state[p]["kept"] = p.data.clone()
            p.add_(p.grad, alpha=0.05 / float(norm))
        self.zero_grad()
        torch.enable_grad()(closure)()
        for p in held:
            p.data = self.state[p]["kept"]
        self.base.step()


def moving(parameters: Any) -> Optimizer:
    return MovesFirst(parameters)


def lbfgs(parameters: Any) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3, line_search_fn="strong_wolfe")


def aware(parameters: Any) -> Optimizer:
    return SharpnessAware(parameters, lr=0.1, momentum=0.9)


def needing(parameters: Any) -> Optimizer:
    return NeedsClosure(parameters, lr=0.1)


def loss_sized(parameters: Any) -> Optimizer:
    return LossSized(parameters, lr=0.1)


CLOSURES = [aware, needing, loss_sized, moving, lbfgs]


class Of:
    """A function from the model to an optimizer."""

    def __init__(self, make: Callable[[Any], Optimizer]) -> None:
        self.make = make

    def __call__(self, model: nn.Module) -> Optimizer:
        return self.make(model.parameters())


@on(*PLAIN, ACCUMULATING, ("horovod", 2, {}))
@pytest.mark.parametrize("make", CLOSURES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_step_by_a_closure(
    make: Callable[[Any], Optimizer], clip: float | None, place: Place, rank_pool: RankPool
) -> None:
    oracle = new_model()
    optimizer = make(oracle.parameters())
    for _ in range(2):
        train_epoch(oracle, optimizer, clip, closure=True)
    model = new_model()
    fit(model, place, rank_pool, Of(make), gradient_clipping=clip)
    assert distance(model, oracle) < EXACT


@pytest.mark.parametrize("make", [aware, needing], ids=lambda make: make.__name__)
def test_a_closure_that_cannot_be(make: Callable[[Any], Optimizer], rank_pool: RankPool) -> None:
    """The remedy: a backend that is named, or an optimizer without a closure."""
    for place, given in ((ZERO[1], {}), (PLAIN[0], {"on_nan": "skip"})):
        with pytest.raises(UserError, match=r"several times in a step by a closure"):
            fit(new_model(), place, rank_pool, Of(make), **given)
    fit(new_model(), PLAIN[1], rank_pool, Of(make))


class Broken(SGD):
    def step(self, closure: Any = None) -> Any:
        raise TypeError("a bug of the optimizer's own")


def test_another_error_of_an_optimizer_is_its_own() -> None:
    with pytest.raises(TypeError, match="a bug of the optimizer's own"):
        fit(new_model(), PLAIN[0], None, Of(lambda parameters: Broken(parameters, lr=0.1)))


# -- what is trained changes -----------------------------------------------------------------


def adam(parameters: Any) -> Optimizer:
    return torch.optim.Adam(parameters, lr=0.05, weight_decay=0.1)


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


class OfHead(Of):
    def __call__(self, model: nn.Module) -> Optimizer:
        model[0].requires_grad_(False)  # type: ignore[index]
        return self.make(model[2].parameters())  # type: ignore[index]


def act(model: Any, optimizer: Optimizer, epoch: int) -> None:
    if epoch == 1:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.02})
    elif epoch in (2, 3):
        model[2].bias.requires_grad_(epoch == 3)


class Act(Callback):
    all_ranks = True

    def on_epoch_end(self, context: Context, metrics: Mapping[str, float]) -> None:
        act(context.model, context.optimizer, context.progress.epoch)


@on(*PLAIN, ACCUMULATING, *ZERO, ("horovod", 2, {}))
@pytest.mark.parametrize("make", [adam, sgd], ids=lambda make: make.__name__)
def test_what_is_trained_changes(
    make: Callable[[Any], Optimizer], place: Place, rank_pool: RankPool, tmp_path: Path
) -> None:
    """A group is added, a bias is frozen for an epoch, and its moments are kept."""
    oracle = new_model()
    optimizer = OfHead(make)(oracle)
    for epoch in range(4):
        act(oracle, optimizer, epoch)
        train_epoch(oracle, optimizer, 0.2)
    model = new_model()
    model[0].requires_grad_(False)  # type: ignore[index]
    given = {"gradient_clipping": 0.2, "callbacks": [Act()], "folder": tmp_path}
    if make is adam and place[2].get("zero_stage"):
        with pytest.raises(UserError, match=r"ZeRO steps the parameters of a group together.*step"):
            fit(model, place, rank_pool, OfHead(make), epochs=4, **given)
        return
    fit(model, place, rank_pool, OfHead(make), epochs=4, **given)
    assert distance(model, oracle) < EXACT
