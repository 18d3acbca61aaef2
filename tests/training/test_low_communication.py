"""Local SGD, DiLoCo and streaming DiLoCo train what an oracle of the algorithm trains.

The oracle (low_communication_oracle) simulates all workers in one process. Ranks agree with it to 1e-9 in
float64.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import Callback, Trainer
from distributed.config.compression import CompressionSection
from distributed.errors import UserError
from distributed.registry.catalog import get_catalog
from distributed.testing.conformance import distance, problem, small_model
from distributed.testing.oracle import oracle_fit
from distributed.testing.rank_pool import RankPool
from distributed.testing.reference_problem import OPTIMIZERS, masked_mean
from distributed.training.low_communication import backend as low_communication_backend
from distributed.training.low_communication.merging import Fragment, Merging
from distributed.training.low_communication.outer_step import OuterRule, divide, is_due
from tests.support.training import SameWeights, make_trainer
from tests.training import low_communication_mutants
from tests.training.low_communication_oracle import Oracle

BATCH, LENGTH, EPOCHS = (
    6,
    44,
    2,
)  # seven whole global batches and one of two samples, in which rank 2 has none
PARTS = [[0], [1, 2, 3]]  # of `small_model`: 48 of 83 elements, and the others

LOCAL: dict[str, Any] = {"mode": "local-sgd", "period": 3}
DILOCO: dict[str, Any] = {"mode": "diloco", "period": 3}
STREAMING: dict[str, Any] = {"mode": "streaming-diloco", "period": 4, "fragments": 2, "overlap_steps": 2}
OUTER: dict[str, Any] = {"rate": 0.7, "momentum": 0.9, "nesterov": True}
ALGORITHMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "local SGD": (LOCAL, {"period": 3}),
    "DiLoCo": (DILOCO, {"period": 3, **OUTER}),
    "DiLoCo, plain momentum": (
        {**DILOCO, "outer_learning_rate": 0.5, "outer_momentum": 0.6, "nesterov": False},
        {"period": 3, "rate": 0.5, "momentum": 0.6},
    ),
    "streaming": (STREAMING, {"period": 4, "parts": PARTS, "overlap": 2, "mixing": 0.5, **OUTER}),
    "streaming, no overlap": (
        {**STREAMING, "period": 5, "overlap_steps": 0, "mixing": 0.25},
        {"period": 5, "parts": PARTS, "mixing": 0.25, **OUTER},
    ),
    "streaming, taken over": (
        {**STREAMING, "period": 3, "overlap_steps": 1, "mixing": 0.0},
        {"period": 3, "parts": PARTS, "overlap": 1, **OUTER},
    ),
}


adamw = partial(OPTIMIZERS["adamw"], lr=0.01)
momentum = partial(OPTIMIZERS["momentum"], lr=0.1)


def trainer_of(
    model: nn.Module, ranks: int, pool: RankPool | None, section: dict[str, Any], **given: Any
) -> Trainer:
    fields = {"global_batch_size": BATCH, "epochs": EPOCHS, "optimizer": momentum}
    return make_trainer(model, ranks, pool, low_communication=section, **{**fields, **given})


def off(
    pool: RankPool | None,
    ranks: int,
    name: str,
    optimizer: Any = momentum,
    length: int = LENGTH,
    **given: Any,
) -> float:
    """Largest distance of trained parameters from the oracle's."""
    section, numbers = ALGORITHMS[name]
    model, data = small_model(), problem(LENGTH)
    trainer_of(model, ranks, pool, section, optimizer=optimizer, **given).fit(data)
    oracle = Oracle(small_model, optimizer, ranks, **numbers)
    oracle.train(*data, BATCH, EPOCHS)
    return distance(model, oracle.workers[-1])


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(("ranks", "optimizer"), [(2, momentum), (3, adamw)])
def test_ranks_train_what_the_algorithm_trains(
    rank_pool: RankPool, name: str, ranks: int, optimizer: Any
) -> None:
    assert off(rank_pool, ranks, name, optimizer) < 1e-9


