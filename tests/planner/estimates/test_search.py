"""The search finds what an exhaustive one finds, and lists what a run accepts."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from distributed import UserError
from distributed.interfaces.backend_spec import SCHEDULES
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.planner.estimates import search as searching
from distributed.planner.estimates.candidates import (
    SearchSpace,
    distinct_backends,
    groups,
    leaves,
    micro_batches,
    schedule_refusal,
    sized,
)
from distributed.planner.estimates.configuration import refusal_of
from distributed.planner.estimates.from_numbers import FromNumbers
from distributed.planner.estimates.hardware import load_profile
from distributed.planner.estimates.ledger import MemoryParts
from distributed.planner.estimates.numbers import model_numbers
from distributed.planner.estimates.search import Ranked, search
from distributed.planner.estimates.split import Split
from distributed.planner.estimates.table import plan_table
from distributed.registry.catalog import get_catalog
from tests.planner.estimates.random_splits import random_numbers, random_profile

BACKENDS = ("pytorch-ddp", "fsdp", "deepspeed")
LLAMA_3 = {"kv_heads": 8, "vocabulary": 128256, "sequence": 8192}


def random_space(draw: random.Random) -> SearchSpace:
    """A few to a few hundred candidates."""
    catalog = get_catalog()
    names = draw.sample(BACKENDS, draw.choice([1, 1, 2]))
    return SearchSpace(
        random_numbers(draw),
        draw.choice([1, 2, 4, 4, 6, 8]),
        tuple(catalog.backends[name] for name in names),
        precision=draw.choice(["fp32", "bf16"]),
        schedules=tuple(draw.sample(sorted(SCHEDULES), draw.choice([1, 1, 2]))),
        checkpointing=draw.choice([(False,), (True,), (False, True)]),
        offload=draw.choice([(False,), (False,), (False, True)]),
        largest={"context": 2},
    )


class Remembered(FromNumbers):
    """Predictions whose memory is computed once for each split."""

    taken: dict[Split, MemoryParts]

    def memory(self, split: Split) -> MemoryParts:
        known = self.__dict__.setdefault("taken", {})
        if split not in known:
            known[split] = super().memory(split)
        return known[split]


class Unlimited(FromNumbers):
    """Predictions under which every split fits."""

    def memory(self, split: Split) -> MemoryParts:
        return MemoryParts()


def exhaustive(space: SearchSpace, predictions: FromNumbers, limit: float, plans: int) -> list[Ranked]:
    """Every candidate, timed; those that fit, sorted."""
    found = []
    for group, refused in groups(space):
        if refused is not None:
            continue
        for leaf, reason in leaves(space, group):
            for split in sized(space, leaf, micro_batches(space, group)) if reason is None else ():
                late = schedule_refusal(
                    split.schedule, split.dims.pipeline, split.num_micro_batches, space.sizes.layers
                )
                if late is None and predictions.memory(split).total <= limit:
                    found.append(Ranked(split, predictions.time(split), predictions.memory(split), 0.0))
    return sorted(found, key=lambda plan: plan.key)[:plans]


def check_nothing_better_is_missed(spaces: int) -> int:
    """Compare `spaces` searches with exhaustive ones; returns how many left a group out."""
    draw, pruned = random.Random(2000), 0
    for _ in range(spaces):
        space, profile = random_space(draw), random_profile(draw)
        predictions, plans = Remembered(space.sizes, profile), draw.choice([1, 3])
        try:
            everything = exhaustive(space, predictions, float("inf"), 10**9)
            limit = draw.choice(everything).memory.total if everything else 0.0
            found = search(space, predictions, limit, plans)
        except UserError:
            assert not everything
            continue
        best = [plan for plan in everything if plan.memory.total <= limit][:plans]
        assert [p.split for p in found.plans] == [p.split for p in best], space
        pruned += "a lower bound of its time is above the slowest listed plan" in found.reasons()
    return pruned


@pytest.mark.slow
def test_the_best_of_2000_random_spaces_is_always_found() -> None:
    assert check_nothing_better_is_missed(2000) > 300


BOUND = FromNumbers.bound


def _bound_above(self: FromNumbers, dims: ParallelDims, share: int, precision: str) -> float:
    """Mutant: a bound that some candidates go below."""
    return 1.3 * BOUND(self, dims, share, precision)


def _bound_without_blocks(self: FromNumbers, dims: ParallelDims, share: int, precision: str) -> float:
    """Mutant: groups with fewer ranks for the model look better, whatever they take."""
    return BOUND(self, dims, share, precision) * dims.model_parallel_size


@pytest.mark.parametrize("mutant", [_bound_above, _bound_without_blocks])
def test_an_unsound_bound_is_noticed(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FromNumbers, "bound", mutant)
    with pytest.raises(AssertionError):
        check_nothing_better_is_missed(300)


def test_a_bound_is_below_every_candidate_of_its_group() -> None:
    draw = random.Random(7)
    for _ in range(60):
        space, profile = random_space(draw), random_profile(draw)
        predictions = FromNumbers(space.sizes, profile)
        for group, refused in groups(space):
            if refused is not None:
                continue
            share = space.sizes.global_batch // group.dims.data_parallel_size
            bound = predictions.bound(group.dims, share, space.precision)
            for leaf, _reason in leaves(space, group):
                for split in sized(space, leaf, micro_batches(space, group)):
                    assert predictions.time(split).total >= bound


def check_a_run_accepts_what_is_listed(device: str, asks: bool) -> int:
    """Ask the planner of runs about each plan: axes, batch, schedule, settings, hooks of plugins.

    Args:
        asks: whether the search asks it, too; otherwise it has the rules of capabilities alone, without
            offloading, which a hook of one backend refuses.
    """
    draw, catalog, checked = random.Random(3), get_catalog(), 0

    def refuses(split: Split) -> str | None:
        return refusal_of(split, catalog, device) if asks else None

    for _ in range(25):
        space, profile = random_space(draw), random_profile(draw)
        space = space if asks else replace(space, offload=(False,))
        try:
            table = searching.search(space, Unlimited(space.sizes, profile), 1.0, 40, refuses=refuses)
        except UserError:
            continue
        for plan in table.plans:
            assert refusal_of(plan.split, catalog, device) is None, plan.split
            checked += 1
    return checked


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_run_accepts_every_plan_of_a_table(device: str, asks: bool) -> None:
    assert check_a_run_accepts_what_is_listed(device, asks) > 100


@pytest.mark.parametrize("forgotten", ["candidates._setting_refusal", "search.schedule_refusal"])
def test_a_listed_plan_that_a_run_refuses_is_noticed(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: a search without the rules of settings, and one without those of schedules."""
    monkeypatch.setattr(f"distributed.planner.estimates.{forgotten}", lambda *args: None)
    with pytest.raises(AssertionError):
        check_a_run_accepts_what_is_listed("cuda", asks=False)


