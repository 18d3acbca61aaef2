"""What a forward pass or a mode change does besides computing: buffers, weights, modes of modules."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import UserError
from distributed.testing.conformance import distance, problem
from distributed.testing.rank_pool import RankPool
from distributed.training.forward_state import Buffers
from tests.support.training import OnStep, make_trainer


class Counting(nn.Module):
    """Counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3).double()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        result: Tensor = self.layer(x)
        return result


class Clamped(nn.Linear):
    """Clamps its weights before it uses them, as a Wasserstein critic."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class Frozen(nn.Sequential):
    """Keeps its norm in evaluation mode, as detection models do."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self[1].eval()
        return self


class Merging(nn.Linear):
    """Merges a low-rank update into its weight for evaluation, as loralib does."""

    merged = False

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.update = nn.Parameter(torch.full((3, 6), 0.5))

    def train(self, mode: bool = True) -> Merging:
        if self.merged == mode:
            self.weight.data += -self.update.data if mode else self.update.data
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x) + (0.0 if self.merged else x @ self.update.t())
        return result


def seeded(kind: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = kind().double()
    return model


def frozen() -> nn.Module:
    norm = nn.BatchNorm1d(8)
    assert norm.running_mean is not None
    norm.running_mean.uniform_(0.5, 2.0)
    return Frozen(nn.Linear(6, 8), norm, nn.Linear(8, 3))


def plain(model: nn.Module, epochs: int = 1) -> nn.Module:
    x, y = problem(24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for _ in range(epochs):
        model.train()
        for start in range(0, 24, 4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[start : start + 4]), y[start : start + 4]).backward()
            optimizer.step()
    return model


def fit(model: nn.Module, ranks: int, pool: RankPool | None, val: Any = None, **given: Any) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    options = {"global_batch_size": 4, "data": {"shuffle": False}, **given}
    make_trainer(model, ranks, pool if ranks > 1 else None, optimizer=optimizer, batch_size=2, **options).fit(
        problem(24), val
    )
    return model


def _check_counts(context: Any) -> None:
    counts = context.backend.gather_objects(int(context.model.count))
    assert counts == [2, 1], f"forward passes that count on each rank: {counts}"


def test_a_stand_in_leaves_buffers_alone(rank_pool: RankPool) -> None:
    """Of 5 samples in global batches of 4, the last has one: rank 1 runs a stand-in."""
    options: dict[str, Any] = {"data": {"shuffle": False}, "callbacks": [OnStep(_check_counts, step=2)]}
    make_trainer(seeded(Counting), 2, rank_pool, batch_size=2, **options).fit(problem(5))


def test_buffers_that_change_get_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fit(seeded(Counting), 1, None)
        fit(seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))), 1, None)
    found = [record.getMessage() for record in caplog.records if "buffer" in record.getMessage()]
    assert len(found) == 1
    assert "'count'" in found[0]
    assert "all_ranks = True" in found[0]


def test_buffers_are_restored_as_objects() -> None:
    model = nn.BatchNorm1d(3)
    model.register_buffer("shift", torch.zeros(1).expand(3))
    before, shift = Buffers(model), model.get_buffer("shift")
    model(torch.randn(4, 3))
    model.shift = torch.ones(3)
    assert before.changed() == [], "the statistics of norms are known to change"
    before.restore()
    assert model.get_buffer("shift") is shift
    assert model.num_batches_tracked == 0
    assert model.running_mean is not None
    assert not model.running_mean.any()


def test_a_train_method_of_the_models_own_is_called(rank_pool: RankPool) -> None:
    reference = plain(seeded(frozen), epochs=2)
    for backend, ranks in (("serial", 1), ("pytorch-ddp", 2), ("fsdp", 2)):
        trained = fit(seeded(frozen), ranks, rank_pool, problem(8), backend=backend, epochs=2)
        assert distance(trained, reference) < 1e-12, backend


def test_what_evaluation_merges_is_unmerged_for_training() -> None:
    reference = plain(seeded(Merging), epochs=2)
    trained = fit(seeded(Merging), 1, None, problem(8), epochs=2).train()
    assert distance(trained, reference) < 1e-12


def test_weights_that_a_forward_pass_writes(rank_pool: RankPool) -> None:
    """Replicas keep them; shards would lose them."""
    reference = plain(seeded(lambda: nn.Sequential(Clamped(6, 3))))
    for backend in ("pytorch-ddp", "horovod"):
        trained = fit(seeded(lambda: nn.Sequential(Clamped(6, 3))), 2, rank_pool, backend=backend)
        assert distance(trained, reference) < 1e-12, backend
    for options in ({"backend": "fsdp"}, *({"backend": "deepspeed", "zero_stage": n} for n in (1, 2, 3))):
        with pytest.raises(UserError, match=r"'0\.weight' was changed outside") as caught:
            fit(seeded(lambda: nn.Sequential(Clamped(6, 3))), 2, rank_pool, **options)
        assert caught.value.remedy


class Counts(nn.Module):
    """Counts its calls, with a parameter of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.calls += 1
        return self.first(x) * self.scale


@pytest.mark.parametrize("backend", ["pytorch-ddp", "fsdp", "horovod", "deepspeed"])
def test_looking_for_carried_state_leaves_training_as_it_is(backend: str, rank_pool: RankPool) -> None:
    """Its forward pass gathers weights, which the next step would not see."""
    trained = fit(seeded(Counts), 2, rank_pool, backend=backend)
    assert distance(trained, plain(seeded(Counts))) < 1e-12


def _clamp(context: Any) -> None:
    with torch.no_grad():
        context.model.weight.clamp_(-0.2, 0.2)


def test_weights_that_a_callback_writes_under_zero(rank_pool: RankPool) -> None:
    for stage in (1, 3):
        with pytest.raises(UserError, match="'weight' was changed outside"):
            fit(
                seeded(lambda: nn.Linear(6, 3)), 2, rank_pool, backend="deepspeed", zero_stage=stage,
                callbacks=[OnStep(_clamp, step=2)],
            )  # fmt: skip


@pytest.mark.parametrize("backend", ["pytorch-ddp", "fsdp", "horovod", "deepspeed"])
def test_embeddings_that_depend_on_the_micro_batch(backend: str, rank_pool: RankPool) -> None:
    x, y = torch.arange(24) % 7, torch.arange(24) % 5
    for option, field, ranks in (("max_norm", "backend", 2), ("scale_grad_by_freq", "global_batch_size", 2)):
        model = nn.Embedding(7, 5, **{option: True})
        trainer = make_trainer(model, ranks, rank_pool, backend=backend, batch_size=2)
        with pytest.raises(UserError, match=f"'weight'.*{option}") as caught:
            trainer.fit((x, y))
        assert caught.value.field == field
        assert caught.value.remedy
    # One micro-batch per step trains as plain PyTorch does.
    if backend == "pytorch-ddp":
        options: dict[str, Any] = {"max_norm": 1.0, "scale_grad_by_freq": True}
        make_trainer(nn.Embedding(7, 5, **options), batch_size=4).fit((x, y))
        with pytest.raises(UserError, match="scale_grad_by_freq"):
            make_trainer(nn.Embedding(7, 5, **options), batch_size=2, global_batch_size=4).fit((x, y))
