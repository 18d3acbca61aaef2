"""Ranks without a sample in a smaller global batch: what the user's code sees, and what is trained."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from distributed.checkpoint.random_state import capture_rng, same_rng
from distributed.data import Source, split_window
from distributed.data.order import window_sizes
from distributed.errors import UserError
from distributed.interfaces.callback import Callback, Context
from distributed.interfaces.plan import BatchPlan
from distributed.testing.rank_pool import RankPool
from distributed.training.last_batch import LastBatch
from tests.support.training import make_trainer

DDP: dict[str, Any] = {"backend": "pytorch-ddp"}
FSDP: dict[str, Any] = {"backend": "fsdp"}
ZERO1: dict[str, Any] = {"backend": "deepspeed", "zero_stage": 1}
ZERO3: dict[str, Any] = {"backend": "deepspeed", "zero_stage": 3}
SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.1, "data": {"shuffle": False}}
EXACT = 1e-12

GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(40, 4, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(0, 3, (40,), generator=GENERATOR)
NAN = 15


def by_backend(*backends: dict[str, Any]) -> Any:
    names = [f"{options['backend']}{options.get('zero_stage', '')}" for options in backends]
    return pytest.mark.parametrize("options", backends, ids=names)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


def linear() -> nn.Module:
    return seeded(lambda: nn.Linear(4, 3))


def plain(
    model: nn.Module, batches: Iterable[Any], loss: Callable[[nn.Module, Any], Tensor], optimizer: Any = None
) -> nn.Module:
    """One step for each batch in one process."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    return model


def of_rows(model: nn.Module, rows: list[int]) -> Tensor:
    return F.cross_entropy(model(X[rows]), Y[rows])


def assert_equal(trained: nn.Module, expected: nn.Module) -> None:
    found = trained.state_dict()
    for name, tensor in expected.state_dict().items():
        assert (found[name] - tensor).abs().max() < EXACT, name


def note(path: Path, text: str) -> None:
    """Append a line, from any rank."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, f"{text}\n".encode())
    os.close(handle)


# -- training --------------------------------------------------------------------------------------


def part(rank: int, size: int) -> list[int]:
    """Rows of a rank's shard; the last ranks have the shortest ones. NAN is the last row."""
    ends = {2: [0, 12, 16], 3: [0, 8, 12, 16]}[size]
    return list(range(ends[rank], ends[rank + 1]))


class Shards(IterableDataset[Any]):
    shards_itself = True

    def __iter__(self) -> Iterator[Any]:
        for row in part(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])):
            yield {"x": X[row] * (float("nan") if row == NAN else 1.0), "y": Y[row]}


def popping(model: nn.Module, batch: dict[str, Tensor], path: Path) -> Tensor:
    note(path, os.environ["RANK"])
    return F.cross_entropy(model(batch.pop("x")), batch.pop("y"))


@pytest.mark.parametrize("ranks", [2, 3])
@by_backend(DDP, {"backend": "horovod"}, FSDP, ZERO1, ZERO3)
def test_a_shard_that_ends_early(
    options: dict[str, Any], ranks: int, rank_pool: RankPool, tmp_path: Path
) -> None:
    """Its last batch holds a NaN, for which one step is skipped, and the training step empties its batch."""
    windows = [[row for r in range(ranks) for row in part(r, ranks)[k : k + 2]] for k in range(0, 12, 2)]
    windows = [rows for rows in windows if rows]
    expected = plain(linear(), [rows for rows in windows if NAN not in rows], of_rows)
    model, path = linear(), tmp_path / "calls"
    trainer = make_trainer(
        model, ranks, rank_pool, training_step=partial(popping, path=path), on_nan="skip", **SGD, **options
    )
    history = trainer.fit(DataLoader(Shards(), batch_size=2))
    assert history.num_skipped_steps == 1
    assert_equal(model, expected)
    if options["backend"] in ("pytorch-ddp", "horovod"):
        calls = sorted(path.read_text().split())
        assert calls == sorted(str(r) for r in range(ranks) for _ in part(r, ranks)[::2])


