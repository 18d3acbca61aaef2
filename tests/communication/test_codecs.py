"""The built-in codecs alone: several ranks as threads of one process, through the kit for codecs."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed.communication.codecs.sparse import largest_elements
from distributed.communication.coded_sum import CodedSum
from distributed.config.compression import CompressionSection
from distributed.registry.catalog import get_catalog, load_target
from distributed.testing.codec_suite import SHAPES, CodecSuite, Oracle
from distributed.testing.conformance import CodecConformance
from distributed.testing.thread_wire import ThreadWire, run_ranks
from tests.communication import codec_oracle as oracle


class BuiltIn(CodecConformance):
    """With what the codec computes in plain PyTorch."""

    def oracle(self) -> Oracle:
        reduce, rows = oracle.make(self.codec), oracle.first_rows(SHAPES)
        return lambda values, name, step: reduce(values, name, step, rows[name])


def twice(unit: float) -> float:
    """Bound of a codec that rounds values and sums, each by `unit` of the largest magnitude."""
    return unit * (2 + unit)


class TestFloat16(BuiltIn):
    codec = "fp16"
    bound = twice(2**-11)


class TestBFloat16(BuiltIn):
    codec = "bf16"
    bound = twice(2**-8)


class TestInt8(BuiltIn):
    codec = "int8"
    bound = twice(0.5 / 127 + 2**-20)  # the scale is rounded to float32


class TestFloat8(BuiltIn):
    codec = "fp8"
    bound = twice(2**-4 + 2**-20)


class TestTopK(BuiltIn):
    codec = "top-k"
    options = MappingProxyType({"ratio": oracle.RATIO})


class TestRandomK(BuiltIn):
    codec = "random-k"
    options = MappingProxyType({"ratio": oracle.RATIO})


class TestPowerSGD(BuiltIn):
    codec = "powersgd"
    options = MappingProxyType({"rank": oracle.RANK})


class TestEverythingByTopK(BuiltIn):
    """Without loss: the dense sum."""

    sizes = (3,)
    codec = "top-k"
    options = MappingProxyType({"ratio": 1.0})
    bound = 1e-15

    def oracle(self) -> Oracle:
        return lambda values, name, step: (torch.stack([*values]).sum(0), values)


class TestEverythingByRandomK(TestEverythingByTopK):
    codec = "random-k"


class TestFullRank(TestEverythingByTopK):
    """Factors as large as the matrices: all are sent as they are."""

    codec = "powersgd"
    options = MappingProxyType({"rank": 1000})


def test_all_codecs_pass_the_kit() -> None:
    def leaves(kind: type[CodecSuite]) -> set[str]:
        # The tests of mutants make subclasses, too, which live until they are collected.
        own = (one for one in kind.__subclasses__() if one.__module__ == __name__)
        return {kind.codec}.union(*map(leaves, own)) - {""}

    assert leaves(BuiltIn) == {*get_catalog().codecs}


def coded_sum(codec: str, wire: Any, feeds_back: bool | None = None, names: Any = ("w",)) -> CodedSum:
    options = CompressionSection(codec=codec, ratio=oracle.RATIO, rank=oracle.RANK, error_feedback=feeds_back)
    spec = get_catalog().codecs[codec]
    made = load_target(spec.target)(options, spec.feeds_back(options))
    return CodedSum(made, wire, oracle.SEED, revocable=False, names=names)


def gradient(rank: int, step: int) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(SHAPES["w"], generator=draw, dtype=torch.float64)


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
            own = {"w": gradient(wire.rank, step) * step}
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
