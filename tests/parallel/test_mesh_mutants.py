"""The comparison with one process turns red for every broken form of training on a mesh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from distributed_kernels.attention.language_model import DilatedLanguageModel
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

from distributed.errors import UserError, WorkerError
from distributed.registry.catalog import get_catalog
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.parallel.mesh_mutants import spec_of
from tests.parallel.models import ENTRIES, VOCABULARY, WIDTH, Perceptron
from tests.parallel.test_tensor_parallel import DATA, STEPS, ExpectNorms, difference, reference, trainer_of


@pytest.fixture
def mutant(request: pytest.FixtureRequest) -> Iterator[str]:
    spec = spec_of(request.param)
    catalog = get_catalog()
    catalog.backends[spec.name] = spec
    yield spec.name
    del catalog.backends[spec.name]


class OwnEmbedding(nn.Embedding):
    """Cut by torch's own style, whose gradient has another layout than the parameter."""

    @staticmethod
    def tensor_parallel_style(word: str) -> Any:
        return RowwiseParallel(input_layouts=Replicate())


class OwnStyle(Perceptron):
    """A perceptron with such an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = OwnEmbedding(VOCABULARY, WIDTH)
        self.tokens.weight.data.uniform_(-1, 1)


def own_style() -> nn.Module:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return OwnStyle().double()


OWN_PLAN = {"tokens": "embedding_rowwise", "layers.0": "colwise", "layers.2": "rowwise"}


def test_a_layer_may_bring_a_style_of_its_own(rank_pool: RankPool) -> None:
    model = own_style()
    trainer_of(model, "pytorch-ddp", 4, rank_pool, {"tensor": 2, "tensor_plan": OWN_PLAN}).fit(
        DATA, max_steps=STEPS
    )
    assert difference(model, reference("own style", own_style).weights) < EXACT


@pytest.mark.parametrize(
    ("mutant", "name", "plan"),
    [
        ("CopiesCountTwice", "dilated", {}),
        ("SlicesAreNotAdded", "dilated", dict(DilatedLanguageModel.sequence_plan)),
        ("CountsTokensTwice", "llama", {}),
    ],
    indirect=["mutant"],
)
def test_the_weights_differ(mutant: str, name: str, plan: dict[str, str], rank_pool: RankPool) -> None:
    build = ENTRIES[name].build
    model = build()
    trainer_of(model, mutant, 4, rank_pool, {"tensor": 2, "tensor_plan": plan}).fit(DATA, max_steps=STEPS)
    assert difference(model, reference(name, build).weights) > 1e-6


@pytest.mark.parametrize("mutant", ["TiesComeApart"], indirect=True)
def test_tied_weights_that_come_apart_do_not_return(mutant: str, rank_pool: RankPool) -> None:
    trainer = trainer_of(ENTRIES["llama tied"].build(), mutant, 4, rank_pool, {"tensor": 2})
    with pytest.raises(UserError, match=r"'lm_head\.weight'"):
        trainer.fit(DATA, max_steps=STEPS)


@pytest.mark.parametrize("mutant", ["LayoutIsNotTheParameters"], indirect=True)
def test_a_gradient_of_another_layout_is_not_that_of_the_norm(mutant: str, rank_pool: RankPool) -> None:
    for backend in ("pytorch-ddp", mutant):
        parallel = {"tensor": 2, "tensor_plan": OWN_PLAN}
        trainer = trainer_of(own_style(), backend, 4, rank_pool, parallel)
        trainer.callbacks = [ExpectNorms(reference("own style", own_style).norms)]
        with pytest.raises(WorkerError, match="AssertionError") if backend == mutant else nullcontext():
            trainer.fit(DATA, max_steps=STEPS)


@pytest.mark.parametrize("mutant", ["OneRankDrifts", "OnePartDrifts"], indirect=True)
def test_a_replica_that_drifts_is_named(mutant: str, rank_pool: RankPool) -> None:
    fields = {"divergence_check_steps": 1, "log_every_n_steps": 1}
    trainer = trainer_of(ENTRIES["encoder"].build(), mutant, 4, rank_pool, {"tensor": 2}, **fields)
    with pytest.raises(WorkerError, match=r"rank [13] .* differs from the other ranks"):
        trainer.fit(DATA, max_steps=3)
