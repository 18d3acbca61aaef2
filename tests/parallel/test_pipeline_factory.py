"""A factory under a pipeline: rank 0 builds the model, and each rank receives what its stages hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import Callback, UserError
from distributed.checkpoint.torch_state import canonical_name
from distributed.interfaces.callback import Context
from distributed.registry.catalog import get_catalog
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from distributed.training.optimizers import build_model
from tests.parallel import pipeline_mutants
from tests.parallel.models import Reference, train_plainly
from tests.parallel.test_pipeline import DATA, GLOBAL_BATCH, MAX_NORM, MODELS, Chain, difference, trainer_of

pytest.importorskip("transformers")

STEPS = 4
Factory = Callable[[], nn.Module]


def named(name: str) -> nn.Module:
    return MODELS[name]()


class ReadsItsWeights(Chain):
    """Cannot be built without values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = float(self[0].weight.detach().norm())  # type: ignore[operator]

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = super().forward(tokens)
        return logits / self.norm


def drawn() -> nn.Module:
    """With weights from the generator that the trainer seeds."""
    return Chain().double()


def reads_its_weights() -> nn.Module:
    return ReadsItsWeights().double()


def expected(factory: Factory) -> Reference:
    model = build_model(factory, 0)
    return train_plainly(model, DATA, global_batch_size=GLOBAL_BATCH, steps=STEPS, max_norm=MAX_NORM)


class AsBuilt(Callback):
    """Fails a run that begins with other values than one process does, or holds those of other stages."""

    all_ranks = True

    def __init__(self, factory: Factory) -> None:
        self.factory = factory

    def on_run_start(self, context: Context) -> None:
        holds = context.backend.pipeline.tensors.holds
        first = context.world.rank == 0
        for name, tensor in context.model.named_parameters():
            assert tensor.is_meta != holds(canonical_name(name))
        for name, tensor in context.model.named_buffers():
            assert tensor.is_meta != (holds(canonical_name(name)) or first)
        serial = build_model(self.factory, 0)
        with context.whole_model() as model:
            for of in (nn.Module.named_parameters, nn.Module.named_buffers):
                own, one = dict(of(model)), dict(of(serial))
                assert own.keys() == one.keys()
                assert all(torch.equal(own[name], one[name]) for name in one)


@pytest.mark.parametrize(
    ("backend", "ranks", "parallel", "factory"),
    [
        ("pytorch-ddp", 2, {}, partial(named, "llama tied")),
        ("pytorch-ddp", 2, {"schedule": "zbv"}, drawn),
        ("pytorch-ddp", 4, {"tensor": 2}, partial(named, "llama tied")),
        ("pytorch-ddp", 4, {"expert": 2}, partial(named, "mixtral")),
        ("fsdp", 2, {}, partial(named, "gpt2")),
        ("fsdp", 4, {}, partial(named, "llama tied")),
    ],
)
def test_a_factory_trains_as_in_one_process(
    backend: str, ranks: int, parallel: dict[str, Any], factory: Factory, rank_pool: RankPool
) -> None:
    trainer = trainer_of(factory, ranks, rank_pool, {"pipeline": 2, **parallel}, backend=backend)
    trainer.callbacks = [AsBuilt(factory)]
    trainer.fit(DATA, max_steps=STEPS)
    assert difference(trainer.model, expected(factory)) < EXACT


def test_what_cannot_be_built_without_values_is_built_with_them(rank_pool: RankPool) -> None:
    trainer = trainer_of(reads_its_weights, 2, rank_pool, {"pipeline": 2})
    trainer.fit(DATA, max_steps=STEPS)
    assert difference(trainer.model, expected(reads_its_weights)) < EXACT


# -- how much a rank allocates, and broken forms ------------------------------------------------------


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    spec = pipeline_mutants.spec_of(getattr(pipeline_mutants, request.param))
    get_catalog().backends[spec.name] = spec
    yield spec.name
    del get_catalog().backends[spec.name]


@pytest.mark.parametrize("backend", ["WeighsItsShare"], indirect=True)
@pytest.mark.parametrize("factory", [partial(named, "llama tied"), drawn])
def test_a_rank_allocates_what_its_stages_hold(backend: str, factory: Factory, rank_pool: RankPool) -> None:
    """And one tensor beside it, the one that is on its way."""
    trainer = trainer_of(factory, 2, rank_pool, {"pipeline": 2}, backend=backend)
    trainer.fit(DATA, max_steps=1)


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        ("BuildsOnEveryRank", "has values"),
        ("AllocatesAll", "allocates"),
        ("SharesNoBuffers", "something else"),
    ],
    indirect=["backend"],
)
def test_a_broken_form_is_noticed(backend: str, text: str, rank_pool: RankPool) -> None:
    factory = partial(named, "llama tied")
    trainer = trainer_of(factory, 2, rank_pool, {"pipeline": 2}, backend=backend)
    trainer.callbacks = [AsBuilt(factory)]
    with pytest.raises(UserError, match=text):
        trainer.fit(DATA, max_steps=1)
