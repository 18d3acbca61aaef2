"""Predicted step times: formulas written out by hand, the bubble of simulated orders, and properties."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from math import hypot
from typing import Any

import pytest

from distributed.interfaces.parallel_dims import ParallelDims
from distributed.parallel.pipeline_orders import bubble_of, order_of, simulate
from distributed.planner.estimates import links
from distributed.planner.estimates.engine import Engine
from distributed.planner.estimates.hardware import HardwareProfile, load_profile
from distributed.planner.estimates.links import Link, link_of
from distributed.planner.estimates.memory_by_numbers import rank_memory
from distributed.planner.estimates.numbers import ModelNumbers, model_numbers
from distributed.planner.estimates.split import Split
from distributed.planner.estimates.time import StepTimer
from distributed.planner.pipeline import plain_shape
from tests.planner.estimates.random_splits import random_numbers, random_profile, random_split

A100 = load_profile("A100")
EXPOSED = Engine(overlap=0.0)
NUMBERS = model_numbers(
    layers=8, hidden=1024, heads=16, ffn=4096, vocabulary=32000, sequence=1024, global_batch=32, family="gpt"
)


def test_one_device_by_hand() -> None:
    """Two samples of a GPT in fp16: a roofline of each block, the output layer, and the update."""
    split = Split(ParallelDims(), "serial", micro_batch=2, num_micro_batches=16, precision="fp16")
    tokens, rate, memory = 2 * 1024, 312e12 * 0.833, 2.039e12 * 0.8
    products = 24 * 1024 * 1024 + 2 * 1024 * 1024  # causal: half of 4 x sequence x hidden
    moved = 12 * 1024 * 1024 * 2 + 2.18 * tokens * 34 * 1024
    block = hypot(tokens * products / rate + moved / memory, 0.000763)
    logits = tokens * 2 * 32000 * 1024 / rate + 4 * tokens * 32000 * 2 / memory
    parts = StepTimer(NUMBERS, A100, Engine()).parts(split)
    assert parts.compute == pytest.approx(16 * 3 * (8 * block + logits))
    assert parts.optimizer == pytest.approx(NUMBERS.counted * 28 / memory)
    assert parts.data == pytest.approx(32 * 1024 * 16 / 32e9)
    assert (parts.bubble, parts.exposed_communication) == (0.0, 0.0)
    assert parts.total == pytest.approx(parts.compute + parts.data + parts.optimizer)


def test_recomputation_is_one_more_forward_pass() -> None:
    split = Split(ParallelDims(), "serial", num_micro_batches=32, precision="fp16")
    without = StepTimer(NUMBERS, A100).parts(split)
    recomputed = StepTimer(NUMBERS, A100).parts(replace(split, activation_checkpointing=True))
    output = StepTimer(replace(NUMBERS, layers=0), A100).parts(split).compute
    assert (recomputed.compute - output) / (without.compute - output) == pytest.approx(4 / 3)


def test_mfu_counts_no_recomputation() -> None:
    """6 x parameters of matrices, and 12 x layers x hidden x sequence, per token (PaLM, appendix B)."""
    split = Split(ParallelDims(data=4), "pytorch-ddp", precision="fp16")
    matrices = 8 * 12 * 1024 * 1024 + 32000 * 1024
    flops = 32 * 1024 * (6 * matrices + 12 * 8 * 1024 * 1024)
    assert StepTimer(NUMBERS, A100).mfu(split, 2.0) == pytest.approx(flops / (2.0 * 4 * 312e12))


RING = 300e9 * 0.82
"""Bytes per second within a node of A100."""


def all_gather(nbytes: float, ranks: int) -> float:
    """Seconds by a ring within a node, with log2 of the ranks as the number of latencies."""
    return (ranks - 1) / ranks * nbytes / RING + (ranks.bit_length() - 1) * 3.48e-5


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (Split(ParallelDims(data=8), "pytorch-ddp"), lambda n: 2 * all_gather(4 * n, 8) - 3 * 3.48e-5),
        # Sharded: gathered before forward and before backward of each micro-batch, reduced once.
        (Split(ParallelDims(shard=8), "fsdp"), lambda n: 3 * all_gather(4 * n, 8)),
        (
            Split(ParallelDims(shard=8), "fsdp", num_micro_batches=3),
            lambda n: (2 * 3 + 1) * all_gather(4 * n, 8),
        ),
        (
            Split(ParallelDims(shard=8), "fsdp", precision="bf16"),
            lambda n: 2 * all_gather(2 * n, 8) + all_gather(4 * n, 8),
        ),
        # ZeRO: gradients are reduced to shards; 1 and 2 gather updated weights.
        (Split(ParallelDims(data=8), "deepspeed", zero_stage=1), lambda n: 2 * all_gather(4 * n, 8)),
        (
            Split(ParallelDims(data=8), "deepspeed", zero_stage=2, num_micro_batches=3),
            lambda n: (3 + 1) * all_gather(4 * n, 8),
        ),
        (
            Split(ParallelDims(data=8), "deepspeed", zero_stage=3, num_micro_batches=3),
            lambda n: 3 * 3 * all_gather(4 * n, 8),
        ),
    ],
)
def test_traffic_of_data_parallel_ranks(split: Split, expected: Callable[[int], float]) -> None:
    parts = StepTimer(NUMBERS, A100, EXPOSED).parts(split)
    assert parts.exposed_communication == pytest.approx(expected(NUMBERS.counted))


def test_tensor_ranks_reduce_twice_in_each_direction() -> None:
    """Shoeybi et al., 2019: activations of a block, twice forward and twice backward."""
    split = Split(ParallelDims(tensor=8), "pytorch-ddp", micro_batch=2, precision="bf16")
    one = 2 * 7 / 8 * (2 * 1024 * 1024 * 2) / RING + 3 * 3.48e-5
    parts = StepTimer(NUMBERS, A100, EXPOSED).parts(split)
    assert parts.exposed_communication == pytest.approx(8 * 4 * one)
    recomputed = StepTimer(NUMBERS, A100, EXPOSED).parts(replace(split, activation_checkpointing=True))
    assert recomputed.exposed_communication == pytest.approx(8 * 6 * one)


def test_communication_hides_behind_computation() -> None:
    split = Split(ParallelDims(data=8), "pytorch-ddp", micro_batch=4)
    exposed = StepTimer(NUMBERS, A100, EXPOSED).parts(split)
    hidden = StepTimer(NUMBERS, A100, Engine(overlap=1.0)).parts(split)
    assert 0.0 < exposed.exposed_communication < 2 / 3 * exposed.compute
    assert hidden.exposed_communication == 0.0


@pytest.mark.parametrize(
    ("dims", "axes", "size", "bandwidth", "within"),
    [
        (ParallelDims(data=4, tensor=8), ("tensor",), 8, 300e9 * 0.82, True),
        # One rank of each node, with the adapter of one device.
        (ParallelDims(data=4, tensor=8), ("data",), 4, 25e9 * 0.882, False),
        # Four ranks of each node, with the adapters of four.
        (ParallelDims(data=16, tensor=2), ("data",), 16, 25e9 * 0.882 * 4, False),
        (ParallelDims(tensor=16), ("tensor",), 16, 25e9 * 0.882 * 8, False),
        (ParallelDims(pipeline=2, data=2, tensor=2), ("pipeline",), 2, 300e9 * 0.82, True),
        (ParallelDims(pipeline=2, data=8), ("pipeline",), 2, 25e9 * 0.882, False),
        (ParallelDims(), ("data",), 1, 300e9 * 0.82, True),
    ],
)
def test_a_group_gets_the_links_on_its_way(
    dims: ParallelDims, axes: tuple[str, ...], size: int, bandwidth: float, within: bool
) -> None:
    link = link_of(A100, dims, *axes)
    assert (link.size, link.within_node) == (size, within)
    assert link.bandwidth == pytest.approx(bandwidth)


@pytest.mark.parametrize(
    ("schedule", "ranks", "count"),
    [
        ("gpipe", 4, 4), ("gpipe", 2, 8), ("1f1b", 4, 8), ("1f1b", 2, 2), ("interleaved-1f1b", 4, 8),
        ("interleaved-1f1b", 2, 4),
    ],
)  # fmt: skip
def test_the_bubble_is_that_of_the_simulated_order(schedule: str, ranks: int, count: int) -> None:
    """Every rank computes in its order; stages take equal time, communication none."""
    shape = plain_shape(schedule, ranks, count)
    simulated = bubble_of(simulate(order_of(shape), shape, forward=1.0, inputs=1.0, weights=1.0))
    assert _bubble_share(schedule, ranks, count) == pytest.approx(simulated, abs=0.02)
    assert _bubble_share(schedule, ranks, count) == pytest.approx(shape.bubble, rel=1e-3)


def test_schedules_that_split_backward_wait_less() -> None:
    shape = plain_shape("interleaved-zero-bubble", 4, 8)
    assert _bubble_share("interleaved-zero-bubble", 4, 8) == pytest.approx(shape.bubble, rel=1e-3)
    assert shape.bubble < _bubble_share("1f1b", 4, 8)


def test_fewer_micro_batches_than_stages_pass_all_of_them() -> None:
    """One micro-batch on four ranks: three of four ranks wait at any time, whatever the schedule."""
    assert _bubble_share("gpipe", 4, 1) == pytest.approx(3 / 4, rel=1e-3)
    assert _bubble_share("interleaved-1f1b", 4, 1) == pytest.approx(3 / 4, rel=1e-3)


def _bubble_share(schedule: str, ranks: int, count: int) -> float:
    fast = A100.model_copy(update={"link_within_node": 1e30, "latency_within_node": 0.0})
    numbers = replace(NUMBERS, vocabulary=1)  # an output layer that takes next to no time
    split = Split(ParallelDims(pipeline=ranks), "any", num_micro_batches=count, schedule=schedule)
    parts = StepTimer(numbers, fast).parts(split)
    return parts.bubble / (parts.bubble + parts.compute)


SLOWER = ("link_within_node", "link_between_nodes", "memory_bandwidth", "host_link")
LONGER = ("latency_within_node", "latency_between_nodes")


def check_slower_is_never_faster(trials: int = 400) -> None:
    """Predicted time never falls when a link or the memory gets slower, or a message takes longer."""
    draw = random.Random(20)
    for _ in range(trials):
        numbers, profile = random_numbers(draw), random_profile(draw)
        split, engine = random_split(draw, numbers), Engine(overlap=draw.choice([0.0, 0.5, 1.0]))
        before = StepTimer(numbers, profile, engine).parts(split).total
        for name in (*SLOWER, *LONGER):
            factor = 10 ** draw.uniform(0, 2)
            value = getattr(profile, name) * (factor if name in LONGER else 1 / factor)
            after = StepTimer(numbers, profile.model_copy(update={name: value}), engine).parts(split).total
            assert after >= before * (1 - 1e-12), f"{name}: {before} -> {after} under {split}"


def test_slower_is_never_faster() -> None:
    check_slower_is_never_faster()


def _always_within(profile: HardwareProfile, dims: ParallelDims, *axes: str, **kwargs: Any) -> Link:
    """Mutant: a slower link within the node relieves the one between nodes."""
    link = link_of(profile, dims, *axes, **kwargs)
    between = profile.link_between_nodes / profile.link_within_node * 1e11
    return link if link.within_node else replace(link, bandwidth=between)


def _hides_more_when_slower(self: Link, operation: str, nbytes: float) -> float:
    """Mutant: time that grows with the bandwidth."""
    return 0.0 if self.size == 1 else nbytes * self.bandwidth * 1e-20


@pytest.mark.parametrize("mutant", ["relieves", "inverts"])
def test_a_time_that_falls_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutant == "relieves":
        for module in ("time", "block_time"):
            monkeypatch.setattr(f"distributed.planner.estimates.{module}.link_of", _always_within)
    else:
        monkeypatch.setattr(links.Link, "seconds", _hides_more_when_slower)
    with pytest.raises(AssertionError, match="link_"):
        check_slower_is_never_faster()


def test_parts_are_never_negative_and_add_up() -> None:
    draw = random.Random(21)
    for _ in range(300):
        numbers, profile = random_numbers(draw), random_profile(draw)
        parts = StepTimer(numbers, profile).parts(random_split(draw, numbers))
        values = list(vars(parts).values())
        assert min(values) >= -1e-12 * parts.total
        assert parts.total == pytest.approx(sum(values))
        low, high = parts.interval(profile.achievable.spread)
        assert low < parts.total < high


def test_a_larger_world_never_raises_the_memory_of_shards() -> None:
    draw = random.Random(22)
    for _ in range(200):
        numbers = random_numbers(draw)
        for dims, stage in ((ParallelDims(shard=2), 0), (ParallelDims(data=2), 3)):
            split = Split(dims, "any", zero_stage=stage, num_micro_batches=draw.choice([1, 4]))
            larger = replace(split, dims=replace(dims, shard=2 * dims.shard, data=2 * dims.data))
            if stage == 0:
                larger = replace(split, dims=ParallelDims(shard=4))
            assert _bytes(numbers, larger) <= _bytes(numbers, split)


def _bytes(numbers: ModelNumbers, split: Split) -> float:
    return rank_memory(numbers, split, A100).total


def test_sixteen_bytes_a_parameter() -> None:
    """Weights, gradients and two moments in float32; ZeRO divides them stage by stage (arXiv:1910.02054), and
    has a bucket and a copy of the weights that a rank updates."""
    numbers, elements = NUMBERS, NUMBERS.counted

    def state(dims: ParallelDims, stage: int = 0) -> float:
        memory = rank_memory(numbers, Split(dims, "any", zero_stage=stage, num_micro_batches=2), A100)
        return (memory.parameters + memory.gradients + memory.optimizer) / elements

    assert state(ParallelDims()) == pytest.approx(16)
    assert state(ParallelDims(data=4)) == pytest.approx(20)  # a bucket for each gradient
    assert state(ParallelDims(data=4), 1) == pytest.approx(4 + 2 * 4 + (4 + 8) / 4)
    assert state(ParallelDims(data=4), 2) == pytest.approx(4 + (4 + 2 * 4 / 4) + (4 + 8) / 4)
