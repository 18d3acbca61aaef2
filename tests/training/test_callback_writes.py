"""Weights that a callback changes are trained as in one process, or refused after the step that does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import TensorDataset

from distributed import Callback
from distributed.errors import UserError, WorkerError
from distributed.interfaces.callback import Context
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer

X = torch.randn(48, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True).sin()
SHARED = [("pytorch-ddp", 3, {}), ("fsdp", 2, {}), ("horovod", 2, {})]
DIVIDED = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
ZERO = [
    ("deepspeed", 1, {"zero_stage": 1}),
    ("deepspeed", 2, {"zero_stage": 2}),
    ("deepspeed", 2, {"zero_stage": 3}),
    ("deepspeed", 2, {"deepspeed_config": DIVIDED}),
]


def names(places: list[tuple[str, int, dict[str, Any]]]) -> list[str]:
    return [f"{name}-{ranks}-{fields.get('zero_stage', len(fields))}" for name, ranks, fields in places]


def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def clamp_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.2)


def assign(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-0.2, 0.2)


def negate_one(model: nn.Module) -> None:
    """Changes no norm, and a single value where ranks hold a part."""
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        local.data.view(-1)[:1].neg_()


def reset_statistics(model: nn.Module) -> None:
    model[1].running_var.data.fill_(2.0)  # type: ignore[index, operator, union-attr]


class Writes(Callback):
    """Changes the model after each step, on rank 0."""

    steps = 0

    def __init__(self, change: Callable[[nn.Module], None]) -> None:
        self.change = change

    def on_step_end(self, context: Context) -> None:
        self.change(context.model)


class WritesEverywhere(Writes):
    all_ranks = True


class Reads(Callback):
    """Computes from the weights, and changes a copy."""

    def on_step_end(self, context: Context) -> None:
        for parameter in context.model.parameters():
            parameter.detach().clone().mul_(2.0).sum()


def new_model() -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8).eval()
    return nn.Sequential(nn.Linear(4, 8), norm, nn.Tanh(), nn.Linear(8, 1)).double()


def train(pool: RankPool | None, callback: Callback, backend: str, ranks: int, fields: dict[str, Any]) -> Any:
    model = new_model()
    make_trainer(
        model, ranks, pool, backend=backend, callbacks=[callback], loss_fn=nn.MSELoss(), optimizer="sgd",
        learning_rate=0.1, global_batch_size=12, data={"shuffle": False}, **fields,
    ).fit((X, Y), max_steps=4)  # fmt: skip
    return model.state_dict()


def plain(change: Callable[[nn.Module], None]) -> Any:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(0, 48, 12):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X[i : i + 12]), Y[i : i + 12]).backward()
        optimizer.step()
        change(model)
    return model.state_dict()


def distance(found: Any, expected: Any) -> float:
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


@pytest.mark.parametrize(("backend", "ranks", "fields"), SHARED, ids=names(SHARED))
@pytest.mark.parametrize("change", [clamp, clamp_in_place, assign, negate_one, reset_statistics])
def test_a_change_on_rank_zero_is_refused(
    change: Any, backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool
) -> None:
    with pytest.raises(
        UserError, match=r"Writes runs on rank 0 only and changed the values of '.*all_ranks ="
    ):
        train(rank_pool, Writes(change), backend, ranks, fields)


@pytest.mark.parametrize(("backend", "ranks", "fields"), SHARED, ids=names(SHARED))
@pytest.mark.parametrize("change", [clamp, clamp_in_place, assign, reset_statistics])
def test_the_remedy_trains_as_one_process(
    change: Any, backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool
) -> None:
    found = train(rank_pool, WritesEverywhere(change), backend, ranks, fields)
    assert distance(found, plain(change)) < 1e-12


class Scaled(nn.MSELoss):
    """A loss with an attribute, and data with one: what a callback may change for one rank alone."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.factor * super().forward(output, target)


class Growing(TensorDataset):
    level = 0

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.level = 0


def zero_moments(context: Context) -> None:
    for state in context.optimizer.state.values():
        state["exp_avg"].zero_()


def clear_moments(context: Context) -> None:
    context.optimizer.state.clear()


def set_slope(context: Context) -> None:
    context.model[2].negative_slope = 0.5


def swap_module(context: Context) -> None:
    context.model[2] = nn.Tanh()


