"""The comparison with one process turns red for every broken form of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from distributed.errors import UserError, WorkerError
from distributed.registry.catalog import get_catalog
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.parallel import pipeline_mutants
from tests.parallel.test_pipeline import DATA, MODELS, STEPS, chain, difference, reference, trainer_of


def frozen_chain() -> nn.Module:
    model = chain()
    for module in list(model.children())[:4]:
        module.requires_grad_(False)
    return model


@pytest.fixture
def mutant(request: pytest.FixtureRequest) -> Iterator[str]:
    spec = pipeline_mutants.spec_of(getattr(pipeline_mutants, request.param))
    catalog = get_catalog()
    catalog.backends[spec.name] = spec
    yield spec.name
    del catalog.backends[spec.name]


@pytest.mark.parametrize(
    ("mutant", "build", "ranks", "parallel"),
    [
        ("TiedGradientsAreNotAdded", MODELS["dilated"], 2, {}),
        ("ReadsRowsOfThePadding", chain, 2, {}),
        ("FrozenBoundaryNeedsNoGradient", frozen_chain, 2, {"schedule": "zbv"}),
        ("ReducesInBackward", chain, 4, {"schedule": "zbv"}),
        ("CopiesCountTwice", MODELS["dilated"], 2, {}),
    ],
    indirect=["mutant"],
)
def test_a_broken_pipeline_is_found(
    mutant: str, build: Any, ranks: int, parallel: dict[str, Any], rank_pool: RankPool
) -> None:
    """The sound form is exact with the same model; the broken one is not, or does not come to an end."""
    expected = reference(f"{build.__name__} of {mutant}", build)
    for backend in ("pytorch-ddp", mutant):
        model = build()
        trainer = trainer_of(model, ranks, rank_pool, {"pipeline": 2, **parallel}, backend=backend)
        try:
            trainer.fit(DATA, max_steps=STEPS)
            found = difference(model, expected)
        except (UserError, WorkerError):
            found = float("inf")
        assert (found < EXACT) == (backend == "pytorch-ddp"), f"{backend}: {found}"


def test_hooks_in_backward_are_exact_where_backward_is_whole(rank_pool: RankPool) -> None:
    """What makes `ReducesInBackward` wrong is the schedule, not the hook."""
    spec = pipeline_mutants.spec_of(pipeline_mutants.ReducesInBackward)
    get_catalog().backends[spec.name] = spec
    try:
        model = chain()
        trainer_of(model, 4, rank_pool, {"pipeline": 2}, backend=spec.name).fit(DATA, max_steps=STEPS)
    finally:
        del get_catalog().backends[spec.name]
    assert difference(model, reference("chain", chain)) < EXACT
