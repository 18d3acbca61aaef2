"""The loop: where it ends and goes on, models of all kinds, determinism, checkpoints in mid-epoch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from distributed.errors import UserError
from distributed.testing.conformance import distance, problem, small_model
from distributed.testing.oracle import oracle_fit
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer

EXACT = 1e-9
momentum = partial(SGD, momentum=0.9)
trainer_of = partial(make_trainer, optimizer=momentum, learning_rate=0.1, global_batch_size=4)


def reference_of(model: nn.Module, steps: int, length: int = 13, **options: Any) -> nn.Module:
    x, y = problem(length)
    oracle_fit(model, momentum(model.parameters(), lr=0.1), x, y, global_batch_size=4, steps=steps, **options)
    return model


# -- where it ends and goes on -------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(*problem(12), strict=True)


class Fours(BatchSampler):
    """Not torch's own class, so it is the user's."""


def batches() -> DataLoader[Any]:
    data = TensorDataset(*problem(12))
    return DataLoader(data, batch_sampler=Fours(SequentialSampler(data), 4, False))


@pytest.mark.parametrize("ranks", [1, 2])
def test_max_steps_runs_over_epochs(ranks: int, rank_pool: RankPool) -> None:
    model = small_model()
    history = trainer_of(model, ranks, rank_pool, max_steps=10).fit(problem(13))
    assert distance(model, reference_of(small_model(), 10)) < EXACT
    assert [epoch["step"] for epoch in history.epochs] == [4, 8, 10]
    model = small_model()
    history = trainer_of(model, ranks, rank_pool, max_steps=10, epochs=2).fit(problem(13))
    assert len(history.steps["loss"]) == 8


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("make", "batch_size"), [(Stream, 4), (batches, None)])
def test_data_of_unknown_length_may_end_on_the_last_step(
    make: Any, batch_size: int | None, ranks: int, rank_pool: RankPool
) -> None:
    # A batch sampler's batches stay whole: two ranks take two of them a step.
    size = {"batch_size": batch_size // ranks} if batch_size else {"batch_size": 4}
    steps = 2 if batch_size is None and ranks == 2 else 3
    whole, parts = small_model(), small_model()
    fields = {"global_batch_size": None, **(size if batch_size else {})}
    trainer_of(whole, ranks, rank_pool, **fields, epochs=2).fit(make())
    trainer = trainer_of(parts, ranks, rank_pool, **fields)
    first = trainer.fit(make(), max_steps=steps)
    assert [epoch["step"] for epoch in first.epochs] == [steps]
    second = trainer.fit(make(), epochs=1)
    assert second.steps["step"] == list(range(steps + 1, 2 * steps + 1))
    assert distance(whole, parts) < EXACT


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_data_that_yields_nothing_is_an_error(rank_pool: RankPool) -> None:
    with pytest.raises(UserError, match="the data yielded no sample in an epoch"):
        trainer_of(small_model(), 1, rank_pool).fit(Nothing())
    with pytest.raises(UserError, match="drop_last drops the only global batch"):
        trainer_of(small_model(), 1, rank_pool, data={"drop_last": True}).fit(problem(3))
    with pytest.raises(UserError, match="validation data yielded no sample"):
        trainer_of(small_model(), 1, rank_pool).fit(problem(8), Nothing())


# -- models of all kinds -------------------------------------------------------------------------


class Branches(nn.Module):
    """Uses its second branch for an odd number of samples alone."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = small_model(), small_model()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.one(x)
        return output + self.two(x) if len(x) % 2 else output


@pytest.mark.parametrize("view", [True, False])
def test_parameters_may_be_unused(view: bool, rank_pool: RankPool) -> None:
    # 14 samples of 4 a step: ranks hold 2 and 2, and in the last window 1 and 1.
    model, reference = Branches(), Branches()
    trainer_of(model, 2, rank_pool, find_unused_parameters=True, gradient_as_bucket_view=view,
               optimizer=SGD).fit(problem(14), epochs=3)  # fmt: skip
    expected = per_rank_oracle(reference, 3)
    assert distance(model, expected) < EXACT
    assert distance(model.two, small_model()) > 0.01


def per_rank_oracle(model: nn.Module, epochs: int) -> nn.Module:
    """As `oracle_fit`, but the forward passes are those of two ranks."""
    from distributed.testing.oracle import sample_order

    x, y = problem(14)
    optimizer = SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        order = sample_order(14, 0, epoch)
        for start in range(0, 14, 4):
            halves = order[start : start + 4].chunk(2)
            optimizer.zero_grad()
            (sum(F.cross_entropy(model(x[half]), y[half]) for half in halves) / 2).backward()
            optimizer.step()
    return model


