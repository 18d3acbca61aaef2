"""Models that ranks cut between them train as one process does: the mesh changes no weight and no norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_kernels.attention.language_model import DilatedLanguageModel
from torch import nn

from distributed import Callback, Trainer, UserError
from distributed.interfaces.launcher import Launcher, RankCommand
from distributed.interfaces.plan import RunPlan
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.parallel.models import ENTRIES, Entry, Reference, tokens, train_plainly
from tests.support.training import make_trainer

pytest.importorskip("transformers")

DATA = tokens(21)
GLOBAL_BATCH, STEPS, MAX_NORM = 8, 10, 0.5
SEQUENCE = Entry(ENTRIES["dilated"].build, dict(DilatedLanguageModel.sequence_plan))
MESHES = [
    ("pytorch-ddp", 2, {"tensor": 2}, 1),
    ("pytorch-ddp", 4, {"tensor": 2}, 2),
    ("fsdp", 4, {"tensor": 2}, 2),
]
_references: dict[str, Reference] = {}


def trainer_of(
    model: Any, backend: str, ranks: int, pool: Launcher | None, parallel: Mapping[str, Any], **given: Any
) -> Trainer:
    fields = {
        "backend": backend,
        "global_batch_size": GLOBAL_BATCH,
        "optimizer": partial(torch.optim.AdamW, eps=1e-4),
        "learning_rate": 0.01,
        "gradient_clipping": MAX_NORM,
        "parallel": dict(parallel),
    }
    return make_trainer(model, ranks, pool, **{**fields, **given})


def reference(name: str, build: Any) -> Reference:
    if name not in _references:
        options = {"global_batch_size": GLOBAL_BATCH, "steps": STEPS, "max_norm": MAX_NORM}
        _references[name] = train_plainly(build(), DATA, **options)
    return _references[name]


def difference(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> float:
    own = dict(model.named_parameters())
    assert own.keys() == weights.keys()
    return max(float((own[name] - weight).detach().abs().max()) for name, weight in weights.items())


@pytest.mark.parametrize("name", [*ENTRIES, "dilated, sequences cut"])
@pytest.mark.parametrize(("backend", "ranks", "parallel", "accumulation"), MESHES)
def test_a_cut_model_trains_as_one_process_does(
    backend: str, ranks: int, parallel: dict[str, int], accumulation: int, name: str, rank_pool: RankPool
) -> None:
    """Masked tokens, clipping, and a last window of 5 sequences."""
    entry = ENTRIES.get(name, SEQUENCE)
    model = entry.build()
    expected = reference(name, entry.build)
    mesh = {**parallel, **({"tensor_plan": entry.plan} if entry.plan else {})}
    trainer = trainer_of(model, backend, ranks, rank_pool, mesh, gradient_accumulation_steps=accumulation)
    history = trainer.fit(DATA, max_steps=STEPS)
    assert difference(model, expected.weights) < EXACT
    assert history.world_size == ranks
    assert history.batch["data_parallel_size"] == ranks // 2
    tied = {id(p) for p in model.parameters()}
    assert len(tied) == len({id(p) for p in entry.build().parameters()})


def test_two_data_axes_and_a_tensor_axis(rank_pool: RankPool) -> None:
    """HSDP over tensor parallelism: copies of shards of parts."""
    model = ENTRIES["llama tied"].build()
    trainer = trainer_of(model, "fsdp", 4, rank_pool, {"data": 2, "tensor": 2})
    trainer.fit(DATA, max_steps=STEPS)
    assert difference(model, reference("llama tied", ENTRIES["llama tied"].build).weights) < EXACT


def test_a_factory_without_ranks_to_shard_over(rank_pool: RankPool) -> None:
    trainer = trainer_of(ENTRIES["perceptron"].build, "fsdp", 2, rank_pool, {"tensor": 2})
    trainer.fit(DATA, max_steps=STEPS)
    assert difference(trainer.model, reference("perceptron", ENTRIES["perceptron"].build).weights) < EXACT


@pytest.mark.parametrize("backend", ["pytorch-ddp", "fsdp"])
def test_frozen_parts_stay_and_count_in_nothing(backend: str, rank_pool: RankPool) -> None:
    def build() -> nn.Module:
        model = ENTRIES["llama"].build()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.0" not in name and "embed" not in name)
        return model

    model = build()
    trainer_of(model, backend, 4, rank_pool, {"tensor": 2}).fit(DATA, max_steps=STEPS)
    assert difference(model, reference("frozen", build).weights) < EXACT


class ExpectNorms(Callback):
    """Fails a run with another norm than one process has."""

    def __init__(self, norms: Sequence[float]) -> None:
        self.norms = list(norms)

    def on_log(self, context: Any, record: Mapping[str, float]) -> None:
        assert record["grad_norm"] == pytest.approx(self.norms[context.progress.step - 1], rel=1e-10)


@pytest.mark.parametrize("backend", ["pytorch-ddp", "fsdp"])
def test_the_norm_is_that_of_the_whole_model(backend: str, rank_pool: RankPool) -> None:
    """Elements that all ranks hold, that two hold, and that one holds count once."""
    build = ENTRIES["dilated"].build
    trainer = trainer_of(build(), backend, 4, rank_pool, {"tensor": 2})
    trainer.callbacks = [ExpectNorms(reference("dilated", build).norms)]
    trainer.fit(DATA, max_steps=STEPS)


def test_the_evaluation_counts_each_sample_once(rank_pool: RankPool, tmp_path: Path) -> None:
    model = ENTRIES["encoder"].build()
    trainer = trainer_of(model, "pytorch-ddp", 4, rank_pool, {"tensor": 2})
    history = trainer.fit(DATA, tokens(13), epochs=1)
    inputs, targets = tokens(13)
    model.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    assert history.epochs[-1]["val_loss"] == pytest.approx(float(loss), abs=EXACT)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("backend", ["pytorch-ddp", "fsdp"])
def test_activations_are_recomputed_across_the_ranks(backend: str, mode: str, rank_pool: RankPool) -> None:
    model = ENTRIES["llama"].build()
    trainer = trainer_of(model, backend, 4, rank_pool, {"tensor": 2}, activation_checkpointing=mode)
    trainer.fit(DATA, max_steps=STEPS)
    assert difference(model, reference("llama", ENTRIES["llama"].build).weights) < EXACT


def test_a_second_fit_continues_with_whole_optimizer_state(rank_pool: RankPool) -> None:
    model = ENTRIES["llama"].build()
    trainer = trainer_of(model, "pytorch-ddp", 2, rank_pool, {"tensor": 2})
    trainer.fit(DATA, max_steps=4)
    trainer.fit(DATA, max_steps=6)
    assert difference(model, reference("llama", ENTRIES["llama"].build).weights) < EXACT


@pytest.mark.parametrize("backend", ["pytorch-ddp", "fsdp"])
def test_a_first_step_that_overflows_is_skipped(backend: str, rank_pool: RankPool) -> None:
    """Infinite gradients are not a difference between the ranks that share the model."""
    fields = {"mixed_precision": "fp16", "scaler_init_scale": 2.0**24, "divergence_check_steps": 1}
    model = ENTRIES["perceptron"].build().float()
    trainer = trainer_of(model, backend, 4, rank_pool, {"tensor": 2}, **fields)
    assert 0 < trainer.fit(DATA, max_steps=STEPS).num_skipped_steps < STEPS


# -- what is refused -----------------------------------------------------------------------------------


class NoRanks(Launcher):
    """Fails a test whose run starts ranks."""

    def run(self, plan: RunPlan, command: RankCommand) -> None:
        raise AssertionError("ranks were started")


@pytest.mark.parametrize(
    ("plan", "field", "text"),
    [
        ({"layers.0.up": "colwise"}, "parallel.tensor_plan", "matches no module"),
        ({"layers.*": "colwise", "layers.0": "rowwise"}, "parallel.tensor_plan", "two patterns"),
        ({"layers.0": "columnwise"}, "parallel.tensor_plan", "not known"),
        ({"tokens": "colwise"}, "parallel.tensor_plan", "not a plain Linear"),
        ({"layers.0": "colwise_sequence"}, "parallel.tensor_plan", "does not name the module"),
    ],
)
def test_a_plan_that_would_train_something_else_is_refused(
    plan: dict[str, str], field: str, text: str
) -> None:
    parallel = {"tensor": 2, "tensor_plan": plan}
    trainer = trainer_of(ENTRIES["perceptron"].build(), "pytorch-ddp", 2, NoRanks(), parallel)
    with pytest.raises(UserError, match=text) as caught:
        trainer.fit(DATA, max_steps=1)
    assert caught.value.field == field


def test_sizes_that_the_ranks_do_not_divide_are_refused_with_those_that_do(rank_pool: RankPool) -> None:
    for name, ranks, allowed in (("llama", 4, "1, 2"), ("perceptron", 5, "1, 2, 3, 4, 6, 8, 12")):
        # The pairs of a model without a plan are found by its ranks.
        launcher = NoRanks() if name == "llama" else rank_pool
        trainer = trainer_of(ENTRIES[name].build(), "pytorch-ddp", ranks, launcher, {"tensor": ranks})
        with pytest.raises(UserError) as caught:
            trainer.fit(DATA, max_steps=1)
        assert caught.value.field == "parallel.tensor"
        assert caught.value.allowed == allowed