class Drawing(nn.Module):
    """Draws random numbers, and counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        random.random()
        np.random.rand()
        result: Tensor = self.layer(F.dropout(x))
        return result


class Unmoved(Callback):
    """Fails where the last step, in which a rank has no sample, moves anything of that rank."""

    all_ranks = True

    def __init__(self, last: int, ranks: int) -> None:
        self.last, self.ranks = last, ranks

    def on_run_start(self, context: Context) -> None:
        self.hook = register_optimizer_step_post_hook(self.take)

    def take(self, *_: Any) -> None:
        self.state = capture_rng()  # a callback has random numbers of its own

    def on_step_end(self, context: Context) -> None:
        state, count = self.state, int(context.model.count)
        if context.progress.step == self.last:
            idle = context.world.rank == self.ranks - 1
            assert same_rng(state, self.before[0]) == idle, "random numbers"
            assert (count == self.before[1]) == idle, "the counter"
        self.before = state, count

    def on_run_end(self, context: Context, status: str) -> None:
        self.hook.remove()


@by_backend(DDP, FSDP, ZERO1)
def test_generators_and_buffers_are_put_back(options: dict[str, Any], rank_pool: RankPool) -> None:
    for ranks in (2, 3):
        data = X[: 3 * ranks - 1], Y[: 3 * ranks - 1]  # the last step lacks a sample for the last rank
        trainer = make_trainer(
            seeded(Drawing), ranks, rank_pool, batch_size=2, callbacks=[Unmoved(2, ranks)], **SGD, **options
        )
        assert trainer.fit(data).steps["step"] == [1, 2]


def mean_of_pairs(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@by_backend(DDP, {"backend": "horovod"}, FSDP, {**DDP, "compression": {"codec": "fp16"}})
def test_a_rank_that_never_has_a_sample(options: dict[str, Any], rank_pool: RankPool) -> None:
    """It does not know what the loss is a mean of, which the ranks compare."""
    model, tolerance = linear(), 1e-3 if "compression" in options else EXACT
    make_trainer(
        model, 2, rank_pool, training_step=mean_of_pairs, epochs=3, batch_size=2, **SGD, **options
    ).fit((X[:1], Y[:1]))
    expected = plain(linear(), [[0]] * 3, of_rows)
    assert (model.weight - expected.weight).abs().max() < tolerance


class Branches(nn.Module):
    """Uses its second layer for positive samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.first(x)
        return result + self.second(x) if bool((x[:, 0] > 0).any()) else result


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


@by_backend(DDP, {"backend": "horovod"}, FSDP)
def test_parameters_that_no_sample_uses_are_not_decayed(options: dict[str, Any], rank_pool: RankPool) -> None:
    rows = [*(X[:, 0] > 0).nonzero().flatten().tolist()[:4], int((X[:, 0] < 0).nonzero()[0])]
    expected = seeded(Branches)
    plain(expected, [rows[:4], rows[4:]], of_rows, adamw(expected))
    model = seeded(Branches)
    make_trainer(
        model, 2, rank_pool, optimizer=adamw, batch_size=2, find_unused_parameters=True,
        data={"shuffle": False}, **options,
    ).fit((X[rows], Y[rows]))  # fmt: skip
    assert_equal(model, expected)


def test_sparse_gradients(rank_pool: RankPool) -> None:
    x, y = torch.arange(5) % 4, Y[:5]
    models = [seeded(lambda: nn.Embedding(6, 3, sparse=True)) for _ in range(2)]
    plain(models[0], [slice(0, 4), slice(4, 5)], lambda m, rows: F.cross_entropy(m(x[rows]), y[rows]))
    make_trainer(models[1], 2, rank_pool, batch_size=2, **SGD, **DDP).fit((x, y))
    assert_equal(models[1], models[0])


# -- validation ------------------------------------------------------------------------------------


def measured(model: nn.Module, batch: Any, path: Path) -> dict[str, Any]:
    for row in batch[0][:, 0].tolist():
        note(path, row)
    return {"loss": (F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))}