@pytest.mark.parametrize("fields", [{"gradient_as_bucket_view": False}, {"bucket_cap_mb": 0.0001}])
def test_buckets_change_nothing(fields: dict[str, Any], rank_pool: RankPool) -> None:
    model = small_model()
    trainer_of(model, 2, rank_pool, gradient_clipping=0.5, **fields).fit(problem(13), max_steps=6)
    assert distance(model, reference_of(small_model(), 6, max_norm=0.5)) < EXACT


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 6, bias=False).double()
        self.decoder = nn.Linear(6, 6, bias=False).double()
        self.decoder.weight = self.encoder.weight
        nn.init.eye_(self.encoder.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_tied_weights_stay_tied(ranks: int, rank_pool: RankPool) -> None:
    model = Tied()
    trainer_of(model, ranks, rank_pool).fit(problem(13), max_steps=6)
    assert model.decoder.weight is model.encoder.weight
    assert distance(model, reference_of(Tied(), 6)) < EXACT


def frozen() -> nn.Module:
    model = small_model()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


@pytest.mark.parametrize("ranks", [1, 2])
def test_frozen_parameters_stay(ranks: int, rank_pool: RankPool) -> None:
    model, reference = frozen(), frozen()
    x, y = problem(13)
    trainer_of(model, ranks, rank_pool).fit((x, y), max_steps=6)
    oracle_fit(reference, momentum([p for p in reference.parameters() if p.requires_grad], lr=0.1), x, y,
               global_batch_size=4, steps=6)  # fmt: skip
    assert distance(model, reference) < EXACT
    assert distance(model[0], small_model()[0]) == 0.0
    assert distance(model[2], small_model()[2]) > 0.0


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_optimizer_over_part_of_the_model(ranks: int, rank_pool: RankPool) -> None:
    model, reference = small_model(), small_model()
    x, y = problem(13)
    optimizer = SGD([{"params": model[2].weight, "lr": 0.2}, {"params": model[2].bias, "lr": 0.4}])
    trainer = make_trainer(model, ranks, rank_pool, optimizer=optimizer, global_batch_size=4)
    trainer.fit((x, y), max_steps=3)
    trainer.fit((x, y), max_steps=3)
    oracle_fit(reference, SGD([{"params": reference[2].weight, "lr": 0.2},
                               {"params": reference[2].bias, "lr": 0.4}]), x, y,
               global_batch_size=4, steps=6)  # fmt: skip
    assert distance(model, reference) < EXACT


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_may_be_built_by_a_factory(ranks: int, rank_pool: RankPool) -> None:
    trainer = trainer_of(small_model, ranks, rank_pool)
    trainer.fit(problem(13), max_steps=4)
    trainer.fit(problem(13), max_steps=2)
    assert distance(trainer.model, reference_of(small_model(), 6)) < EXACT


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_may_stay_where_they_are(ranks: int, rank_pool: RankPool) -> None:
    model = small_model()
    history = trainer_of(model, ranks, rank_pool, return_weights="none").fit(problem(13), max_steps=4)
    assert len(history.steps["loss"]) == 4
    if ranks == 2:
        assert distance(model, small_model()) == 0.0


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6).double()
        self.rest = small_model()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.norm(x))


def test_rank_zeros_batchnorm_statistics_are_validated_and_returned(rank_pool: RankPool) -> None:
    x, y = problem(16)
    model, reference = Normed(), Normed()
    trainer = trainer_of(model, 2, rank_pool, data={"shuffle": False}, global_batch_size=8)
    history = trainer.fit((x, y), (x, y))
    for start in (0, 8):
        reference.norm(x[start : start + 4])
    assert torch.allclose(model.norm.running_mean, reference.norm.running_mean)
    assert torch.allclose(model.norm.running_var, reference.norm.running_var)
    assert model.norm.num_batches_tracked == 2
    model.eval()
    val_loss = float(F.cross_entropy(model(x), y).detach())
    assert history.epochs[0]["val_loss"] == pytest.approx(val_loss, abs=EXACT)


# -- the same bits -------------------------------------------------------------------------------


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rest, self.drop = small_model(), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.drop(x))


@pytest.mark.parametrize("ranks", [1, 2])
def test_deterministic_runs_end_in_the_same_bits(ranks: int, rank_pool: RankPool) -> None:
    found = []
    for part in ([9], [9], [4, 5]):
        torch.manual_seed(len(found))
        model = Dropping()
        trainer = trainer_of(model, ranks, rank_pool, deterministic=True, optimizer=AdamW)
        for steps in part:
            trainer.fit(problem(13), max_steps=steps)
        found.append(model)
    assert not torch.are_deterministic_algorithms_enabled()
    assert distance(found[0], found[1]) == 0.0
    assert distance(found[0], found[2]) == 0.0
    other = Dropping()
    trainer_of(other, ranks, rank_pool, seed=1, optimizer=AdamW).fit(problem(13), max_steps=9)
    assert distance(found[0], other) > 0.0


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_leaves_the_callers_random_numbers_alone(ranks: int, rank_pool: RankPool) -> None:
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    trainer_of(Dropping(), ranks, rank_pool).fit(problem(13), max_steps=2)
    assert torch.equal(torch.rand(3), expected)


