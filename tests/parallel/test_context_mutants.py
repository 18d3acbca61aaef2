"""The comparison with one process turns red for every broken form of training on slices of sequences."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from distributed.errors import UserError
from distributed.registry.catalog import get_catalog
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.parallel.context_mutants import spec_of
from tests.parallel.models import SEQUENCES, tokens
from tests.parallel.test_context import trained_twice
from tests.parallel.test_tensor_parallel import DATA, STEPS, difference, reference, trainer_of

pytest.importorskip("transformers")


@pytest.fixture
def mutant(request: pytest.FixtureRequest) -> Iterator[str]:
    spec = spec_of(request.param)
    catalog = get_catalog()
    catalog.backends[spec.name] = spec
    yield spec.name
    del catalog.backends[spec.name]


@pytest.mark.parametrize(
    "mutant",
    ["EdgeIsLostUnnoticed", "PositionsBeginAnewUnnoticed", "MaskOfASliceUnnoticed", "GradientsAreAveraged"],
    indirect=True,
)
def test_the_weights_differ(mutant: str, rank_pool: RankPool) -> None:
    model = SEQUENCES["llama"].build()
    trainer_of(model, mutant, 2, rank_pool, {"context": 2}).fit(DATA, max_steps=STEPS)
    assert difference(model, reference("llama", SEQUENCES["llama"].build).weights) > 1e-6


@pytest.mark.parametrize(
    ("mutant", "text"),
    [
        ("EdgeIsLost", "'loss' of slices does not add up"),
        ("PositionsBeginAnew", "computes something else"),
        ("MaskOfASlice", "computes something else"),
    ],
    indirect=["mutant"],
)
def test_the_first_window_is_refused(mutant: str, text: str, rank_pool: RankPool) -> None:
    trainer = trainer_of(SEQUENCES["llama"].build(), mutant, 2, rank_pool, {"context": 2})
    with pytest.raises(UserError, match=text):
        trainer.fit(DATA, max_steps=1)


@pytest.mark.parametrize("mutant", ["SameMasks"], indirect=True)
def test_the_masks_are_the_same(mutant: str, rank_pool: RankPool) -> None:
    assert trained_twice(mutant, rank_pool) < EXACT


@pytest.mark.parametrize("mutant", ["OneSliceReports"], indirect=True)
def test_the_validation_loss_differs(mutant: str, rank_pool: RankPool) -> None:
    found = []
    for backend in ("pytorch-ddp", mutant):
        model = SEQUENCES["llama"].build()
        trainer = trainer_of(model, backend, 2, rank_pool, {"context": 2})
        found.append(trainer.fit(DATA, tokens(13), epochs=1).epochs[-1]["val_loss"])
    assert not torch.isclose(*map(torch.tensor, found), atol=1e-6)