def test_a_search_that_does_not_ask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: plans enter the table unasked."""
    asking = searching.search
    monkeypatch.setattr(searching, "search", lambda *args, refuses, **kwargs: asking(*args, **kwargs))
    with pytest.raises(AssertionError):
        check_a_run_accepts_what_is_listed("cuda", asks=True)


@pytest.mark.parametrize("offload", [(True,), (False, True)])
def test_offloading_that_a_backend_refuses_is_not_listed(offload: tuple[bool, ...]) -> None:
    """FSDP2 has a field of its own for it, as a hook of its plan states."""
    numbers = model_numbers(layers=4, hidden=256, heads=4, vocabulary=1000, global_batch=8)
    table = plan_table(numbers, "H100", 4, plans=100, offload=offload)
    assert {p.split.backend for p in table.plans if p.split.offload} == {"pytorch-ddp", "deepspeed"}
    assert any("FSDP2" in reason for reason in table.reasons())


def test_llama_405b_on_16384_ranks() -> None:
    """Few of some 40,000 candidates are timed, and the fastest plan is in the range of the published 400."""
    numbers = model_numbers(layers=126, hidden=16384, heads=128, ffn=53248, global_batch=2048, **LLAMA_3)
    table = plan_table(numbers, "H100", 16384)
    assert len(table.plans) == 10
    assert sum(table.reasons().values()) > 20_000
    assert table.timed < 5_000
    best = table.plans[0]
    assert best.split.dims.world_size == 16384
    assert best.memory.total <= load_profile("H100").memory
    assert 5.0 < best.time.total < 12.0


def test_every_candidate_that_is_not_listed_has_a_reason() -> None:
    numbers = model_numbers(layers=4, hidden=256, heads=4, vocabulary=1000, global_batch=8)
    space = SearchSpace(numbers, 4, distinct_backends(get_catalog().backends.values()), precision="bf16")
    table = search(space, Unlimited(numbers, load_profile("A100")), 1.0, 5, pruned=False)
    candidates = 0
    for group, refused in groups(space):
        count = len(micro_batches(space, group)) if refused is None else 0
        candidates += sum(count for _ in leaves(space, group)) if refused is None else 1
    assert len(table.plans) + sum(table.reasons().values()) == candidates
    assert all(entry.reason and entry.subject for entry in table.rejected)


def test_backends_that_divide_in_the_same_way_are_listed_once() -> None:
    names = [spec.name for spec in distinct_backends(get_catalog().backends.values())]
    assert "fsdp" in names
    assert "pytorch-ddp" in names
    assert not {"serial", "horovod", "ray", "tensorflow"} & set(names)


def test_a_batch_that_nothing_divides_is_refused() -> None:
    numbers = model_numbers(layers=3, hidden=192, heads=3, vocabulary=1000, sequence=125, global_batch=3)
    with pytest.raises(UserError) as caught:
        plan_table(numbers, "A100", 7)
    assert (caught.value.field, caught.value.got) == ("global_batch_size", 3)
    assert "7" in str(caught.value.allowed)


def test_a_given_micro_batch_is_in_the_batches_that_are_named() -> None:
    """Micro-batches of 4 samples on 2 ranks make multiples of 8."""
    numbers = model_numbers(layers=3, hidden=192, heads=3, vocabulary=1001, sequence=125, global_batch=19)
    with pytest.raises(UserError, match=r"global_batch_size: .*Got 19\. Allowed: 16 or 24") as caught:
        plan_table(numbers, "A100", 2, micro_batch=4)
    assert "2 ranks" in caught.value.message


def test_a_precision_that_no_backend_has_is_refused() -> None:
    with pytest.raises(UserError, match="bf16, fp16, fp32") as caught:
        plan_table(model_numbers(parameters=1e8, global_batch=8), "H100", 8, precision="fp8")
    assert caught.value.field == "precision"


def test_a_model_larger_than_the_cluster_names_one_that_is_enough() -> None:
    numbers = model_numbers(layers=80, hidden=8192, heads=64, ffn=28672, global_batch=16, **LLAMA_3)
    with pytest.raises(UserError, match=r"GB more than a device has") as caught:
        plan_table(numbers, "H100", 8)
    enough = int(str(caught.value.allowed).split()[0])
    assert enough in (32, 64)
    assert plan_table(numbers, "H100", enough, plans=1).plans


def test_codecs_are_tried_when_they_are_asked_for() -> None:
    """On a slow network fp16 gradients take half of the time, and only backends with codecs are listed."""
    numbers = model_numbers(layers=12, hidden=768, heads=12, global_batch=16)
    slow = load_profile("A100").model_copy(update={"link_between_nodes": 1e8, "devices_per_node": 1})
    only = {"largest": {"tensor": 1, "pipeline": 1, "context": 1}}
    assert {p.split.codec for p in plan_table(numbers, slow, 16, **only).plans} == {"none"}
    tried = plan_table(numbers, slow, 16, plans=100, codecs=("none", "fp16"), **only).plans
    assert tried[0].split.codec == "fp16"
    best = {
        codec: min(p.time.total for p in tried if p.split.codec == codec and p.split.dims.data == 16)
        for codec in ("none", "fp16")
    }
    assert best["fp16"] < 0.6 * best["none"]


def test_context_ranks_need_two_chunks_of_a_sequence_each_or_heads() -> None:
    """8 ranks of ring attention cannot divide 8 tokens; 2 ranks divide 6 tokens by heads."""
    sizes = {"layers": 2, "hidden": 64, "global_batch": 8, "vocabulary": 64}
    short = model_numbers(heads=4, sequence=8, **sizes)
    assert short.indivisible(ParallelDims(context=4)) is None
    assert "two chunks each" in str(short.indivisible(ParallelDims(context=8)))
    odd = model_numbers(heads=4, sequence=6, **sizes)
    assert odd.indivisible(ParallelDims(context=2)) is None
    assert "do not divide sequence=6" in str(odd.indivisible(ParallelDims(context=4)))
