"""A codec that loses nothing changes nothing, along every axis of the mesh and with masked tokens."""

from __future__ import annotations

from typing import Any

import pytest

from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.parallel.expert_models import EXPERT_ENTRIES
from tests.parallel.models import ENTRIES
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
