"""Changes between two fits are trained, and a script's objects hold what a plain loop leaves in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from distributed import Callback, Trainer
from distributed.errors import UserError
from distributed.interfaces.callback import Context
from distributed.launch import caller_objects
from distributed.system.host_memory import Room
from distributed.testing.rank_pool import RankPool
from tests.support.torchrun import under_torchrun
from tests.support.training import make_trainer

NUM, SIZE, EXACT = 24, 6, 1e-12
X = torch.randn(NUM, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True).sin()
PLACES = [
    ("serial", 1, {}),
    ("pytorch-ddp", 3, {}),
    ("fsdp", 2, {}),
    ("deepspeed", 2, {"zero_stage": 1}),
    ("horovod", 2, {}),
]
everywhere = pytest.mark.parametrize(
    ("backend", "ranks", "fields"), PLACES, ids=[f"{name}-{ranks}" for name, ranks, _ in PLACES]
)


class Objects:
    """A model, its optimizer and a scheduler, as a script makes them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 1)).double()
        self.model[1].requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.02)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def train_epoch(self) -> None:
        """An epoch of plain PyTorch."""
        for i in range(0, NUM, SIZE):
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(X[i : i + SIZE]), Y[i : i + SIZE]).backward()
            self.optimizer.step()
        self.scheduler.step()

    def values(self) -> list[torch.Tensor]:
        """Weights, moments, steps, rate and the scheduler's epoch."""
        found = [*self.model.state_dict().values()]
        for state in self.optimizer.state_dict()["state"].values():
            found += [torch.as_tensor(value) for _, value in sorted(state.items())]
        rate, epoch = self.optimizer.param_groups[0]["lr"], self.scheduler.last_epoch
        return [*found, torch.tensor([rate, *self.scheduler.get_last_lr(), epoch])]

    def distance(self, other: Objects) -> float:
        pairs = zip(self.values(), other.values(), strict=True)
        return max((a.double() - b.double()).abs().max().item() for a, b in pairs)

    def trainer(self, pool: RankPool | None, ranks: int, **given: Any) -> Trainer:
        fields = {"global_batch_size": SIZE, "data": {"shuffle": False}, "loss_fn": nn.MSELoss(), **given}
        return make_trainer(
            self.model, ranks, pool, optimizer=self.optimizer, scheduler=self.scheduler, **fields
        )


def scale_weights(objects: Objects) -> None:
    with torch.no_grad():
        objects.model[0].weight.mul_(0.5)


def scale_data(objects: Objects) -> None:
    objects.model[2].bias.data.add_(0.25)


def load_weights(objects: Objects) -> None:
    state = objects.model.state_dict()
    objects.model.load_state_dict({name: tensor + tensor.sin() for name, tensor in state.items()})


def change_buffer(objects: Objects) -> None:
    objects.model[1].running_mean.add_(0.3)


def set_rate(objects: Objects) -> None:
    objects.optimizer.param_groups[0]["lr"] = 0.003


def set_betas(objects: Objects) -> None:
    objects.optimizer.param_groups[0]["betas"] = (0.5, 0.9)


def clear_state(objects: Objects) -> None:
    objects.optimizer.state.clear()


def load_state(objects: Objects) -> None:
    saved = objects.optimizer.state_dict()
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"] * 0.1
    objects.optimizer.load_state_dict(saved)


def scale_moment(objects: Objects) -> None:
    objects.optimizer.state[objects.model[0].weight]["exp_avg"].mul_(3.0)


def step_scheduler(objects: Objects) -> None:
    objects.scheduler.step()


def set_gamma(objects: Objects) -> None:
    objects.scheduler.gamma = 0.9


def nothing(objects: Objects) -> None:
    """Leaves all as it is."""


CHANGES: list[Callable[[Objects], None]] = [
    nothing, scale_weights, scale_data, load_weights, change_buffer, set_rate, set_betas, clear_state,
    load_state, scale_moment, step_scheduler, set_gamma, nothing,
]  # fmt: skip


def distances_of(
    run: Trainer, own: Objects, changes: Sequence[Callable[[Objects], None]] = tuple(CHANGES)
) -> dict[str, float]:
    """Train with `run` after each change of `own`; distances from a plain loop with the same changes."""
    oracle, distances = Objects(), {}
    for change in changes:
        change(oracle)
        change(own)
        oracle.train_epoch()
        run.fit((X, Y))
        distances[change.__name__] = own.distance(oracle)
    return distances


@everywhere
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_changes_between_fits_are_trained(
    backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool
) -> None:
    own = Objects()
    run = own.trainer(rank_pool, ranks, backend=backend, epochs=1, **fields)
    distances = distances_of(run, own)
    assert max(distances.values()) < EXACT, distances


