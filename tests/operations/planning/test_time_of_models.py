"""Step times by counted operations: beside those by numbers of the same model, and of models of any kind."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from distributed.interfaces.parallel_dims import ParallelDims
from distributed.operations.planning.collect_facts import collect_facts, facts_source
from distributed.operations.planning.decoder import facts_from_numbers
from distributed.planner.estimates.facts_time import FactsTimer
from distributed.planner.estimates.hardware import load_profile
from distributed.planner.estimates.model_facts import ModelFacts
from distributed.planner.estimates.numbers import model_numbers
from distributed.planner.estimates.split import Split
from distributed.planner.estimates.time import StepTimer
from tests.support.timed_models import batch_of, build

SIZES = {
    "layers": 4,
    "hidden": 2048,
    "heads": 16,
    "kv_heads": 4,
    "ffn": 5632,
    "vocabulary": 32000,
    "sequence": 2048,
}
SPLITS = [
    Split(ParallelDims(), "serial", micro_batch=4, num_micro_batches=8, precision="bf16"),
    Split(ParallelDims(data=8), "pytorch-ddp", micro_batch=4, precision="bf16"),
    Split(ParallelDims(shard=8), "fsdp", micro_batch=4, precision="bf16", activation_checkpointing=True),
    Split(ParallelDims(data=8), "deepspeed", zero_stage=2, micro_batch=4, precision="bf16"),
]


@cache
def llama() -> ModelFacts:
    return facts_from_numbers(**SIZES, precision="bf16")


def test_operations_are_those_by_numbers() -> None:
    numbers = model_numbers(**SIZES, global_batch=32)
    assert llama().num_parameters == numbers.counted
    assert llama().work.flops(32) == pytest.approx(numbers.step_flops, rel=0.005)
    given = (SPLITS[1], 0.5)
    mfu = [timer.mfu(*given) for timer in _timers("A100")]
    assert mfu[0] == pytest.approx(mfu[1], rel=0.005)


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.backend)
@pytest.mark.parametrize("profile", ["A100", "H100"])
def test_the_time_is_near_that_by_numbers(profile: str, split: Split) -> None:
    """One counts the bytes of each operation, the other has the fitted number of passes over activations."""
    counted, fitted = (timer.parts(split).total for timer in _timers(profile))
    assert 1 / 1.5 < counted / fitted < 1.5


def _timers(profile: str) -> tuple[FactsTimer, StepTimer]:
    hardware = load_profile(profile)
    return FactsTimer(llama(), hardware), StepTimer(model_numbers(**SIZES, global_batch=32), hardware)


@cache
def _facts(kind: str) -> ModelFacts:
    if kind == "vit":
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        model: nn.Module = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(1024, 10))
        batch = torch.zeros(2, 16, 64), torch.zeros(2, dtype=torch.long)
    else:
        size = (16, 2, 8) if kind == "convnet" else (32, 3)
        model, batch = build(kind, size), batch_of(kind, size, 2)
    return collect_facts(model, batch, precision="bf16")


@pytest.mark.parametrize("kind", ["convnet", "mlp", "vit"])
@pytest.mark.parametrize("split", SPLITS[:3], ids=lambda split: split.backend)
def test_models_of_any_kind(kind: str, split: Split) -> None:
    parts = FactsTimer(_facts(kind), load_profile("H100")).parts(split)
    assert parts.compute > 0
    assert parts.optimizer > 0
    assert parts.bubble == 0


def test_ranks_that_divide_a_model_exchange_what_its_cut_exchanges() -> None:
    size = (128, 2, 16, 64)
    source = facts_source(build("llama", size), batch_of("llama", size, 2))
    timer = FactsTimer(source, load_profile("A100"))
    whole, cut, staged = (
        timer.parts(Split(ParallelDims(**dims), "pytorch-ddp", micro_batch=2, num_micro_batches=4))
        for dims in ({}, {"tensor": 1, "context": 2}, {"pipeline": 2})
    )
    assert whole.exposed_communication == 0
    assert cut.exposed_communication > 0
    assert cut.optimizer == pytest.approx(whole.optimizer)
    assert staged.bubble > 0
    # Both stages compute the angles of the positions.
    assert 0.5 <= staged.compute / whole.compute < 0.6
    assert staged.optimizer < whole.optimizer
