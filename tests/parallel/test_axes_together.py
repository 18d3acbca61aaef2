"""Slices of sequences beside stages and experts train as one process does.

The campaign `tests.campaigns.meshes` has every model on every mesh of this kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from distributed import UserError
from distributed.errors import WorkerError
from distributed.registry.catalog import get_catalog
from distributed.testing.rank_pool import RankPool
from distributed.testing.refusal_cases import CASES, CHANGE_AFTER
from distributed.testing.suite import EXACT
from tests.contracts.mesh_workbenches import ExpertWorkbench, SliceWorkbench
from tests.parallel import context_mutants, mesh_mutants
from tests.parallel.expert_models import EXPERT_ENTRIES
from tests.parallel.models import SEQUENCES, tokens, train_plainly
from tests.parallel.test_context import Padded, Running, per_sample
from tests.parallel.test_tensor_parallel import (
    DATA,
    GLOBAL_BATCH,
    MAX_NORM,
    STEPS,
    ExpectNorms,
    difference,
    reference,
    trainer_of,
)
from tests.support.training import make_trainer

pytest.importorskip("transformers")

STAGES = {"pipeline": 2, "context": 2}
MODELS = {**SEQUENCES, **EXPERT_ENTRIES}


@pytest.fixture
def mutant(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a mutant's backend."""
    module = context_mutants if request.param in context_mutants.MUTANTS else mesh_mutants
    spec = module.spec_of(request.param)
    get_catalog().backends[spec.name] = spec
    yield spec.name
    del get_catalog().backends[spec.name]


@pytest.mark.parametrize(
    ("backend", "ranks", "parallel", "name"),
    [
        ("pytorch-ddp", 2, {"context": 2}, "mixtral"),
        ("pytorch-ddp", 4, {**STAGES, "schedule": "zbv"}, "dilated"),
        ("fsdp", 4, STAGES, "bert"),
        ("pytorch-ddp", 4, {"context": 2, "expert": 2}, "mixtral"),
        ("fsdp", 4, {"context": 2, "expert": 2}, "moe"),
    ],
)
def test_the_mesh_changes_no_weight_and_no_norm(
    backend: str, ranks: int, parallel: dict[str, Any], name: str, rank_pool: RankPool
) -> None:
    """Masked tokens, clipping, accumulation, and a last window of 5 sequences."""
    build = MODELS[name].build
    model, expected = build(), reference(name, build)
    trainer = trainer_of(model, backend, ranks, rank_pool, parallel, gradient_accumulation_steps=2)
    trainer.callbacks = [ExpectNorms(expected.norms)]
    trainer.fit(DATA, max_steps=STEPS)
    assert difference(model, expected.weights) < EXACT


def frozen_stage() -> nn.Module:
    """A Llama whose embedding and head are tied, and whose first layer does not learn."""
    model = SEQUENCES["llama tied"].build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" not in name)
    return model


def test_tied_weights_frozen_layers_and_validation(rank_pool: RankPool) -> None:
    model, validation = frozen_stage(), tokens(13)
    trainer = trainer_of(model, "pytorch-ddp", 4, rank_pool, STAGES, gradient_accumulation_steps=2)
    history = trainer.fit(DATA, validation, epochs=3)
    options = {"global_batch_size": GLOBAL_BATCH, "max_norm": MAX_NORM}
    assert difference(model, train_plainly(frozen_stage(), DATA, steps=9, **options).weights) < EXACT
    model.eval()
    with torch.no_grad():
        logits = model(validation[0]).logits.flatten(0, 1)
    assert [epoch["val_loss"] for epoch in history.epochs][-1] == pytest.approx(
        float(cross_entropy(logits, validation[1].flatten())), abs=EXACT
    )


def test_a_run_goes_on_from_mesh_to_mesh(rank_pool: RankPool, tmp_path: Path) -> None:
    build = MODELS["mixtral tied"].build
    fields = {"checkpoint_dir": str(tmp_path), "resume_from_checkpoint": True}
    for steps, backend, ranks, parallel in (
        (3, "pytorch-ddp", 4, STAGES),
        (5, "fsdp", 4, {"context": 2, "expert": 2}),
        (7, "serial", 1, {}),
        (STEPS, "pytorch-ddp", 4, STAGES),
    ):
        model = build()
        trainer_of(model, backend, ranks, rank_pool, parallel, **fields).fit(DATA, max_steps=steps)
    assert difference(model, reference("mixtral tied", build).weights) < EXACT