class Streamed(IterableDataset[Any]):
    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[Any]:
        return iter(TensorDataset(X[: self.number], Y[: self.number]))


def sized(number: int, batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X[:number], Y[:number]), batch_size)


def streamed(number: int, batch_size: int) -> DataLoader[Any]:
    return DataLoader(Streamed(number), batch_size)


def batched(number: int, batch_size: int) -> DataLoader[Any]:
    batches = [list(range(number))[k : k + batch_size] for k in range(0, number, batch_size)]
    return DataLoader(TensorDataset(X[:number], Y[:number]), batch_sampler=batches)


@pytest.mark.parametrize(
    ("ranks", "number", "batch_size"), [(2, 9, 4), (2, 3, 1), (3, 7, 2), (3, 13, 4), (3, 4, 1)]
)
@by_backend(DDP, FSDP, ZERO3)
def test_a_validation_step_sees_each_sample_once(
    options: dict[str, Any], ranks: int, number: int, batch_size: int, rank_pool: RankPool, tmp_path: Path
) -> None:
    for kind in (sized,) if options is ZERO3 else (sized, streamed, batched):
        path = tmp_path / kind.__name__
        trainer = make_trainer(
            linear(),
            ranks,
            rank_pool,
            validation_step=partial(measured, path=path),
            batch_size=2,
            **SGD,
            **options,
        )
        history = trainer.fit((X[:12], Y[:12]), kind(number, batch_size))
        expected = plain(
            linear(), [list(range(12))[k : k + 2 * ranks] for k in range(0, 12, 2 * ranks)], of_rows
        )
        assert sorted(map(float, path.read_text().split())) == sorted(X[:number, 0].tolist())
        assert abs(history.epochs[0]["val_loss"] - float(of_rows(expected, list(range(number))))) < EXACT


class Pairs(Shards):
    """The shards as pairs; the validation set of ranks that end at different times."""

    def __iter__(self) -> Iterator[Any]:
        for row in part(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])):
            yield X[row], Y[row]


@by_backend(DDP, FSDP, ZERO3)
def test_validation_that_cannot_give_every_rank_a_sample(
    options: dict[str, Any], rank_pool: RankPool, tmp_path: Path
) -> None:
    """Under ZeRO 3 such a rank runs the step on a copy, whose result is dropped."""
    for number, val in ((2, (X[:2], Y[:2])), (16, DataLoader(Pairs(), batch_size=2))):
        path = tmp_path / str(number)
        step = partial(measured, path=path)
        trainer = make_trainer(linear(), 3, rank_pool, validation_step=step, batch_size=2, **SGD, **options)
        history = trainer.fit((X[:6], Y[:6]), val, epochs=2)
        expected = plain(linear(), [list(range(6))] * 2, of_rows)
        assert abs(history.epochs[1]["val_loss"] - float(of_rows(expected, list(range(number))))) < EXACT
        if options is not ZERO3:
            assert sorted(map(float, path.read_text().split())) == sorted([*X[:number, 0].tolist()] * 2)


# -- BatchNorm -------------------------------------------------------------------------------------


def normalized() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 2), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(9, 3)
    )


def of_parts(model: nn.Module, parts: list[Tensor]) -> Tensor:
    """The loss of parts that are normalised by themselves; the statistics are those of the first."""
    outputs = [model(X[parts[0]])]
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    outputs += [model(X[rows]) for rows in parts[1:]]
    for name, buffer in model.named_buffers():
        buffer.data.copy_(kept[name])
    return F.cross_entropy(torch.cat(outputs), Y[torch.cat(parts)])


def shares(length: int, *sizes: int) -> list[Tensor]:
    rows = torch.arange(length + sum(sizes))[length:]
    return list(rows.split(sizes))


