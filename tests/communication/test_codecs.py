"""Each codec alone: several ranks as threads of one process, beside the oracle in plain PyTorch."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed.communication.codecs.sparse import largest_elements
from distributed.communication.coded_sum import CodedSum
from distributed.config.compression import CompressionSection
from distributed.registry.catalog import get_catalog, load_target
from tests.communication import codec_oracle as oracle

CODECS = ("fp16", "bf16", "int8", "fp8", "top-k", "random-k", "powersgd")
SHAPES = {"w": (24, 40), "b": (7,), "conv": (8, 5, 3, 3), "scalar": (), "long": (1030,)}


class ThreadWire:
    """The collectives between the threads of one process."""

    def __init__(self, rank: int, size: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._slots, self._barrier = rank, size, slots, barrier
        self.sent = 0.0

    def _all(self, value: Tensor) -> list[Tensor]:
        self._slots[self.rank] = value
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found

    def sum(self, values: Tensor) -> Any:
        self.sent += 2 * (self.size - 1) / self.size * values.nbytes
        parts = self._all(values.clone())
        found = sum(parts[1:], start=parts[0])
        return lambda: found

    def gather(self, payload: Tensor) -> Any:
        self.sent += (self.size - 1) * payload.nbytes
        found = torch.stack(self._all(payload))
        return lambda: found

    def scatter(self, parts: Tensor) -> Any:
        self.sent += (self.size - 1) * parts[0].nbytes
        found = torch.stack([of_rank[self.rank] for of_rank in self._all(parts)])
        return lambda: found


def run_ranks(size: int, work: Any) -> list[Any]:
    """What ``work(wire)`` returns on each of `size` ranks."""
    slots, barrier, found = [None] * size, threading.Barrier(size, timeout=60), [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = work(ThreadWire(rank, size, slots, barrier))
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def coded_sum(codec: str, wire: Any, feeds_back: bool | None = None, revocable: bool = False) -> CodedSum:
    options = CompressionSection(codec=codec, ratio=oracle.RATIO, rank=oracle.RANK, error_feedback=feeds_back)
    spec = get_catalog().codecs[codec]
    return CodedSum(load_target(spec.target)(options, spec.feeds_back(options)), wire, oracle.SEED, revocable)


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return {
        name: torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
        for name, shape in SHAPES.items()
    }


def first_rows(codec: str) -> dict[str, int]:
    row = {"fp16": 64, "bf16": 64, "int8": 256, "fp8": 256}.get(codec, 1)
    found, number = {}, 0
    for name, shape in SHAPES.items():
        found[name] = number
        number += -(-torch.Size(shape).numel() // row)
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("codec", CODECS)
def test_each_step_is_the_oracles(codec: str, size: int) -> None:
    steps = 4

    def work(wire: ThreadWire) -> list[dict[str, Tensor]]:
        summed, found = coded_sum(codec, wire, feeds_back=True), []
        for step in range(steps):
            own = gradients(wire.rank, step)
            summed.begin(own).finish()
            summed.settle(skipped=False)
            found.append(own)
        return found

    found = run_ranks(size, work)
    expected = oracle.ErrorFeedback(codec, first_rows(codec))
    for step in range(steps):
        values = [gradients(rank, step) for rank in range(size)]
        for name in SHAPES:
            total = expected([v[name] for v in values], name, step)
            for rank in range(size):
                assert torch.equal(found[rank][step][name], found[0][step][name]), "the ranks part"
                torch.testing.assert_close(found[rank][step][name], total, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_is_lost(codec: str) -> None:
    """What was sent and what is kept add up to all gradients."""

    def work(wire: ThreadWire) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        summed = coded_sum(codec, wire, feeds_back=True)
        sent = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        for step in range(5):
            own = gradients(wire.rank, step)
            summed.begin(own).finish()
            summed.settle(skipped=False)
            for name, total in own.items():
                sent[name] += total
        return sent, summed.residuals

    ranks = run_ranks(3, work)
    for name in SHAPES:
        given = sum(gradients(rank, step)[name] for rank in range(3) for step in range(5))
        kept = sum(residuals[name] for _, residuals in ranks)
        torch.testing.assert_close(ranks[0][0][name] + kept, given, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("codec", CODECS)
def test_buckets_do_not_matter(codec: str) -> None:
    def work(wire: ThreadWire, together: bool) -> list[dict[str, Tensor]]:
        summed, found = coded_sum(codec, wire, feeds_back=True), []
        for step in range(2):
            own = gradients(wire.rank, step)
            buckets = [own] if together else [{name: value} for name, value in own.items()]
            pending = [summed.begin(bucket) for bucket in buckets]
            for one in pending:
                one.finish()
            summed.settle(skipped=False)
            found.append(own)
        return found

    one, many = (run_ranks(3, lambda wire, t=together: work(wire, t)) for together in (True, False))
    for a, b in zip(one[0], many[0], strict=True):
        assert all(torch.equal(a[name], b[name]) for name in SHAPES)


@pytest.mark.parametrize("codec", CODECS)
def test_a_skipped_step_leaves_no_trace(codec: str) -> None:
    def work(wire: ThreadWire, bad: bool) -> dict[str, Tensor]:
        summed = coded_sum(codec, wire, feeds_back=True, revocable=True)
        for step in range(3):
            own = gradients(wire.rank, step)
            if step == 1:
                if wire.rank == 1:
                    own["w"][3, 5] = torch.nan if bad else 1e3
                    own["long"][1029] = torch.inf if bad else 1e3
                summed.begin(own).finish()
                assert not bad or not torch.isfinite(own["w"]).all()
                assert not bad or not torch.isfinite(own["long"]).all()
                summed.settle(skipped=True)
            else:
                summed.begin(own).finish()
                summed.settle(skipped=False)
        return own

    good, bad = (run_ranks(2, lambda wire, b=b: work(wire, b)) for b in (False, True))
    for rank in range(2):
        for name in SHAPES:
            assert torch.equal(good[rank][name], bad[rank][name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("codec", CODECS)
def test_bytes_are_those_stated(codec: str, size: int, dtype: torch.dtype) -> None:
    def work(wire: ThreadWire) -> float:
        summed = coded_sum(codec, wire)
        summed.begin(gradients(wire.rank, 0, dtype)).finish()
        return wire.sent

    spec, options = get_catalog().codecs[codec], CompressionSection(ratio=oracle.RATIO, rank=oracle.RANK)
    itemsize = max(4, dtype.itemsize)
    stated = sum(spec.wire_bytes(shape, itemsize, options, size) for shape in SHAPES.values())
    # The rank with most rows has one row more than the others at most, and all send as many.
    rest = 2 * (size - 1) * 260 if "scatter" in spec.exchanges else 0
    for sent in run_ranks(size, work):
        assert stated <= sent + 1e-6
        assert sent <= stated + rest + 1e-6


def test_the_traffic_is_of_the_exchanges_that_are_declared() -> None:
    options = CompressionSection()
    for spec in get_catalog().codecs.values():
        assert spec.traffic((64, 64), 4, options).kinds == spec.exchanges


@pytest.mark.parametrize("numel", [1, 100, 40_000, 300_001])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3])
def test_a_sampled_threshold_finds_the_largest(numel: int, ratio: float) -> None:
    torch.manual_seed(numel)
    count = max(1, int(numel * ratio))
    for values in (torch.randn(numel), torch.randn(numel).exp(), torch.arange(numel).float()):
        expected = values.abs().topk(count).indices.sort().values
        assert torch.equal(largest_elements(values, count), expected)


def test_a_matrix_of_zeros_learns_later() -> None:
    """PowerSGD begins a step with the factor of the one before, which a gradient of zeros makes zero."""

    def work(wire: ThreadWire) -> Tensor:
        summed = coded_sum("powersgd", wire)
        for step in range(2):
            own = {"w": gradients(wire.rank, step)["w"] * step}
            summed.begin(own).finish()
            summed.settle(skipped=False)
        return own["w"]

    assert run_ranks(2, work)[0].abs().sum() > 0


def test_without_feedback_the_expectation_is_the_sum() -> None:
    def work(wire: ThreadWire) -> Tensor:
        summed = coded_sum("random-k", wire, feeds_back=False)
        total = torch.zeros(SHAPES["w"], dtype=torch.float64)
        for _ in range(400):
            own = {"w": torch.ones(SHAPES["w"], dtype=torch.float64)}
            summed.begin(own).finish()
            summed.settle(skipped=False)
            total += own["w"]
        return total / 400

    mean = run_ranks(2, work)[0]
    assert mean.mean().item() == pytest.approx(2.0, rel=1e-12)  # as many elements at each step
    assert (mean - 2.0).abs().max() < 1.5  # five standard deviations of one element