def scale_output(context: Context) -> None:
    context.model[2].register_forward_hook(lambda module, args, output: output * 1.1)


class ChangesMore(Callback):
    """Changes something else than weights on rank 0: objects of its own, or what the context shows."""

    def __init__(self, change: Any, loss: Scaled, data: Growing) -> None:
        self.change, self.loss, self.data = change, loss, data

    def on_step_end(self, context: Context) -> None:
        if context.progress.step == 2:
            self.change(context) if callable(self.change) else setattr(*self.changed())

    def changed(self) -> tuple[Any, str, Any]:
        return (self.loss, "factor", 2.0) if self.change == "loss" else (self.data, "level", 1)


OTHERS = {
    zero_moments: "the values of 'exp_avg of parameter 0",
    clear_moments: "the values of '.* of parameter . in the optimizer",
    set_slope: "'negative_slope' of module '2' from 0.01 to 0.5",
    swap_module: "the parts of the model",
    scale_output: "what a LeakyReLU returns, by a hook",
    "loss": "'factor' of the loss from 1.0 to 2.0",
    "data": "'level' of the training data from 0 to 1",
}


def train_with(
    callback: Callback, loss: Any, data: Any, pool: RankPool, backend: str, ranks: int, fields: Any
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Identity(), nn.LeakyReLU(), nn.Linear(8, 1)).double()
    make_trainer(
        model, ranks, pool, backend=backend, callbacks=[callback], loss_fn=loss, optimizer="adamw",
        global_batch_size=12, data={"shuffle": False}, **fields,
    ).fit(data, max_steps=4)  # fmt: skip


@pytest.mark.parametrize(("backend", "ranks", "fields"), SHARED, ids=names(SHARED))
@pytest.mark.parametrize("change", OTHERS, ids=lambda change: getattr(change, "__name__", change))
def test_other_changes_on_rank_zero_are_refused(
    change: Any, backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool
) -> None:
    loss, data = Scaled(), Growing(X, Y)
    with pytest.raises(UserError, match=rf"runs on rank 0 only and changed {OTHERS[change]}"):
        train_with(ChangesMore(change, loss, data), loss, data, rank_pool, backend, ranks, fields)


class Watches(Callback):
    """Collects outputs by a hook, and keeps notes in objects that nothing trains by."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_run_start(self, context: Context) -> None:
        context.model[2].register_forward_hook(
            lambda module, args, output: self.seen.append(float(output.sum()))
        )


def test_a_hook_that_reads_is_not_refused(rank_pool: RankPool) -> None:
    callback = Watches()
    train_with(callback, Scaled(), Growing(X, Y), rank_pool, "pytorch-ddp", 2, {})
    assert len(callback.seen) == 4


def jitter(model: nn.Module) -> None:
    """Depends on the rank."""
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 1e-3 * dist.get_rank())


@pytest.mark.parametrize("backend", ["pytorch-ddp", "horovod"])
def test_a_change_that_differs_between_ranks_is_refused(backend: str, rank_pool: RankPool) -> None:
    with pytest.raises(WorkerError, match=r"ranks 1, 2 .* differ .*: after step 1, 6 of 6 parameters"):
        train(rank_pool, WritesEverywhere(jitter), backend, 3, {})


@pytest.mark.parametrize("kind", [Writes, WritesEverywhere])
@pytest.mark.parametrize("change", [clamp, clamp_in_place])
@pytest.mark.parametrize(("backend", "ranks", "fields"), ZERO, ids=names(ZERO))
def test_zero_refuses_what_it_would_discard(
    kind: type[Writes], change: Any, backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool
) -> None:
    with pytest.raises(
        UserError, match="was changed outside the optimizer, and deepspeed would discard that"
    ):
        train(rank_pool if ranks > 1 else None, kind(change), backend, ranks, fields)


@pytest.mark.parametrize(("backend", "ranks", "fields"), SHARED + ZERO, ids=names(SHARED + ZERO))
def test_a_callback_that_reads_is_not_refused(
    backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool
) -> None:
    found = train(rank_pool if ranks > 1 else None, Reads(), backend, ranks, fields)
    assert distance(found, plain(lambda model: None)) < 1e-12


@pytest.mark.parametrize("change", [clamp, clamp_in_place, negate_one])
def test_one_process_trains_with_a_change(change: Any) -> None:
    assert distance(train(None, Writes(change), "serial", 1, {}), plain(change)) == 0