def masked(length: int) -> tuple[Tensor, Tensor]:
    """Samples of which every third has no target."""
    x, y = problem(length)
    y[::3] = -100
    return x, y


def tokens(target: Tensor) -> int:
    return int((target != -100).sum())


@pytest.mark.parametrize("known", [True, False], ids=["counted before", "counted after"])
def test_tokens_are_weighted_as_the_algorithm_weights_them(rank_pool: RankPool, known: bool) -> None:
    model, data = small_model(), masked(LENGTH)
    loss = nn.CrossEntropyLoss() if known else sum_and_count
    trainer_of(model, 3, rank_pool, DILOCO, loss_fn=loss, gradient_clipping=0.1).fit(data)
    oracle = Oracle(
        small_model, momentum, 3, period=3, **OUTER, loss_fn=masked_mean, count=tokens, max_norm=0.1
    )
    oracle.train(*data, BATCH, EPOCHS)
    assert distance(model, oracle.workers[0]) < 1e-9


def sum_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    total = nn.functional.cross_entropy(output, target, reduction="sum")
    return total, (target != -100).sum()


@pytest.mark.parametrize(("make", "loss"), [(problem, None), (masked, masked_mean)])
def test_diloco_of_period_1_and_plain_steps_is_data_parallel_training(
    rank_pool: RankPool, make: Any, loss: Any
) -> None:
    """Outer SGD of rate 1 without momentum over plain inner SGD, also on a ragged last batch."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    section = {
        "mode": "diloco",
        "period": 1,
        "outer_learning_rate": 1.0,
        "outer_momentum": 0.0,
        "nesterov": False,
    }
    given = {} if loss is None else {"loss_fn": sum_and_count}
    found, plain, expected = small_model(), small_model(), small_model()
    data = make(LENGTH)
    trainer_of(found, 3, rank_pool, section, optimizer=sgd, **given).fit(data)
    make_trainer(plain, 3, rank_pool, global_batch_size=BATCH, epochs=EPOCHS, optimizer=sgd, **given).fit(
        data
    )
    oracle_fit(
        expected,
        sgd(expected.parameters()),
        *data,
        global_batch_size=BATCH,
        steps=8 * EPOCHS,
        **({} if loss is None else {"loss_fn": loss}),
    )
    assert distance(found, expected) < 1e-9
    assert distance(found, plain) < 1e-9


def test_local_sgd_of_one_rank_is_plain_training() -> None:
    found, expected, data = small_model(), small_model(), problem(LENGTH)
    trainer_of(found, 1, None, LOCAL).fit(data)
    oracle_fit(expected, momentum(expected.parameters()), *data, global_batch_size=BATCH, steps=8 * EPOCHS)
    assert distance(found, expected) < 1e-9


class Normalised(nn.Sequential):
    """BatchNorm between two layers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.double()


@pytest.mark.parametrize("name", ["DiLoCo", "streaming, taken over"])
def test_statistics_are_averaged_where_all_of_the_model_is(rank_pool: RankPool, name: str) -> None:
    section, numbers = ALGORITHMS[name]
    numbers = {**numbers, "parts": [[0, 1], [2, 3, 4, 5]] if "parts" in numbers else None}
    model, data = Normalised(), problem(36)
    trainer_of(model, 2, rank_pool, section).fit(data)
    oracle = Oracle(Normalised, momentum, 2, **numbers)
    oracle.train(*data, BATCH, EPOCHS)
    for own, expected in zip(
        model.state_dict().values(), oracle.workers[0].state_dict().values(), strict=True
    ):
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


