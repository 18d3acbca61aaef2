"""Asynchronous SGD trains what an oracle trains that replays the log of updates, to 1e-9 in float64."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.callback import Context
from distributed.interfaces.plan import Facts, Resources
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from distributed.testing.conformance import distance, problem, small_model
from distributed.testing.oracle import oracle_fit, sample_order
from distributed.testing.rank_pool import RankPool
from distributed.testing.reference_problem import masked_mean
from distributed.training.low_communication.arrivals import ArrivalRecord
from distributed.training.low_communication.channels import Packed, QueueChannel
from distributed.training.low_communication.parameter_server import Arrival, ParameterServer
from distributed.training.low_communication.staleness import StalenessBound
from tests.support.training import OnStep, make_trainer
from tests.training import asynchronous_mutants
from tests.training.asynchronous_oracle import read_log, replay
from tests.training.low_communication_mutants import registered
from tests.training.test_low_communication import (
    BATCH,
    EPOCHS,
    LENGTH,
    EqualAtValidation,
    Normalised,
    adamw,
    masked,
    momentum,
    sum_and_count,
)
from tests.training.test_low_communication_resume import DieOnce

STEPS = 8  # of an epoch; the last has two samples, of which a third rank has none
LOG_STEPS = 4  # ranks meet at log records: not after each step


class MeetsInForward(nn.CrossEntropyLoss):
    """A loss in which all ranks of a run wait for each other: each has read before one sends an update."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if output.requires_grad and dist.is_initialized():
            dist.barrier()
        return super().forward(output, target)


def train(
    pool: RankPool | None, ranks: int, log: Path, limit: int = 4, data: Any = None, **given: Any
) -> tuple[nn.Module, Any]:
    """A run of two epochs: its model and history."""
    section = {"mode": "async-sgd", "max_staleness": limit, "arrival_log": str(log)}
    fields = {"global_batch_size": BATCH, "epochs": EPOCHS, "optimizer": momentum, "model": small_model()}
    fields |= {"log_every_n_steps": LOG_STEPS, **given}
    model = fields.pop("model")
    trainer = make_trainer(model, ranks, pool, low_communication=section, **fields)
    return model, trainer.fit(*(data or (problem(LENGTH),)))


@pytest.mark.parametrize(
    ("ranks", "optimizer", "limit"), [(2, momentum, 1), (2, adamw, 6), (3, momentum, 0), (3, adamw, 4)]
)
def test_ranks_train_what_a_replay_of_the_log_trains(
    rank_pool: RankPool, tmp_path: Path, ranks: int, optimizer: Any, limit: int
) -> None:
    model, _ = train(rank_pool, ranks, tmp_path / "log", limit, optimizer=optimizer)
    log = read_log(tmp_path / "log")
    expected = replay(log, small_model, optimizer, ranks, *problem(LENGTH), BATCH)
    assert distance(model, expected) < 1e-9
    assert max(row["staleness"] for row in log) <= limit
    for rank in range(ranks):
        own = STEPS if rank < 2 else STEPS - 1
        steps = [row["step"] for row in log if row["worker"] == rank]
        assert steps == [*range(1, own + 1)] * EPOCHS, f"rank {rank}"


def test_updates_that_are_stale_are_replayed_too(rank_pool: RankPool, tmp_path: Path) -> None:
    """In each step, three ranks have read before one updates: the last is as stale as it may be."""
    x, y = problem(30)
    given = {"loss_fn": MeetsInForward(), "gradient_clipping": 0.1, "log_every_n_steps": 1}
    model, history = train(rank_pool, 3, tmp_path / "log", 2, [(x, y)], **given)
    log = read_log(tmp_path / "log")
    assert [row["staleness"] for row in log].count(2) >= 5 * EPOCHS
    assert max(row["staleness"] for row in log) == 2
    assert {row["worker"] for row in log[:3]} == {0, 1, 2}
    assert distance(model, replay(log, small_model, momentum, 3, x, y, BATCH, max_norm=0.1)) < 1e-9
    counted = [record for record in history.logs if record["updates"]]
    assert max(record["staleness_max"] for record in counted) == 2
    total = sum(record["updates"] * record["staleness_mean"] for record in counted)
    # Updates that are applied after the last record of a run are in the log alone.
    assert sum(row["staleness"] for row in log[:-3]) <= total <= sum(row["staleness"] for row in log)