@by_backend(DDP, FSDP, ZERO1)
def test_batchnorm_gets_two_samples_or_none(options: dict[str, Any], rank_pool: RankPool) -> None:
    for ranks, rest in ((2, [2]), (2, [3]), (3, [2]), (3, [3]), (3, [3, 2])):
        full = 2 * ranks
        expected = plain(normalized(), [shares(0, *[2] * ranks), shares(full, *rest)], of_parts)
        model = normalized()
        make_trainer(model, ranks, rank_pool, batch_size=2, **SGD, **options).fit(
            (X[: full + sum(rest)], Y[: full + sum(rest)])
        )
        assert_equal(model, expected)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_single_sample_is_refused_before_the_first_step(ranks: int, rank_pool: RankPool) -> None:
    length = 4 * ranks + 1
    data, pool = (X[:length], Y[:length]), rank_pool if ranks > 1 else None
    options = {"backend": "serial" if ranks == 1 else "pytorch-ddp", **SGD}
    model = normalized()
    with pytest.raises(UserError, match="one value per channel") as caught:
        make_trainer(model, ranks, pool, batch_size=4, **options).fit(data)
    assert_equal(model, normalized())
    assert caught.value.field == "global_batch_size"
    remedy = re.search(r"data\.drop_last=true, or global_batch_size=(\d+)$", caught.value.remedy)
    assert remedy
    steps = make_trainer(normalized(), ranks, pool, global_batch_size=int(remedy[1]), **options).fit(data)
    assert steps.num_samples == length
    options["data"] = {"shuffle": False, "drop_last": True}
    assert (
        make_trainer(normalized(), ranks, pool, batch_size=4, **options).fit(data).num_samples == length - 1
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_sample_with_several_values_per_channel_is_trained(ranks: int, rank_pool: RankPool) -> None:
    expected = plain(seeded(convolution), [shares(0, *[2] * ranks), shares(2 * ranks, 1)], of_parts)
    model = seeded(convolution)
    options = {"backend": "serial" if ranks == 1 else "pytorch-ddp", "batch_size": 2, **SGD}
    make_trainer(model, ranks, rank_pool if ranks > 1 else None, **options).fit(
        (X[: 2 * ranks + 1], Y[: 2 * ranks + 1])
    )
    assert_equal(model, expected)


def test_micro_batches_of_one_sample_are_refused() -> None:
    with pytest.raises(UserError, match="one value per channel") as caught:
        make_trainer(normalized(), batch_size=1, backend="serial", **SGD).fit((X[:4], Y[:4]))
    assert caught.value.remedy == "Set global_batch_size=2"
    make_trainer(normalized(), global_batch_size=2, backend="serial", **SGD).fit((X[:4], Y[:4]))


def test_a_later_fit_reaches_the_single_sample() -> None:
    trainer = make_trainer(normalized(), batch_size=2, backend="serial", **SGD)
    trainer.fit((X[:5], Y[:5]), max_steps=2)
    with pytest.raises(UserError, match="one value per channel") as caught:
        trainer.fit((X[:5], Y[:5]), max_steps=1)
    assert caught.value.remedy == "Set data.drop_last=true, or global_batch_size=3"


def test_a_single_sample_of_a_stream_is_refused_at_its_step() -> None:
    model = normalized()
    trainer = make_trainer(model, batch_size=2, backend="serial", **SGD)
    with pytest.raises(UserError, match=r"one value per channel.*The step was not taken") as caught:
        trainer.fit(streamed(5, 2))
    assert caught.value.remedy == "Set data.drop_last=true, and give all ranks equally many samples"
    model = normalized()
    dropping = {**SGD, "data": {"shuffle": False, "drop_last": True}}
    make_trainer(model, batch_size=2, backend="serial", **dropping).fit(streamed(5, 2))
    assert_equal(model, plain(normalized(), [shares(0, 2), shares(2, 2)], of_parts))


def test_statistics_over_all_ranks_need_a_sample_on_each() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.SyncBatchNorm(8))
    batch = BatchPlan(batch_size=2, gradient_accumulation_steps=1, data_parallel_size=3)
    source = Source.of((X[:14], Y[:14]), "train_loader")
    LastBatch(model, batch, Source.of((X[:15], Y[:15]), "train_loader"), None)
    LastBatch(model, batch, source, True)
    with pytest.raises(UserError, match="'1' computes statistics over the samples of all ranks") as caught:
        LastBatch(model, batch, source, None)
    assert caught.value.remedy == "Set data.drop_last=true, or global_batch_size=9"
    unknown = LastBatch(model, batch, Source.of(Streamed(14), "train_loader"), None)
    unknown.begin(2)
    with pytest.raises(UserError, match="a placeholder would add copies"):
        unknown.begin(0)