def test_validation_and_the_end_see_equal_weights(rank_pool: RankPool) -> None:
    """All ranks validate with the returned weights, and the record states what was exchanged."""
    model, data = small_model(), problem(LENGTH)
    history = trainer_of(
        model, 2, rank_pool, STREAMING, callbacks=[EqualAtValidation()], divergence_check_steps=1
    ).fit(data, data)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(data[0]), data[1])
    assert history.epochs[-1]["val_loss"] == pytest.approx(float(loss), abs=1e-9)
    sent = sum(record["outer_bytes_sent"] for record in history.logs)
    # An epoch's eight steps begin exchanges after steps 2, 4, 6 and 8, of which the last ends with the epoch,
    # before both parts are exchanged once more. What happens there is in the first record of the next epoch.
    assert sum(record["outer_steps"] for record in history.logs) == 3 + (1 + 2) + 3
    exchanges_of_each_part = 2 + 1 + 2
    assert sent == exchanges_of_each_part * sum(p.numel() for p in model.parameters()) * 8


class EqualAtValidation(SameWeights):
    """Ranks are compared where they have validated; between outer steps they differ."""

    def on_step_end(self, context: Any) -> None:
        return None

    def on_validation_end(self, context: Any, metrics: Any) -> None:
        SameWeights.on_step_end(self, context)


@pytest.mark.parametrize("name", ["DiLoCo", "streaming"])
def test_a_codec_that_sends_all_of_it_changes_nothing(rank_pool: RankPool, name: str) -> None:
    assert off(rank_pool, 3, name, compression={"codec": "top-k", "ratio": 1.0}) < 1e-9


def test_the_record_states_the_bytes_of_a_codec(rank_pool: RankPool) -> None:
    model, options = small_model(), CompressionSection(codec="int8")
    trainer = trainer_of(model, 3, rank_pool, DILOCO, compression={"codec": "int8"}, epochs=1)
    history = trainer.fit(problem(LENGTH))
    codec = get_catalog().codecs["int8"]
    each = sum(codec.wire_bytes(tuple(p.shape), 8, options, 3) for p in model.parameters())
    assert sum(record["outer_bytes_sent"] for record in history.logs) == pytest.approx(2 * each)


class SlowExchanges(Callback):
    """Replaces the clock by one that advances by three seconds in each outer step alone."""

    all_ranks = True

    def on_run_start(self, context: Any) -> None:
        self.now, merging = 0.0, context.backend.merging
        real = merging.after_step

        def after_step(count: Any) -> None:
            real(count)
            self.now += 3.0 * (merging.step == 0)

        merging.after_step = after_step
        low_communication_backend.perf_counter = lambda: self.now

    def on_run_end(self, context: Any, status: str) -> None:
        low_communication_backend.perf_counter = time.perf_counter


def test_the_record_states_the_time_of_exchanges(rank_pool: RankPool) -> None:
    """Of two steps one exchanges for three seconds."""
    section = {"mode": "local-sgd", "period": 2}
    given = {"log_every_n_steps": 4, "callbacks": [SlowExchanges()]}
    history = trainer_of(small_model(), 2, rank_pool, section, **given).fit(problem(24))
    assert [log["exposed_communication_seconds"] for log in history.logs] == [1.5, 1.5]
    assert not any("hidden_communication_share" in log for log in history.logs)


# -- what is exchanged when --------------------------------------------------------------


@pytest.mark.parametrize(("period", "fragments"), [(1, 1), (4, 2), (7, 3), (5, 5)])
def test_every_part_is_exchanged_once_in_a_period(period: int, fragments: int) -> None:
    rule = OuterRule(period, fragments=fragments)
    steps = [[s for s in range(1, 4 * period + 1) if is_due(s, f, rule)] for f in range(fragments)]
    assert steps[-1] == [period, 2 * period, 3 * period, 4 * period]
    assert all(b - a == period for found in steps for a, b in pairwise(found))
    assert len({found[0] for found in steps}) == fragments