@everywhere
@pytest.mark.parametrize("given", ["object", "function"])
def test_another_optimizer_may_be_assigned(
    given: str, backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool
) -> None:
    def momentum(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def with_betas(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), 0.01, betas=(0.5, 0.9))

    own, oracle = Objects(), Objects()
    run = make_trainer(
        own.model,
        ranks,
        rank_pool,
        optimizer=own.optimizer,
        global_batch_size=SIZE,
        data={"shuffle": False},
        loss_fn=nn.MSELoss(),
        backend=backend,
        epochs=1,
        **fields,
    )
    for build in (None, momentum, with_betas):
        if build is not None:
            oracle.optimizer = build(oracle.model)
            run.optimizer = build(own.model) if given == "object" else build
        for i in range(0, NUM, SIZE):
            oracle.optimizer.zero_grad()
            nn.functional.mse_loss(oracle.model(X[i : i + SIZE]), Y[i : i + SIZE]).backward()
            oracle.optimizer.step()
        run.fit((X, Y))
    pairs = zip(own.model.state_dict().values(), oracle.model.state_dict().values(), strict=True)
    assert max((a.double() - b.double()).abs().max().item() for a, b in pairs) < EXACT


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("backend", "fields", "preload"),
    [("pytorch-ddp", {}, "torch"), ("fsdp", {}, "torch"), ("deepspeed", {"zero_stage": 3}, "deepspeed")],
    ids=["pytorch-ddp", "fsdp", "ZeRO 3"],
)
def test_changes_on_joined_ranks_are_trained(
    backend: str, fields: dict[str, Any], preload: str, forking_python: Path
) -> None:
    words = ("tests.training.between_fits_joined", backend, json.dumps(fields))
    output, _ = under_torchrun(forking_python, *words, preload=preload)
    distances = json.loads(output.splitlines()[-1])
    assert max(distances.values()) < EXACT, distances


@everywhere
def test_an_optimizer_is_carried_on_to_another_trainer(
    backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool
) -> None:
    oracle, own = Objects(), Objects()
    for _ in range(2):
        oracle.train_epoch()
        own.trainer(rank_pool, ranks, backend=backend, epochs=1, **fields).fit((X, Y))
    assert own.distance(oracle) < EXACT


@everywhere
def test_an_optimizer_is_carried_on_from_a_loop_of_the_script(
    backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool
) -> None:
    oracle, own = Objects(), Objects()
    oracle.train_epoch()
    oracle.train_epoch()
    own.train_epoch()
    own.trainer(rank_pool, ranks, backend=backend, epochs=1, **fields).fit((X, Y))
    assert own.distance(oracle) < EXACT


class Averages(Callback):
    """Averages the weights after each step, and notes the steps."""

    all_ranks = True

    def __init__(self, average: AveragedModel) -> None:
        self.average, self.steps = average, [0]

    def on_step_end(self, context: Context) -> None:
        with context.whole_model() as model:
            self.average.update_parameters(model)
        self.steps.append(context.progress.step)


@pytest.mark.parametrize(
    ("backend", "ranks", "fields"), [PLACES[0], PLACES[1]], ids=["serial", "pytorch-ddp"]
)
def test_what_a_callback_keeps_comes_back(
    backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool
) -> None:
    """Into the objects that the script holds, too."""
    oracle, own = Objects(), Objects()
    expected, average = AveragedModel(oracle.model), AveragedModel(own.model)
    for i in range(0, NUM, SIZE):
        oracle.optimizer.zero_grad()
        nn.functional.mse_loss(oracle.model(X[i : i + SIZE]), Y[i : i + SIZE]).backward()
        oracle.optimizer.step()
        expected.update_parameters(oracle.model)
    callback = Averages(average)
    steps = callback.steps
    own.trainer(rank_pool, ranks, backend=backend, callbacks=[callback], epochs=1, **fields).fit((X, Y))
    assert steps == callback.steps == [0, 1, 2, 3, 4]
    assert callback.average is average
    pairs = zip(average.state_dict().values(), expected.state_dict().values(), strict=True)
    assert max((a.double() - b.double()).abs().max().item() for a, b in pairs) < EXACT


@everywhere
def test_leftover_gradients_are_not_trained(
    backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool
) -> None:
    oracle, own = Objects(), Objects()
    oracle.train_epoch()
    nn.functional.mse_loss(own.model(X), Y).backward()
    own.trainer(rank_pool, ranks, backend=backend, epochs=1, **fields).fit((X, Y))
    assert own.distance(oracle) < EXACT


def test_an_optimizer_without_room_continues_and_is_not_taken_for_cleared(
    rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    oracle, own = Objects(), Objects()
    run = own.trainer(rank_pool, 2, backend="pytorch-ddp", epochs=1)
    monkeypatch.setattr(caller_objects, "host_memory", lambda: Room(100, "the free memory of the host"))
    for change in (nothing, scale_weights):
        change(oracle)
        change(own)
        oracle.train_epoch()
        run.fit((X, Y))
        assert not own.optimizer.state
        pairs = zip(own.model.parameters(), oracle.model.parameters(), strict=True)
        assert max((a - b).abs().max().item() for a, b in pairs) < EXACT
    assert ", and the free memory of the host leaves 0.0 MB" in caplog.text
    nn.functional.mse_loss(own.model(X), Y).backward()
    own.optimizer.step()
    with pytest.raises(UserError, match=r"changed here since.*Undo the change \(optimizer.state.clear"):
        run.fit((X, Y))
    own.optimizer.state.clear()
    run.fit((X, Y))
