"""Ranks that are threads receive what ranks over gloo receive, and an error where one of them is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed.communication import thread_arithmetic
from distributed.communication.rank_turns import LostRank, RankFailure, RankTurns
from distributed.communication.thread_group import Exchange, join_threads, worlds_of_threads
from distributed.testing.rank_pool import RankPool
from distributed.testing.reference_problem import problem, small_model
from tests.communication.thread_calls import CALLS, RANKS, MakesCalls, values
from tests.support.training import make_trainer


class NoState:
    """Nothing belongs to the process."""

    def capture(self) -> None:
        return None

    def restore(self, state: None) -> None:
        return None


def run(work: Callable[[int], Any], size: int = RANKS, timeout: float = 30.0) -> list[RankFailure]:
    """The failures of `size` threads that call ``work(rank)`` as ranks."""
    turns = RankTurns(size, NoState(), timeout)
    exchange = Exchange(turns)

    def rank_of(rank: int) -> None:
        with join_threads(exchange, rank):
            work(rank)

    with worlds_of_threads():
        return turns.run(rank_of)


def results(work: Callable[[int], Any], size: int = RANKS) -> list[Any]:
    """What ``work(rank)`` returns on each rank."""
    found: dict[int, Any] = {}
    failures = run(lambda rank: found.__setitem__(rank, work(rank)), size)
    if failures:
        raise failures[0].error
    return [found[rank] for rank in range(size)]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def calls_of_all(folder: Path, pool: RankPool | None, **given: Any) -> dict[str, list[Any]]:
    """Name of a call -> what each rank has received."""
    folder.mkdir()
    trainer = make_trainer(
        small_model(),
        RANKS,
        pool,
        backend="pytorch-ddp",
        callbacks=[MakesCalls(folder)],
        batch_size=2,
        **given,
    )
    trainer.fit(problem(6), max_steps=1)
    of_rank = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
    return {name: [received[name] for received in of_rank] for name in CALLS}


@pytest.fixture(scope="module")
def over_gloo(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return calls_of_all(tmp_path_factory.mktemp("calls") / "gloo", rank_pool)


def different(over_gloo: dict[str, list[Any]], folder: Path, **given: Any) -> set[str]:
    threads = calls_of_all(folder / "threads", None, launch="threads", **given)
    return {name for name in CALLS if not same(over_gloo[name], threads[name])}


def test_threads_receive_what_processes_receive(over_gloo: dict[str, list[Any]], tmp_path: Path) -> None:
    assert all(any(received) for received in over_gloo.values())
    assert different(over_gloo, tmp_path) == set()


def test_a_sum_without_one_rank_is_seen(
    over_gloo: dict[str, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = thread_arithmetic._reduced
    monkeypatch.setattr(thread_arithmetic, "_reduced", lambda op, parts: real(op, parts[: len(parts) - 1]))
    # Replicas are compared by these sums.
    assert different(over_gloo, tmp_path, divergence_check_steps=None) >= {
        "sum",
        "max",
        "reduce_scatter_tensor",
        "coalesced",
        "functional",
    }


# -- what gloo does not have, against arithmetic -------------------------------------------------------------


def test_means_and_scaled_sums() -> None:
    def call(rank: int) -> list[Tensor]:
        mean, scaled = values(rank, 4), values(rank, 4)
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
        return [mean, scaled]

    total = sum(values(rank, 4) for rank in range(RANKS))
    for mean, scaled in results(call):
        assert torch.equal(mean, total / RANKS)
        assert torch.equal(scaled, total / 2)


def test_one_tensor_of_all_ranks_may_be_stacked() -> None:
    def call(rank: int) -> Tensor:
        stacked = torch.empty(RANKS, 2, 3).double()
        dist.all_gather_into_tensor(stacked, values(rank, 2, 3))
        return stacked

    assert same(results(call), [torch.stack([values(rank, 2, 3) for rank in range(RANKS)])] * RANKS)


def test_lists_of_unequal_sizes() -> None:
    """A tensor of rank + 1 rows from each rank; to rank r, r rows from each; sums of r rows."""

    def call(rank: int) -> list[list[Tensor]]:
        gathered = [torch.empty(source + 1, 2).double() for source in range(RANKS)]
        dist.all_gather(gathered, values(rank, rank + 1, 2))
        received = [torch.empty(rank, 2).double() for _ in range(RANKS)]
        dist.all_to_all(received, [values(10 * rank + to, to, 2) for to in range(RANKS)])
        summed = torch.empty(rank, 2).double()
        dist.reduce_scatter(summed, [values(10 * rank + to, to, 2) for to in range(RANKS)])
        return [gathered, received, [summed]]

    for rank, (gathered, received, (summed,)) in enumerate(results(call)):
        sent = [values(10 * source + rank, rank, 2) for source in range(RANKS)]
        assert same(gathered, [values(source, source + 1, 2) for source in range(RANKS)])
        assert same(received, sent)
        assert torch.equal(summed, torch.stack(sent).sum(0))


def test_autograd_sees_no_change_of_what_is_received() -> None:
    """As over a network: a saved tensor that a collective writes has the version that backward expects."""

    def call(rank: int) -> Tensor:
        weight, received = torch.ones(2, requires_grad=True), torch.full((2,), float(rank))
        product = (weight * received).sum()
        dist.all_reduce(received)
        product.backward()
        assert weight.grad is not None
        return weight.grad

    assert same(results(call), [torch.full((2,), 3.0)] * RANKS)


# -- what goes wrong -----------------------------------------------------------------------------------------


def test_all_ranks_end_with_one_that_fails() -> None:
    def call(rank: int) -> None:
        dist.all_reduce(torch.ones(1))
        if rank == 1:
            raise ValueError("here")
        dist.all_reduce(torch.ones(1))

    first, *others = run(call)
    assert (first.rank, type(first.error)) == (1, ValueError)
    assert {(failure.rank, type(failure.error)) for failure in others} == {(0, LostRank), (2, LostRank)}
    assert "ValueError on rank 1" in str(others[0].error)


@pytest.mark.parametrize("call", ["missing", "message", "other order"])
def test_a_wait_without_end_is_an_error_at_once(call: str) -> None:
    def work(rank: int) -> None:
        if call == "missing" and rank != 2:
            dist.all_reduce(torch.ones(1))
        if call == "message" and rank == 0:
            dist.recv(torch.ones(1), 2)
        if call == "other order":
            groups = [dist.new_group(list(range(RANKS))) for _ in range(2)]
            for group in groups if rank else reversed(groups):
                dist.all_reduce(torch.ones(1), group=group)

    failures = run(work, timeout=600.0)
    assert isinstance(failures[0].error, RuntimeError)
    assert f"rank {failures[0].rank} waits" in str(failures[0].error)
    assert "no rank can continue" in str(failures[0].error)


def test_different_collectives_are_named() -> None:
    def work(rank: int) -> None:
        if rank:
            dist.all_reduce(torch.ones(3))
        else:
            dist.broadcast(torch.ones(3), 0)

    texts = [str(failure.error) for failure in run(work)]
    assert any("broadcast" in text and "all_reduce" in text for text in texts)


def test_different_sizes_fail_on_all_ranks() -> None:
    failures = run(lambda rank: dist.broadcast(torch.ones(2 + rank), 0))
    assert {type(failure.error) for failure in failures} == {ValueError}
    assert {failure.rank for failure in failures} == {0, 1, 2}


def test_a_rank_that_does_not_come_back_is_left_behind() -> None:
    released = threading.Event()

    def work(rank: int) -> None:
        if rank == 1:
            released.wait()
        dist.all_reduce(torch.ones(1))

    try:
        lost, *others = run(work, timeout=0.5)
    finally:
        released.set()
    assert (lost.rank, type(lost.error)) == (1, TimeoutError)
    assert "released.wait()" in str(lost.error)
    assert {type(failure.error) for failure in others} == {LostRank}


def test_only_the_thread_of_a_rank_can_wait() -> None:
    def work(rank: int) -> None:
        found = []
        tensor = torch.ones(1)
        pending = dist.all_reduce(tensor, async_op=True)

        def wait() -> None:
            try:
                pending.wait()
            except RuntimeError as error:
                found.append(str(error))

        helper = threading.Thread(target=wait)
        helper.start()
        helper.join()
        pending.wait()
        assert "only the rank's own thread" in found[0], found
        assert float(tensor) == RANKS

    assert run(work) == []


def test_nothing_is_left_in_the_process() -> None:
    world = dist.distributed_c10d._world
    results(lambda rank: dist.get_rank())
    assert dist.distributed_c10d._world is world
    assert not dist.is_initialized()