def test_parts_have_about_as_many_elements_each() -> None:
    assert divide({"a": 10, "b": 10, "c": 10, "d": 10}, 2) == [["a", "b"], ["c", "d"]]
    assert divide({"a": 100, "b": 1, "c": 1}, 3) == [["a"], ["b"], ["c"]]
    assert divide({"a": 1, "b": 1, "c": 100}, 3) == [["a"], ["b"], ["c"]]
    assert divide({"a": 1, "b": 1, "c": 100}, 2) == [["a", "b"], ["c"]]
    with pytest.raises(UserError, match="1 to 2"):
        divide({"a": 1, "b": 1}, 3)


class Recorded:
    """Adds up over a single rank, and records when an exchange begins and ends."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def begin(self, tensors: Mapping[str, Tensor]) -> Recorded:
        self.sent = ",".join(tensors)
        self.events.append(("begin", self.sent))
        return self

    def finish(self) -> None:
        self.events.append(("end", self.sent))

    def sent_bytes(self, tensors: Mapping[str, Tensor]) -> float:
        return 0.0


class WaitsAtOnce(Merging):
    """Broken: no step is computed while an exchange runs."""

    def _begin(self, fragments: Sequence[Fragment]) -> None:
        super()._begin(fragments)
        for fragment in fragments:
            fragment.wait()


@pytest.mark.parametrize(("kind", "sound"), [(Merging, True), (WaitsAtOnce, False)])
def test_an_exchange_is_awaited_only_when_its_result_is_due(kind: type[Merging], sound: bool) -> None:
    """The steps between are computed while it runs: no weight shows whether they wait for it."""
    summed, seen = Recorded(), []
    rule = OuterRule(4, 0.7, 0.9, True, fragments=2, overlap=1, mixing=0.5)
    parameters = {"a": torch.zeros(3), "b": torch.zeros(3)}
    merging = kind(rule, parameters, [], list, summed, None)
    for _ in range(6):
        merging.after_step(1)
        seen.append(summed.events)
        summed.events = []
    expected = [[], [("begin", "a")], [("end", "a")], [("begin", "b")], [("end", "b")], [("begin", "a")]]
    assert (seen == expected) is sound


# -- broken forms ------------------------------------------------------------------------


@pytest.mark.parametrize("mutant", low_communication_mutants.MUTANTS)
def test_broken_forms_are_noticed(mutant: str, rank_pool: RankPool) -> None:
    name = "streaming" if mutant in low_communication_mutants.OF_STREAMING else "DiLoCo"
    with low_communication_mutants.registered(mutant):
        assert off(rank_pool, 3, name, momentum, backend=mutant) > 1e-6


# -- refusals ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "given", "words"),
    [
        ({"mode": "diloco"}, {}, "period is missing"),
        ({**LOCAL, "outer_momentum": 0.5}, {}, "outer_momentum.*mode=diloco"),
        ({"mode": "none", "period": 4}, {}, "no effect under mode=none"),
        ({**STREAMING, "fragments": 5}, {}, "fragments=5 is above period=4"),
        ({**STREAMING, "overlap_steps": 4}, {}, "overlap_steps=4 is not below period=4"),
        (DILOCO, {"backend": "fsdp"}, "Backends that can: pytorch-ddp"),
        (DILOCO, {"parallel": {"tensor": 2}}, "hold the whole model each"),
        (DILOCO, {"mixed_precision": "fp16"}, "Train in bf16"),
        (DILOCO, {"on_nan": "skip"}, "on_nan=stop"),
        (DILOCO, {"sync_batchnorm": True}, "averaged at outer steps"),
        (DILOCO, {"optimizer": "adamw", "optimizer_bits": 8}, "not saved for each"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_a_rank_starts(
    section: dict[str, Any], given: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        trainer_of(small_model(), 2, None, section, **given).fit(problem(12))


def test_a_loop_of_ones_own_is_refused() -> None:
    trainer = trainer_of(small_model(), 1, None, LOCAL)
    with pytest.raises(UserError, match="Use fit"):
        trainer.train_step(*problem(6))