class SharedMean(nn.Module):
    """Subtracts the mean over the samples of all ranks, as layers of other libraries do."""

    def forward(self, x: Tensor) -> Tensor:
        sums = torch.cat([x.detach().sum(0), x.new_tensor([float(len(x))])])
        if dist.is_initialized():
            dist.all_reduce(sums)
        return x - sums[:-1] / sums[-1]


def centered() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 4), SharedMean(), nn.Linear(4, 3)))


def test_layers_with_collectives_of_their_own_need_a_sample_on_each_rank(rank_pool: RankPool) -> None:
    def trained(length: int, **options: Any) -> nn.Module:
        model = centered()
        options = {"batch_size": 2, **DDP, **SGD, **options}
        make_trainer(model, 3, rank_pool, **options).fit((X[:length], Y[:length]))
        return model

    with pytest.raises(UserError, match=r"runs collectives .* a placeholder would add copies") as caught:
        trained(14)
    assert caught.value.remedy == "Set data.drop_last=true, or global_batch_size=9"
    rows = list(range(14))
    for options, batches in (
        ({"max_steps": 2}, [rows[:6], rows[6:12]]),
        ({"data": {"shuffle": False, "drop_last": True}}, [rows[:6], rows[6:12]]),
        ({"batch_size": None, "global_batch_size": 9}, [rows[:9], rows[9:]]),
    ):
        assert_equal(trained(14, **options), plain(centered(), batches, of_rows))


def sums_over_ranks(model: nn.Module, batch: Any) -> dict[str, Any]:
    """The number of samples of all ranks, for each sample."""
    own = len(batch[0])
    number = torch.tensor(float(own))
    dist.all_reduce(number)
    return {"seen": (number * own, own)}


@by_backend(DDP, FSDP)
def test_a_validation_step_with_collectives(options: dict[str, Any], rank_pool: RankPool) -> None:
    """Of 13 samples in batches of 3 on 2 ranks one would be left: the last seven are divided into 4 and 3."""
    trainer = make_trainer(
        linear(), 2, rank_pool, validation_step=sums_over_ranks, batch_size=3, **SGD, **options
    )
    assert trainer.fit((X[:6], Y[:6]), (X[:13], Y[:13])).epochs[0]["val_seen"] == (6 * 6 + 4 * 4 + 3 * 3) / 13


# -- the division of a window ----------------------------------------------------------------------


def test_micro_batches_are_contiguous_equally_many_and_not_too_small() -> None:
    for length in range(1, 30):
        for size in range(1, 5):
            for batch_size in range(1, 5):
                for fewest in range(1, min(2, batch_size) + 1):
                    spans = [split_window(length, r, size, batch_size, fewest) for r in range(size)]
                    assert len({len(own) for own in spans}) == 1
                    filled = [(a, b) for own in spans for a, b in own if b > a]
                    assert [i for a, b in filled for i in range(a, b)] == list(range(length))
                    sizes = [b - a for a, b in filled]
                    assert max(sizes) < batch_size + fewest
                    assert min(sizes) >= min(fewest, length)


def test_windows_in_which_every_rank_has_a_sample() -> None:
    for length in range(1, 40):
        for size, fewest in ((2, 2), (4, 2), (6, 3), (3, 3)):
            joined = list(window_sizes(length, size, fewest, joins=True))
            assert sum(joined) == length
            assert min(joined) >= min(fewest, length)
            assert max(joined) < size + fewest
            found = list(window_sizes(length, size, fewest))
            assert sum(found) == length
            assert max(found) <= size
            can = length >= size and (size + length % size) // 2 >= fewest
            assert min(found) >= fewest or not can
            assert list(window_sizes(length, size)) == [
                len(X[:length][k : k + size]) for k in range(0, length, size)
            ]