@pytest.mark.parametrize("known", [True, False], ids=["counted before", "counted after"])
def test_a_step_takes_the_mean_over_a_ranks_own_tokens(
    rank_pool: RankPool, tmp_path: Path, known: bool
) -> None:
    data = masked(LENGTH)
    loss = nn.CrossEntropyLoss() if known else sum_and_count
    model, _ = train(rank_pool, 3, tmp_path / "log", data=[data], loss_fn=loss)
    log = read_log(tmp_path / "log")
    expected = replay(log, small_model, momentum, 3, *data, BATCH, loss_fn=masked_mean)
    assert distance(model, expected) < 1e-9


def test_one_rank_is_serial_training(tmp_path: Path) -> None:
    model, _ = train(None, 1, tmp_path / "log", 0)
    expected, data = small_model(), problem(LENGTH)
    oracle_fit(
        expected, momentum(expected.parameters()), *data, global_batch_size=BATCH, steps=STEPS * EPOCHS
    )
    assert distance(model, expected) < 1e-9


def test_ranks_that_may_not_be_stale_are_a_serial_run_over_their_slices(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    """With max_staleness 0 one rank computes at a time; plain SGD has no state of its own."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    model, _ = train(rank_pool, 3, tmp_path / "log", 0, optimizer=sgd, epochs=1)
    expected, (x, y) = small_model(), problem(LENGTH)
    optimizer = sgd(expected.parameters())
    batches = sample_order(LENGTH, 0, 0).split(BATCH)
    for row in read_log(tmp_path / "log"):
        own = batches[row["step"] - 1].tensor_split(3)[row["worker"]]
        optimizer.zero_grad()
        nn.functional.cross_entropy(expected(x[own]), y[own]).backward()
        optimizer.step()
    assert distance(model, expected) < 1e-9


def test_all_ranks_validate_with_the_returned_weights(rank_pool: RankPool, tmp_path: Path) -> None:
    data = problem(LENGTH)
    given = {"callbacks": [EqualAtValidation()], "divergence_check_steps": 1}
    model, history = train(rank_pool, 3, tmp_path / "log", data=[data, data], **given)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(data[0]), data[1])
    assert history.epochs[-1]["val_loss"] == pytest.approx(float(loss), abs=1e-9)


def test_statistics_of_all_ranks_are_averaged_at_the_end_of_an_epoch(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    """One step: the statistics are those of two halves, which count as many samples as they have."""
    x, y = problem(5)
    given = {"model": Normalised(), "epochs": 1, "loss_fn": MeetsInForward()}
    model, _ = train(rank_pool, 2, tmp_path / "log", data=[(x, y)], **given)
    expected = torch.zeros(8, dtype=torch.float64)
    for half in sample_order(5, 0, 0).tensor_split(2):
        worker = Normalised()
        worker(x[half])
        expected += len(half) / 5 * worker[1].running_mean
    torch.testing.assert_close(model[1].running_mean, expected)


# -- checkpoints -------------------------------------------------------------------------


def saving(folder: Path, **given: Any) -> dict[str, Any]:
    checkpoint = {"every_n_steps": 1, "keep_last": None}
    return {"folder": folder, "epochs": 1, "checkpoint": checkpoint, "optimizer": adamw, **given}


@pytest.mark.parametrize("backend", ["serial", "pytorch-ddp"])
def test_a_checkpoint_has_all_updates_so_far(rank_pool: RankPool, tmp_path: Path, backend: str) -> None:
    """It is a whole state that any other run resumes; saving changes nothing of what ranks read later."""
    model, _ = train(rank_pool, 2, tmp_path / "log", **saving(tmp_path / "run"))
    log = read_log(tmp_path / "log")
    assert distance(model, replay(log, small_model, adamw, 2, *problem(LENGTH), BATCH)) < 1e-9
    for step in (1, 3, 5):
        found = small_model()
        start = str(tmp_path / "run" / f"step_{step:08d}")
        given = {"resume_from_checkpoint": start, "global_batch_size": BATCH, "optimizer": adamw}
        ranks = 1 if backend == "serial" else 2
        trainer = make_trainer(found, ranks, rank_pool, backend=backend, **given)
        trainer.fit(problem(LENGTH), max_steps=step)
        before = [row for row in log if row["step"] <= step]
        assert before == log[: 2 * step]
        expected = replay(before, small_model, adamw, 2, *problem(LENGTH), BATCH)
        assert distance(found, expected) < 1e-9, f"step {step}"


def test_each_rank_resumes_with_its_own_optimizer_state(rank_pool: RankPool, tmp_path: Path) -> None:
    train(rank_pool, 3, tmp_path / "first", **saving(tmp_path / "run"))
    start = str(tmp_path / "run" / "step_00000003")
    given = saving(tmp_path / "resumed", resume_from_checkpoint=start)
    model, _ = train(rank_pool, 3, tmp_path / "second", **given)
    first, second = read_log(tmp_path / "first"), read_log(tmp_path / "second")
    assert {row["step"] for row in second} == {4, 5, 6, 7, 8}
    log = [row for row in first if row["step"] <= 3] + second
    assert distance(model, replay(log, small_model, adamw, 3, *problem(LENGTH), BATCH)) < 1e-9


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_number_of_ranks_begins_with_all_updates(
    rank_pool: RankPool, tmp_path: Path, ranks: int
) -> None:
    train(rank_pool, 3, tmp_path / "log", **saving(tmp_path / "run"))
    start = str(tmp_path / "run" / "step_00000003")
    given = saving(tmp_path / "resumed", resume_from_checkpoint=start, max_steps=3)
    model, _ = train(rank_pool, ranks, tmp_path / "none", **given)
    before = [row for row in read_log(tmp_path / "log") if row["step"] <= 3]
    assert distance(model, replay(before, small_model, adamw, 3, *problem(LENGTH), BATCH)) < 1e-9


# -- failures ----------------------------------------------------------------------------


@pytest.mark.starts_processes
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_a_rank_ends_the_run(tmp_path: Path, rank: int) -> None:
    """The other ranks wait for it, or for parameters."""
    callbacks = [OnStep(fail, step=3, rank=rank)]
    with pytest.raises(RuntimeError, match="no more"):
        train(None, 3, tmp_path / "log", 2, callbacks=callbacks, log_every_n_steps=100)


@pytest.mark.starts_processes
def test_a_rank_that_is_killed_is_restarted_with_all_updates_that_were_saved(tmp_path: Path) -> None:
    """Both attempts append to the log; what the first has done after its last checkpoint is done again."""
    callbacks = [DieOnce(5, 1, marker=tmp_path / "died")]
    given = saving(tmp_path / "run", callbacks=callbacks, elastic={"max_restarts": 1})
    model, _ = train(None, 2, tmp_path / "log", **given)
    assert (tmp_path / "died").exists()
    log = read_log(tmp_path / "log")
    kept = [row for position, row in enumerate(log) if is_last(log, position)]
    assert len(kept) == 2 * STEPS
    assert distance(model, replay(kept, small_model, adamw, 2, *problem(LENGTH), BATCH)) < 1e-9


def is_last(log: list[dict[str, int]], position: int) -> bool:
    """Whether no later line is of the same worker and step."""
    which = log[position]["worker"], log[position]["step"]
    return which not in [(row["worker"], row["step"]) for row in log[position + 1 :]]


def fail(context: Context) -> None:
    raise RuntimeError("no more")


def test_an_error_of_a_connection_reaches_the_worker_beside_the_server() -> None:
    class Broken(QueueChannel):
        def receive(self) -> tuple[int, int]:
            raise ConnectionError("reset")

    values = {"a": torch.zeros(2)}
    own, other = QueueChannel(*packed(values)), Broken(*packed(values))
    server = ParameterServer(values, {0: own, 1: other}, 1, lambda arrival: None)
    with pytest.raises(ConnectionError, match="reset"):
        server.finish()
    with pytest.raises(ConnectionError, match="reset"):
        own.read(1)


# -- the server and the bound ------------------------------------------------------------


def packed(values: dict[str, Tensor]) -> tuple[Packed, Packed]:
    shapes = {name: (value.shape, value.dtype) for name, value in values.items()}
    return Packed(shapes), Packed(shapes)


def test_a_server_of_one_worker_trains_as_serial_training() -> None:
    model, expected, (x, y) = small_model(), small_model(), problem(12)
    master = {name: p.detach().clone() for name, p in model.named_parameters()}
    channel = QueueChannel(*packed(master))
    arrivals: list[Arrival] = []
    server = ParameterServer(master, {0: channel}, 0, arrivals.append)
    optimizer, plain = momentum(model.parameters()), momentum(expected.parameters())
    for step in range(1, 6):
        channel.read(step)
        for name, parameter in model.named_parameters():
            parameter.data.copy_(channel.values.tensors[name])
        for of, steps in ((model, optimizer), (expected, plain)):
            steps.zero_grad()
            nn.functional.cross_entropy(of(x), y).backward()
            steps.step()
        for name, parameter in model.named_parameters():
            channel.deltas.tensors[name].copy_(channel.values.tensors[name] - parameter.detach())
        channel.update(step)
    channel.end()
    server.finish()
    assert [arrival.staleness for arrival in arrivals] == [0] * 5
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(master[name], parameter.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("limit", [0, 1, 2, 7])
def test_workers_of_any_speed_stay_within_the_bound(limit: int) -> None:
    """Five threads that add their numbers to a sum, as fast as they can: none is lost."""
    total = {"sum": torch.zeros(1, dtype=torch.float64)}
    channels = {rank: QueueChannel(*packed(total)) for rank in range(5)}
    arrivals: list[Arrival] = []
    server = ParameterServer(total, channels, limit, arrivals.append)

    def work(rank: int) -> None:
        for step in range(1, 41):
            channels[rank].read(step)
            channels[rank].deltas.tensors["sum"].fill_(-(rank + 1))
            channels[rank].update(step)
        channels[rank].end()

    threads = [Thread(target=work, args=(rank,)) for rank in channels]
    for thread in threads:
        thread.start()
    server.finish()
    assert total["sum"].item() == 40 * 15
    assert max(arrival.staleness for arrival in arrivals) <= limit
    assert [arrival.update for arrival in arrivals] == [*range(200)]


def largest_staleness(kind: type[StalenessBound], limit: int, workers: int, seed: int) -> int | None:
    """Of 300 updates in a random order of what a bound allows; None if it allows nothing."""
    bound, draw = kind(limit), random.Random(seed)
    arrived: set[int] = set()
    found = 0
    for _ in range(3000):
        idle = [w for w in range(workers) if w not in bound.reading]
        computing = [w for w in bound.reading if w not in arrived]
        ready = [w for w in sorted(arrived) if bound.may_apply(w)]
        choices = [("apply", w) for w in ready] + [("arrive", w) for w in computing]
        choices += [("read", w) for w in idle] if bound.may_read() else []
        if not choices:
            return None
        what, worker = draw.choice(choices)
        if what == "read":
            bound.read(worker)
        elif what == "arrive":
            arrived.add(worker)
        else:
            arrived.remove(worker)
            found = max(found, bound.apply(worker))
    return found


def keeps_bound(kind: type[StalenessBound]) -> bool:
    """Whether updates in any order are within the limit, and one is always allowed."""
    found = {
        (limit, workers): [largest_staleness(kind, limit, workers, seed) for seed in range(5)]
        for limit in range(5)
        for workers in (1, 2, 3, 6)
    }
    return all(
        value is not None and value <= limit for (limit, _), values in found.items() for value in values
    )


def test_the_bound_is_kept_and_always_allows_an_update() -> None:
    assert keeps_bound(StalenessBound)
    assert largest_staleness(StalenessBound, 4, 6, 0) == 4


@pytest.mark.parametrize("broken", asynchronous_mutants.OF_THE_BOUND)
def test_broken_forms_of_the_bound_are_noticed(broken: type[StalenessBound]) -> None:
    assert not keeps_bound(broken)


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"arrival_log.*cannot be opened.*Choose another path"):
        train(None, 1, tmp_path / "file" / "log")


def test_a_record_without_updates_states_no_staleness(tmp_path: Path) -> None:
    record = ArrivalRecord(str(tmp_path / "new" / "log.csv"))
    assert record.take() == {"updates": 0.0}
    record(Arrival(0, 1, 1, 0))
    record(Arrival(1, 0, 1, 3))
    assert record.take() == {"updates": 2.0, "staleness_mean": 1.5, "staleness_max": 3.0}
    assert record.take() == {"updates": 0.0}
    record.flush()
    lines = (tmp_path / "new" / "log.csv").read_text().splitlines()
    assert lines == ["update,worker,step,staleness", "0,1,1,0", "1,0,1,3"]


# -- broken forms ------------------------------------------------------------------------


@pytest.mark.parametrize("mutant", asynchronous_mutants.MUTANTS)
def test_broken_forms_are_noticed(mutant: str, rank_pool: RankPool, tmp_path: Path) -> None:
    data = problem(30)
    with registered(mutant, asynchronous_mutants.__name__):
        model, _ = train(
            rank_pool, 3, tmp_path / "log", data=[data], backend=mutant, loss_fn=MeetsInForward()
        )
    log = read_log(tmp_path / "log")
    assert distance(model, replay(log, small_model, momentum, 3, *data, BATCH)) > 1e-6


# -- refusals ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "given", "words"),
    [
        ({"max_staleness": None}, {}, "max_staleness is missing"),
        ({"max_staleness": -1}, {}, "max_staleness"),
        ({"period": 4}, {}, "period=4 has no effect under mode=async-sgd"),
        ({"mode": "diloco", "period": 4}, {}, "max_staleness=2 has no effect under mode=diloco"),
        ({}, {"deterministic": True}, "another one in each run"),
        ({}, {"compression": {"codec": "int8"}}, "mode=diloco, whose outer steps it compresses"),
        ({}, {"communication_backend": "mpi"}, "by gloo"),
        ({}, {"backend": "fsdp"}, "Backends that can: pytorch-ddp"),
        ({}, {"parallel": {"tensor": 2}}, "hold the whole model each"),
        ({}, {"mixed_precision": "fp16"}, "Train in bf16"),
        ({}, {"on_nan": "skip"}, "on_nan=stop"),
        ({}, {"sync_batchnorm": True}, "statistics"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_a_rank_starts(
    section: dict[str, Any], given: dict[str, Any], words: str
) -> None:
    section = {"mode": "async-sgd", "max_staleness": 2, **section}
    with pytest.raises(UserError, match=words):
        make_trainer(small_model(), 2, None, low_communication=section, **given).fit(problem(12))


def test_a_plan_states_that_a_bound_leaves_ranks_idle() -> None:
    def notes(limit: int) -> str:
        section = {"mode": "async-sgd", "max_staleness": limit}
        config = DistributedConfig(num_processes=4, device="cpu", low_communication=section)
        return " ".join(resolve(config, get_catalog(), Facts(), Resources(0)).notes)

    assert "in the order of arrival" in notes(3)
    assert "at the same time" not in notes(3)
    assert "max_staleness=1 lets 2 of 4 ranks compute at the same time. Use 3 or more" in notes(1)
