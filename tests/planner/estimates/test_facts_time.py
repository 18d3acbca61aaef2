"""Step times of models whose operations are given: sums by hand, errors, and properties."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from distributed import UserError
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.planner.estimates.engine import Engine
from distributed.planner.estimates.facts_time import FactsTimer, _Step
from distributed.planner.estimates.hardware import HardwareProfile, load_profile
from distributed.planner.estimates.model_facts import (
    BlockFacts,
    Collective,
    Cut,
    ModelFacts,
    OptimizerFacts,
    ParameterFacts,
    Size,
    Timeline,
)
from distributed.planner.estimates.split import Split
from distributed.planner.estimates.work_facts import (
    NOT_COUNTED,
    BlockWork,
    Operations,
    OptimizerWork,
    WorkFacts,
)
from distributed.planner.pipeline import plain_shape
from tests.planner.estimates.measured_profiles import linear_profile
from tests.planner.estimates.time_mutants import MUTANTS

NANO = 1e-9
LINEAR = linear_profile()
NONE = Size(0)


def chain(rows: int = 100, flops: float = 1000.0, blocks: int = 2, cut: Cut | None = None) -> ModelFacts:
    """Blocks in a row, each with one weight of so many rows of 4 bytes, a product of `flops` operations for
    each sample forward, and two backward. An update moves 20 bytes for each element. `cut` exchanges 12 bytes
    of each sample in each direction."""
    product = Operations("matmul", 1, Size(0, flops), Size(0, 8.0))
    exchanged = (Collective("all_reduce", "tensor", Size(0, 12.0)),) * (2 if cut and cut.tensor > 1 else 0)
    line = Timeline((), (), {}, (Size(0, 4.0),), exchanged)
    work = WorkFacts(
        (BlockWork(), *(BlockWork((product,), (product._replace(number=2),)) for _ in range(blocks))),
        OptimizerWork((Operations("elementwise", 1, NONE, Size(0, 20.0)),)),
    )
    block = BlockFacts("block")
    received = (NONE, NONE)
    if cut is not None and cut.pipeline > 1:
        last = cut.pipeline - 1
        received = (Size(0, 16.0) if cut.stage else NONE, Size(0, 16.0) if cut.stage < last else NONE)
    return ModelFacts(
        "Chain",
        tuple(ParameterFacts(f"w{i}", (rows, 1), 4, True, i + 1) for i in range(blocks)),
        (replace(block, name=""), *(replace(block, name=str(i)) for i in range(blocks))),
        (),
        line,
        line,
        line,
        line,
        OptimizerFacts(0.0, 0.0),
        cut=cut or Cut(),
        received=received,
        work=work,
    )


def split(backend: str = "serial", **given: Any) -> Split:
    axes = {axis: given.pop(axis) for axis in list(given) if axis in vars(ParallelDims())}
    return Split(ParallelDims(**axes), backend, micro_batch=3, **given)


# A product of 3 samples takes 3,000 ns, the weight of a block has 400 bytes, and its update 2,000 ns.
BY_HAND = [
    # Two blocks with a product forward and two backward; two updates.
    (split(), 18_000, 0, 4_000),
    # The second micro-batch adds 400 bytes to 400, for each weight.
    (split(num_micro_batches=2), 36_000 + 2 * 1_200, 0, 4_000),
    # Each block once more.
    (split(activation_checkpointing=True), 24_000, 0, 4_000),
    # A bucket of 800 bytes; two copies of each gradient, read and written.
    (split("pytorch-ddp", data=2), 18_000, 800 + 2 * 2 * 800, 4_000),
    # Each block is gathered twice and reduced once, copied out of two gathers, and twice when it is reduced.
    (split("fsdp", shard=2), 18_000, (4 + 2) * 400 + (4 + 4) * 800, 2_000),
    # Gathered again in the second micro-batch, and reduced once.
    (
        split("fsdp", shard=2, num_micro_batches=2),
        36_000 + 2 * 1_200,
        (8 + 2) * 400 + (8 + 4) * 800,
        2_000,
    ),
    # As with two shards, and half of each gradient between the copies.
    (split("fsdp", data=2, shard=2), 18_000, (4 + 2) * 400 + 2 * 200 + (4 + 4) * 800, 2_000),
    # Gradients are reduced, half of the weights updated, and all of them gathered.
    (split("deepspeed", data=2, zero_stage=1), 18_000, 800 + 4 * 800 + 800, 2_000),
    # Stage 2 reduces them in each micro-batch.
    (
        split("deepspeed", data=2, zero_stage=2, num_micro_batches=2),
        36_000 + 2 * 1_200,
        2 * 800 + 4 * 800 + 800,
        2_000,
    ),
    # Activations of 36 bytes are summed once in each direction.
    (split("pytorch-ddp", tensor=2), 18_000, 2 * 36, 4_000),
    # Two full buckets and a rest are as long as their bytes.
    (split("pytorch-ddp", data=4), 18_000, 800 + 2 * 2 * 800, 4_000),
]


def source(cut: Cut) -> ModelFacts:
    """The same operations on each rank."""
    return chain(cut=cut)


@pytest.mark.parametrize(("given", "compute", "exposed", "optimizer"), BY_HAND)
def test_sums_by_hand(given: Split, compute: float, exposed: float, optimizer: float) -> None:
    parts = FactsTimer(source, LINEAR).parts(given)
    assert parts.compute == pytest.approx(compute * NANO)
    assert parts.exposed_communication == pytest.approx(exposed * NANO)
    assert parts.optimizer == pytest.approx(optimizer * NANO)
    assert parts.bubble == 0.0
    assert parts.data == pytest.approx(given.num_micro_batches * 12 / LINEAR.host_link)


@pytest.mark.parametrize(("name", "mutant"), MUTANTS.items())
def test_a_wrong_form_is_noticed(
    name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Step, name.strip(), mutant)
    timer, noticed = FactsTimer(source, linear_profile(overlap=0.5)), False
    if name == "_last_bucket":  # all hidden but the last bucket
        assert timer.parts(split("pytorch-ddp", data=2)).exposed_communication < (800 + 3_200) * NANO
        return
    if name == "_copies ":
        timer = FactsTimer(source, linear_profile(replica_seconds=1.0))
        assert timer.parts(split("pytorch-ddp", data=2)).exposed_communication < 2.0
        return
    for given, compute, exposed, optimizer in BY_HAND:
        parts = FactsTimer(source, LINEAR).parts(given)
        found = (parts.compute, parts.exposed_communication, parts.optimizer)
        noticed |= found != pytest.approx([compute * NANO, exposed * NANO, optimizer * NANO])
    assert noticed


def test_the_last_bucket_is_exposed() -> None:
    """Two full buckets are hidden as far as their share allows, and what backward ends with is not."""
    rows = 25 * 2**20 // 4
    facts = chain(rows=rows + 100, flops=1e9)  # two buckets, and 800 bytes
    parts = FactsTimer(facts, linear_profile(overlap=0.75)).parts(split("pytorch-ddp", data=2))
    copies = 4 * 2 * (4 * rows + 400)
    assert parts.exposed_communication == pytest.approx(NANO * (800 + 0.25 * 2 * 4 * rows + copies))


def test_the_host_takes_time_for_each_operation() -> None:
    profile = linear_profile(forward_seconds=1e-3, backward_seconds=2e-3)
    parts = FactsTimer(chain(), profile).parts(split())
    assert parts.compute == pytest.approx(18_000 * NANO + 2 * 1e-3 + 4 * 2e-3)


def test_the_host_takes_time_for_each_parameter() -> None:
    """To add the gradients of the second micro-batch, to reduce them, and to update the weights."""
    profile = linear_profile(backward_seconds=1e-3, replica_seconds=1.0, update_seconds=10.0)
    given = split("pytorch-ddp", data=2, num_micro_batches=2)
    plain, parts = (FactsTimer(chain(), each).parts(given) for each in (LINEAR, profile))
    products, added = 2 * 4, 2
    assert parts.compute - plain.compute == pytest.approx((products + added) * 1e-3)
    assert parts.exposed_communication - plain.exposed_communication == pytest.approx(2 * 1.0)
    assert parts.optimizer - plain.optimizer == pytest.approx(2 * 10.0)
    alone = FactsTimer(chain(), profile).parts(split())
    assert alone.exposed_communication == 0.0


def test_ranks_wait_for_the_slowest_and_for_each_unit() -> None:
    profile = linear_profile(skew=0.5, unit_seconds=1.0, sharded_update_seconds=10.0)
    plain = FactsTimer(chain(), LINEAR).parts(split("fsdp", shard=2))
    parts = FactsTimer(chain(), profile).parts(split("fsdp", shard=2))
    waits = parts.exposed_communication - plain.exposed_communication
    assert waits == pytest.approx(0.5 * 18_000 * NANO + 2 * 3)
    assert parts.optimizer - plain.optimizer == pytest.approx(2 * 10.0)
    assert FactsTimer(chain(), profile).parts(split()) == FactsTimer(chain(), LINEAR).parts(split())


@pytest.mark.parametrize(("cores", "sharing"), [(8, 1.0), (4, 2.0), (6, 8 / 6)])
def test_ranks_that_share_a_processor_compute_while_others_wait(cores: int, sharing: float) -> None:
    """A step is as long as all computation on the cores, or as its longest path on cores of its own."""
    node = LINEAR.measured
    assert node is not None
    shared = LINEAR.model_copy(update={"measured": node.model_copy(update={"cores": cores})})
    given = split("pytorch-ddp", data=4, pipeline=2, num_micro_batches=2)
    alone, parts = (FactsTimer(source, profile).parts(given) for profile in (LINEAR, shared))
    assert alone.bubble > 0.0
    assert parts.compute == alone.compute
    path = (alone.compute + alone.bubble) / sharing
    assert parts.compute + parts.bubble == pytest.approx(max(alone.compute, path))


def test_a_datasheet_by_hand() -> None:
    """A100 in bf16: products at a share of the peak, against launches."""
    profile = load_profile("A100")
    facts = chain(flops=1e9)
    work = [block.forward[0] for block in facts.work.blocks[1:]]
    parts = FactsTimer(facts, profile).parts(split(precision="bf16"))
    device, launch = 3e9 / (312e12 * 0.833), 0.000763 / 25
    forward, backward = (device**2 + launch**2) ** 0.5, ((2 * device) ** 2 + (2 * launch) ** 2) ** 0.5
    assert parts.compute == pytest.approx(len(work) * (forward + backward))
    assert parts.optimizer == pytest.approx(4000 / (2.039e12 * 0.8))
    low, high = FactsTimer(facts, profile).interval(split(precision="bf16"))
    assert (low, high) == pytest.approx((parts.total / 1.11, parts.total * 1.11))


@pytest.mark.parametrize("profile", [LINEAR, load_profile("A100")], ids=["measured", "datasheet"])
def test_a_causal_mask_halves_the_time_but_not_the_operations(profile: HardwareProfile) -> None:
    def attending(kind: str) -> ModelFacts:
        operation = Operations(kind, 1, Size(0, 1e15), NONE)
        work = WorkFacts((BlockWork((operation,)),), OptimizerWork())
        return replace(chain(), work=work)

    full, causal = (FactsTimer(attending(kind), profile) for kind in ("attention", "causal-attention"))
    assert full.parts(split()).compute == pytest.approx(2 * causal.parts(split()).compute)
    assert full.mfu(split(), 1.0) == causal.mfu(split(), 1.0) > 0


def test_mfu_counts_each_product_once() -> None:
    timer = FactsTimer(chain(), load_profile("A100"))
    given = split("pytorch-ddp", data=4, num_micro_batches=2, activation_checkpointing=True, precision="bf16")
    flops = 3 * 2 * 4 * 2 * (1 + 2) * 1000
    assert timer.mfu(given, 0.5) == pytest.approx(flops / (0.5 * 4 * 312e12))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8)])
def test_the_bubble_of_equal_stages_is_that_of_the_schedule(schedule: str, ranks: int, count: int) -> None:
    timer = FactsTimer(source, LINEAR, Engine(sends_exposed=0.0))
    parts = timer.parts(split("pytorch-ddp", pipeline=ranks, schedule=schedule, num_micro_batches=count))
    added = (count - 1) * 2 * 1_200 * NANO
    work = parts.compute - added
    assert work == pytest.approx(count * 18_000 * NANO)
    assert parts.bubble / (parts.bubble + work) == pytest.approx(plain_shape(schedule, ranks, count).bubble)


def test_stages_of_unequal_time_wait_for_the_longest() -> None:
    def uneven(cut: Cut) -> ModelFacts:
        return chain(flops=1000.0 * (1 + cut.stage), cut=cut)

    timer = FactsTimer(uneven, LINEAR, Engine(sends_exposed=0.0))
    parts = timer.parts(split("pytorch-ddp", pipeline=2, num_micro_batches=8))
    mean, longest = 27_000 * NANO, 36_000 * NANO
    assert parts.bubble == pytest.approx(mean + 8 * (longest - mean))


def test_messages_between_stages() -> None:
    """48 bytes of 3 samples, in both directions, for each micro-batch and for the ends."""
    timer = FactsTimer(source, LINEAR, Engine(sends_exposed=1.0))
    parts = timer.parts(split("pytorch-ddp", pipeline=2, num_micro_batches=4))
    assert parts.exposed_communication == pytest.approx(4 * 48 * NANO)


def test_codecs_send_fewer_bytes() -> None:
    given = split("pytorch-ddp", data=2, codec="topk")
    timer = FactsTimer(chain(), LINEAR, codec_share=lambda codec, ranks: {"topk": 0.25}[codec])
    assert timer.parts(given).exposed_communication == pytest.approx((200 + 3_200) * NANO)


@pytest.mark.parametrize(
    ("facts", "given", "field", "text"),
    [
        (chain(), split("pytorch-ddp", tensor=2), "facts", "do not say what a rank of a divided one"),
        (replace(chain(), work=NOT_COUNTED), split(), "facts", "were not counted"),
        (chain(), split(precision="fp8"), "precision", "no rate for this precision"),
    ],
)
def test_what_is_not_predicted_is_refused(facts: ModelFacts, given: Split, field: str, text: str) -> None:
    with pytest.raises(UserError, match=text) as caught:
        FactsTimer(facts, LINEAR).parts(given)
    assert caught.value.field == field


def random_timing(draw: random.Random) -> tuple[Callable[[Cut], ModelFacts], Split]:
    rows, flops, blocks = draw.randint(1, 10**6), 10 ** draw.uniform(3, 10), draw.randint(1, 5)
    backend = draw.choice(("pytorch-ddp", "fsdp", "deepspeed"))
    axes: dict[str, int] = {"data": draw.choice((1, 2, 4))}
    if backend == "fsdp":
        axes["shard"] = draw.choice((2, 4, 16))
    if backend != "deepspeed":
        axes |= {"tensor": draw.choice((1, 2)), "pipeline": draw.choice((1, 1, 2))}
    given = split(
        backend,
        **axes,
        zero_stage=draw.choice((0, 1, 2, 3)) if backend == "deepspeed" else 0,
        num_micro_batches=draw.choice((2, 4)),
        activation_checkpointing=draw.random() < 0.5,
        precision=draw.choice(("fp32", "bf16")),
    )
    return lambda cut: chain(rows, flops, blocks, cut), given


@pytest.mark.parametrize(
    ("field", "factor"),
    [
        ("link_within_node", 0.5), ("link_between_nodes", 0.5), ("latency_within_node", 2.0),
        ("latency_between_nodes", 2.0), ("memory_bandwidth", 0.5), ("peak_flops", 0.5), ("host_link", 0.5),
    ],
)  # fmt: skip
def test_a_slower_device_or_link_never_lowers_the_time(field: str, factor: float) -> None:
    draw = random.Random(field)
    for _ in range(100):
        facts, given = random_timing(draw)
        profile = load_profile(draw.choice(("A100", "H100", "L40S")))
        value = getattr(profile, field)
        slower = {k: v * factor for k, v in value.items()} if isinstance(value, dict) else value * factor
        changed = profile.model_copy(update={field: slower})
        before, after = (FactsTimer(facts, each).parts(given).total for each in (profile, changed))
        assert after >= before * (1 - 1e-12)


@pytest.mark.parametrize("name", ["all-reduce", "all-gather", "reduce-scatter", "send-recv"])
def test_slower_measured_collectives_never_lower_the_time(name: str) -> None:
    draw = random.Random(name)
    for _ in range(50):
        facts, given = random_timing(draw)
        profile = linear_profile(overlap=draw.random())
        assert profile.measured is not None
        ranks = profile.measured.ranks[8]
        slow = {size: tuple((x, 3 * y) for x, y in curve) for size, curve in ranks.collectives[name].items()}
        changed = ranks.model_copy(update={"collectives": {**ranks.collectives, name: slow}})
        node = profile.measured.model_copy(update={"ranks": {8: changed}})
        slower = profile.model_copy(update={"measured": node})
        before, after = (FactsTimer(facts, each).parts(given).total for each in (profile, slower))
        assert after >= before * (1 - 1e-12)
