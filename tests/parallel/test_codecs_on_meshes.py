"""A codec that loses nothing changes nothing, along every axis of the mesh and with masked tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed.registry.catalog import get_catalog
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.parallel.expert_models import EXPERT_ENTRIES
from tests.parallel.mesh_mutants import spec_of
from tests.parallel.models import ENTRIES, dilated, seeded
from tests.parallel.test_tensor_parallel import DATA, STEPS, difference, reference, trainer_of

EVERYTHING = {"codec": "top-k", "ratio": 1.0}

CASES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "data 2 x tensor 2": ("llama tied", "pytorch-ddp", 4, {"tensor": 2}),
    "data 2 x pipeline 2": ("llama tied", "pytorch-ddp", 4, {"pipeline": 2}),
    "data 2 x context 2": ("dilated", "pytorch-ddp", 4, {"context": 2}),
    "context 2": ("dilated", "fsdp", 2, {"context": 2, "shard": 1}),
    "shard 2 x context 2": ("dilated", "fsdp", 4, {"context": 2}),
    "data 2 x shard 2": ("dilated", "fsdp", 4, {"data": 2}),
    "data 4, expert 2": ("moe", "pytorch-ddp", 4, {"expert": 2}),
    "data 2 x shard 2, expert 2": ("moe", "fsdp", 4, {"data": 2, "expert": 2}),
}


@pytest.mark.parametrize("mesh", CASES)
def test_training_is_that_of_one_process(mesh: str, rank_pool: RankPool) -> None:
    """Masked tokens, clipping, and a last window of 5 sequences."""
    name, backend, ranks, parallel = CASES[mesh]
    build = {**ENTRIES, **EXPERT_ENTRIES}[name].build
    model, expected = build(), reference(name, build)
    trainer = trainer_of(model, backend, ranks, rank_pool, parallel, compression=EVERYTHING)
    trainer.fit(DATA, max_steps=STEPS)
    assert difference(model, expected.weights) < EXACT


class Scaled(nn.Module):
    """A model with a parameter without a dimension, which fsdp does not shard."""

    def __init__(self) -> None:
        super().__init__()
        self.model = dilated()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens) * self.scale
        return logits


WITHOUT_A_DIMENSION = [
    ("none", {"context": 2}),
    ("top-k", {"context": 2}),
    ("top-k", {"data": 2}),
]


def off_from_one_process(pool: RankPool, backend: str, codec: str, parallel: dict[str, int]) -> float:
    """By how much the weights differ from those of plain PyTorch, on 4 ranks, of which 2 have shards."""
    build = seeded(Scaled)
    model, options = build(), EVERYTHING if codec == "top-k" else {}
    trainer_of(model, backend, 4, pool, parallel, compression={**options, "codec": codec}).fit(
        DATA, max_steps=STEPS
    )
    return difference(model, reference("scaled", build).weights)


@pytest.mark.parametrize(("codec", "parallel"), WITHOUT_A_DIMENSION)
def test_a_parameter_without_a_dimension_is_trained_exactly(
    codec: str, parallel: dict[str, int], rank_pool: RankPool
) -> None:
    assert off_from_one_process(rank_pool, "fsdp", codec, parallel) < EXACT


@pytest.mark.parametrize(
    ("mutant", "codec", "parallel"),
    [
        *(("WholeParametersAreAveraged", *case) for case in WITHOUT_A_DIMENSION),
        ("CopiesOfShardsAreNotAdded", "top-k", {"data": 2}),
    ],
)
def test_a_broken_reduction_is_noticed(
    mutant: str, codec: str, parallel: dict[str, int], rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(mutant)
    monkeypatch.setitem(get_catalog().backends, spec.name, spec)
    assert off_from_one_process(rank_pool, spec.name, codec, parallel) > 1e-6