# -- padding, when backward computes a layer again ----------------------------------------------------------


def padded_distance(backend: str, pool: RankPool) -> float:
    """How much weights differ from one process, when layers are recomputed after later micro-batches, which
    have other padding."""
    weights = []
    for name, ranks, axes in (("serial", 1, {}), (backend, 4, STAGES)):
        model = SEQUENCES["bert"].build()
        fields = {"gradient_accumulation_steps": 2, "activation_checkpointing": "full" if axes else "none"}
        trainer_of(model, name, ranks, pool, axes, **fields).fit(Padded(16), max_steps=4)
        weights.append({n: p.detach() for n, p in model.named_parameters()})
    return max(float((weights[1][n] - w).abs().max()) for n, w in weights[0].items())


def test_a_recomputed_layer_reads_the_padding_of_its_micro_batch(rank_pool: RankPool) -> None:
    assert padded_distance("pytorch-ddp", rank_pool) < EXACT


@pytest.mark.parametrize("mutant", ["PaddingOfTheLastForward"], indirect=True)
def test_the_padding_of_another_micro_batch_is_noticed(mutant: str, rank_pool: RankPool) -> None:
    assert padded_distance(mutant, rank_pool) > 1e-6


@pytest.mark.parametrize("mutant", ["ExpertsOfSlicesAreNotAdded"], indirect=True)
def test_experts_of_one_slice_are_noticed(mutant: str, rank_pool: RankPool) -> None:
    model = MODELS["mixtral"].build()
    trainer_of(model, mutant, 4, rank_pool, {"context": 2, "expert": 2}).fit(DATA, max_steps=STEPS)
    assert difference(model, reference("mixtral", MODELS["mixtral"].build).weights) > 1e-6


@pytest.mark.parametrize("mutant", ["OnePartDrifts"], indirect=True)
def test_an_expert_that_drifts_from_the_rank_of_the_other_slice_is_named(
    mutant: str, rank_pool: RankPool
) -> None:
    fields = {"divergence_check_steps": 1, "log_every_n_steps": 1}
    parallel = {"context": 2, "expert": 2}
    trainer = trainer_of(MODELS["moe"].build(), mutant, 4, rank_pool, parallel, **fields)
    with pytest.raises(WorkerError, match=r"rank [23] .* differs from the other ranks"):
        trainer.fit(DATA, max_steps=3)


# -- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [{"context": 2}, {"expert": 2}])
def test_a_layer_that_begins_to_learn_is_refused(parallel: dict[str, int], rank_pool: RankPool) -> None:
    """Gradients of slices and of experts are added beside FSDP2, which would notice it."""
    case = CASES["thawed-layer"]
    bench = SliceWorkbench() if "context" in parallel else ExpertWorkbench()
    model = case.build() if "context" in parallel else thawing_experts()
    fields = {"optimizer": case.optimizer(model), "callbacks": case.callbacks(), "parallel": parallel}
    trainer = make_trainer(model, 2, rank_pool, backend="fsdp", global_batch_size=GLOBAL_BATCH, **fields)
    with pytest.raises(UserError, match="changed from False to True") as caught:
        trainer.fit(bench.data(*case.data(96)), max_steps=2 * CHANGE_AFTER)
    assert caught.value.field == "backend"


def thawing_experts() -> nn.Module:
    """As the model of the kit's case, whose first layer is one of experts."""
    model = ExpertWorkbench().model(torch.float64)
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


@pytest.mark.parametrize(
    ("build", "given", "field", "text"),
    [
        (Running, {}, "parallel.context", "computes something else when 2 ranks"),
        (SEQUENCES["llama"].build, {"loss_fn": per_sample}, "loss_fn", "'loss' of slices does not add up"),
    ],
)
def test_slices_that_differ_are_refused_before_stages_divide_the_model(
    build: Callable[[], nn.Module], given: dict[str, Any], field: str, text: str, rank_pool: RankPool
) -> None:
    trainer = trainer_of(build().double(), "pytorch-ddp", 4, rank_pool, STAGES, **given)
    with pytest.raises(UserError, match=text) as caught:
        trainer.fit(DATA, max_steps=1)
    assert caught.value.field == field