# -- checkpoints ---------------------------------------------------------------------------------


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))


def test_a_run_goes_on_over_other_numbers_of_ranks_in_mid_epoch(tmp_path: Path, rank_pool: RankPool) -> None:
    """1, 2 and 1 ranks, each stopped within an epoch of 7 steps, against 20 steps at a stretch."""
    options: dict[str, Any] = {
        "checkpoint_dir": tmp_path, "resume_from_checkpoint": True, "warmup_steps": 12,
        "checkpoint": {"every_n_steps": 1}, "gradient_clipping": 0.5,
    }  # fmt: skip
    whole = small_model()
    expected = trainer_of(whole, 1, rank_pool, warmup_steps=12, gradient_clipping=0.5).fit(
        problem(26), max_steps=20)  # fmt: skip
    losses: list[float] = []
    for ranks, until in [(1, 3), (2, 11), (1, 20)]:
        model = small_model()
        history = trainer_of(model, ranks, rank_pool, **options).fit(problem(26), max_steps=until)
        assert history.steps["step"] == list(range(len(losses) + 1, until + 1))
        losses += history.steps["loss"]
    assert losses == pytest.approx(expected.steps["loss"], abs=EXACT)
    assert distance(model, whole) < EXACT


@pytest.mark.parametrize("make", [Stream, batches])
def test_saving_on_the_last_step_of_an_unknown_length(make: Any, tmp_path: Path, rank_pool: RankPool) -> None:
    def train(epochs: int) -> Any:
        batch = {"batch_size": 4} if make is Stream else {}
        trainer = trainer_of(
            small_model(), 1, rank_pool, checkpoint_dir=tmp_path, resume_from_checkpoint=True,
            checkpoint={"every_n_steps": 1, "keep_last": None}, global_batch_size=None, **batch,
        )  # fmt: skip
        return trainer.fit(make(), make(), epochs=epochs)

    assert train(1).steps["step"] == [1, 2, 3]
    assert steps_in(tmp_path) == [1, 2, 3]
    again = train(2)
    assert again.steps["step"] == [4, 5, 6]
    assert [epoch["epoch"] for epoch in again.epochs] == [1]


def third_is_best(model: nn.Module, batch: Any) -> dict[str, Any]:
    model.seen = getattr(model, "seen", 0) + 1
    return {"accuracy": (len(batch[0]) * (0.9 if model.seen == 3 else 0.5), len(batch[0]))}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_and_the_best_are_kept(ranks: int, tmp_path: Path, rank_pool: RankPool) -> None:
    trainer = trainer_of(small_model(), ranks, rank_pool, checkpoint_dir=tmp_path, epochs=6,
                         validation_step=third_is_best, checkpoint={"keep_last": 2})  # fmt: skip
    history = trainer.fit(problem(12), problem(4))
    assert steps_in(tmp_path) == [9, 15, 18]
    assert history.best_accuracy == pytest.approx(0.9)
    for _ in range(2):
        assert Path(history.best_checkpoint or "").name == "step_00000009"
        assert Path(history.checkpoint or "").name == f"step_{trainer.history.epochs[-1]['step']:08d}"
        history = trainer.fit(problem(12), problem(4), epochs=1)
    assert steps_in(tmp_path) == [9, 21, 24]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("resume", [True, False])
def test_a_second_fit_goes_on_beside_its_checkpoints(
    ranks: int, resume: bool, tmp_path: Path, rank_pool: RankPool
) -> None:
    """Also when the newest checkpoint is older than the state in hand."""
    model = small_model()
    trainer = trainer_of(
        model, ranks, rank_pool, checkpoint_dir=tmp_path, resume_from_checkpoint=resume,
        checkpoint={"every_n_steps": 2, "keep_last": None}, checkpoint_frequency=9,
    )  # fmt: skip
    trainer.fit(problem(26), max_steps=5)
    history = trainer.fit(problem(26), max_steps=4)
    assert history.steps["step"] == [6, 7, 8, 9]
    assert distance(model, reference_of(small_model(), 9, 26)) < EXACT
    assert steps_in(tmp_path) == [2, 4, 6, 8]


def test_nothing_to_resume_is_fine_and_said(
    tmp_path: Path, rank_pool: RankPool, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_of(small_model(), 2, rank_pool, checkpoint_dir=tmp_path, resume_from_checkpoint=True)
    assert trainer.fit(problem(12)).steps["step"] == [1, 2, 3]
    assert f"no checkpoint in {tmp_path} yet: starts from the beginning" in capfd.readouterr().out
    again = trainer_of(small_model(), 2, rank_pool, checkpoint_dir=tmp_path, resume_from_checkpoint=True)
    again.fit(problem(12), epochs=2)
    assert "continues at epoch 1, sample 0, step 3" in capfd.readouterr().out
