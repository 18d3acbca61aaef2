"""Models whose experts ranks divide train as one process does: the split changes no weight and no norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed import Callback, UserError
from distributed.errors import WorkerError
from distributed.parallel.original_model import OriginalModel
from distributed.registry.catalog import get_catalog
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.parallel.expert_models import EXPERT_ENTRIES, EXPERTS
from tests.parallel.mesh_mutants import spec_of
from tests.parallel.models import VOCABULARY, WIDTH
from tests.parallel.test_tensor_parallel import (
    DATA,
    STEPS,
    ExpectNorms,
    NoRanks,
    difference,
    reference,
    trainer_of,
)
from tests.parallel.test_whole_models import Sees

pytest.importorskip("transformers")

MESHES = {
    "expert 2": ("pytorch-ddp", 2, {"expert": 2}, 2),
    "data 4, expert 2": ("pytorch-ddp", 4, {"expert": 2}, 2),
    "data 4, expert 4": ("pytorch-ddp", 4, {"expert": 4}, 1),
    "shard 4, expert 2": ("fsdp", 4, {"expert": 2}, 2),
    "data 2 x tensor 2, expert 2": ("pytorch-ddp", 4, {"tensor": 2, "expert": 2}, 1),
}
CASES = [
    ("mixtral", "expert 2"),
    ("mixtral", "data 4, expert 2"),
    ("mixtral", "data 2 x tensor 2, expert 2"),
    ("moe", "data 4, expert 4"),
    ("moe", "shard 4, expert 2"),
    ("moe, frozen router", "shard 4, expert 2"),
    ("mixtral tied", "data 4, expert 2"),
]


@pytest.fixture
def mutants() -> Iterator[Callable[[str], str]]:
    """Registers a mutant, and returns its name as a backend."""
    catalog, added = get_catalog(), []

    def register(kind: str) -> str:
        spec = spec_of(kind)
        catalog.backends[spec.name] = spec
        added.append(spec.name)
        return spec.name

    yield register
    for name in added:
        del catalog.backends[name]


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_divided_experts_train_as_one_process_does(name: str, mesh: str, rank_pool: RankPool) -> None:
    """Masked tokens, clipping, accumulation, and a last window of 5 sequences: stand-ins on some ranks."""
    build = EXPERT_ENTRIES[name].build
    backend, ranks, parallel, accumulation = MESHES[mesh]
    model, expected = build(), reference(name, build)
    trainer = trainer_of(model, backend, ranks, rank_pool, parallel, gradient_accumulation_steps=accumulation)
    trainer.callbacks = [ExpectNorms(expected.norms)]
    history = trainer.fit(DATA, max_steps=STEPS)
    assert difference(model, expected.weights) < EXACT
    assert history.batch["data_parallel_size"] == ranks // parallel.get("tensor", 1)
    # The caller has its own model back: classes, attributes, whole parameters.
    for module, fresh in zip(model.modules(), build().modules(), strict=True):
        assert type(module) is type(fresh)
        assert vars(module).keys() == vars(fresh).keys()
        assert getattr(module, "num_experts", None) == getattr(fresh, "num_experts", None)


@pytest.mark.parametrize("name", ["moe", "mixtral"])
def test_a_second_fit_continues_and_callbacks_see_the_whole_model(name: str, rank_pool: RankPool) -> None:
    build = EXPERT_ENTRIES[name].build
    weights = reference(name, build).weights
    model = build()
    trainer = trainer_of(model, "pytorch-ddp", 2, rank_pool, {"expert": 2})
    trainer.fit(DATA, max_steps=4)
    trainer.callbacks = [Sees(weights)]
    trainer.fit(DATA, max_steps=STEPS - 4)
    assert difference(model, weights) < EXACT


def test_the_evaluation_counts_each_sample_once(rank_pool: RankPool) -> None:
    """13 sequences on 4 ranks, of which some have none in the last window."""
    model = EXPERT_ENTRIES["moe"].build()
    inputs, targets = DATA[0][:13], DATA[1][:13]
    trainer = trainer_of(model, "pytorch-ddp", 4, rank_pool, {"expert": 2})
    history = trainer.fit(DATA, (inputs, targets), epochs=1)
    model.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    assert history.epochs[-1]["val_loss"] == pytest.approx(float(loss), abs=EXACT)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activations_are_recomputed_across_the_ranks(mode: str, rank_pool: RankPool) -> None:
    build = EXPERT_ENTRIES["moe"].build
    model = build()
    trainer = trainer_of(model, "pytorch-ddp", 4, rank_pool, {"expert": 2}, activation_checkpointing=mode)
    trainer.fit(DATA, max_steps=STEPS)
    assert difference(model, reference("moe", build).weights) < EXACT


class OwnGroup(Callback):
    """Fails a run whose tokens travel in the group in which gradients are reduced, at the same time."""

    all_ranks = True

    def on_run_start(self, context: Any) -> None:
        mesh = context.backend.mesh
        groups = [mesh.experts.get_group(), mesh.same_experts, context.backend.replica_group]
        assert len({id(group) for group in groups}) == 3


def test_tokens_travel_in_a_group_of_their_own(rank_pool: RankPool) -> None:
    model = EXPERT_ENTRIES["moe"].build()
    trainer_of(model, "pytorch-ddp", 2, rank_pool, {"expert": 2}, callbacks=[OwnGroup()]).fit(
        DATA, max_steps=1
    )


def test_a_layer_forgets_the_group_of_a_run_that_ended() -> None:
    """As in ranks of a launcher, whose own model is divided."""
    layer = OwnExperts()
    original = OriginalModel(layer)
    with original.watched(layer):
        layer.group = object()
    with original.undone():
        assert layer.group is None
    assert layer.group is not None
    original.restore()
    assert layer.group is None


# -- memory ---------------------------------------------------------------------------------------------


def is_of_experts(name: str) -> bool:
    return ".experts." in name


class Weighing(torch.optim.AdamW):
    """AdamW that fails a step in which a rank holds other bytes than the formula gives."""

    def __init__(self, params: Any, lr: float, elements: int) -> None:
        super().__init__(params, lr=lr)
        self.elements = elements

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        assert sum(map(local_elements, parameters)) == self.elements
        assert sum(local_elements(p.grad) for p in parameters) == self.elements
        result = super().step(closure)
        slots = [s for state in self.state.values() for n, s in state.items() if n != "step"]
        assert sum(map(local_elements, slots)) == 2 * self.elements
        return result


def local_elements(tensor: Any) -> int:
    local: Tensor = tensor.to_local() if hasattr(tensor, "placements") else tensor
    assert local.untyped_storage().nbytes() == local.nbytes
    return local.numel()


@pytest.mark.parametrize("mesh", ["expert 2", "data 4, expert 2"])
def test_a_rank_holds_its_share_of_the_experts(mesh: str, rank_pool: RankPool) -> None:
    backend, ranks, parallel, _ = MESHES[mesh]
    sizes = {name: p.numel() for name, p in EXPERT_ENTRIES["mixtral"].build().named_parameters()}
    elements = sum(n // parallel["expert"] if is_of_experts(name) else n for name, n in sizes.items())
    trainer = trainer_of(
        EXPERT_ENTRIES["mixtral"].build(),
        backend,
        ranks,
        rank_pool,
        parallel,
        optimizer=partial(Weighing, elements=elements),
    )
    assert trainer.fit(DATA, max_steps=2).num_skipped_steps == 0


# -- layers of others -----------------------------------------------------------------------------------


class OwnExperts(nn.Module):
    """One expert for each token, by its value; a third party's layer, which gathers all tokens."""

    shift = 0

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({"scale": nn.Embedding(EXPERTS, WIDTH)})
        self.group: Any = None

    def expert_parameters(self) -> list[str]:
        return ["tables.scale.weight"]

    def set_expert_group(self, group: Any) -> None:
        self.group = group
        table = self.tables["scale"]
        own = table.weight.chunk(group.size())[(group.rank() + self.shift) % group.size()]
        table.weight = nn.Parameter(own.detach().clone())

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        weight = self.tables["scale"].weight
        if self.group is not None:
            weight = torch.cat(dist.nn.functional.all_gather(weight, group=self.group))
        return x * weight[tokens % EXPERTS]


class TakesOthers(OwnExperts):
    """Keeps the experts of another rank than the consecutive ones."""

    shift = 1

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        return super().forward(tokens, x)


class KeepsAll(OwnExperts):
    """Does not divide anything."""

    def set_expert_group(self, group: Any) -> None:
        self.group = None


class WithOwnExperts(nn.Module):
    """Tokens -> logits by such a layer."""

    def __init__(self, kind: type[OwnExperts]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.experts = kind()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.experts(tokens, self.tokens(tokens)).tanh())
        return logits


def own(kind: type[OwnExperts]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return WithOwnExperts(kind).double()


@pytest.mark.filterwarnings("ignore:.*all_gather:FutureWarning")
def test_a_layer_of_a_third_party_is_divided_by_its_own_methods(rank_pool: RankPool) -> None:
    model, build = own(OwnExperts), partial(own, OwnExperts)
    trainer_of(model, "pytorch-ddp", 2, rank_pool, {"expert": 2}).fit(DATA, max_steps=STEPS)
    assert difference(model, reference("own experts", build).weights) < EXACT


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (TakesOthers, "computes something else when 2 ranks cut it"),
        (KeepsAll, "has left other experts on this rank than its own"),
    ],
)
def test_a_layer_that_is_divided_in_another_way_is_refused(
    kind: type[OwnExperts], text: str, rank_pool: RankPool
) -> None:
    with pytest.raises(UserError, match=text) as caught:
        trainer_of(own(kind), "pytorch-ddp", 2, rank_pool, {"expert": 2}).fit(DATA, max_steps=1)
    assert caught.value.field == "parallel.expert"


# -- what is refused ------------------------------------------------------------------------------------


def test_experts_that_the_ranks_do_not_divide_are_refused_before_a_rank_starts() -> None:
    trainer = trainer_of(
        EXPERT_ENTRIES["mixtral"].build(), "pytorch-ddp", 8, NoRanks(), {"expert": 8}, global_batch_size=8
    )
    with pytest.raises(UserError, match="has 4 experts, which 8 ranks cannot divide") as caught:
        trainer.fit(DATA, max_steps=1)
    assert (caught.value.field, caught.value.allowed) == ("parallel.expert", "1, 2, 4")


def test_a_model_without_experts_is_refused_before_a_rank_starts() -> None:
    trainer = trainer_of(nn.Embedding(VOCABULARY, VOCABULARY), "pytorch-ddp", 2, NoRanks(), {"expert": 2})
    with pytest.raises(UserError, match=r"no layer of the model has experts .* Mixtral") as caught:
        trainer.fit(DATA, max_steps=1)
    assert (caught.value.field, caught.value.allowed) == ("parallel.expert", "1")


def test_a_factory_is_refused_by_its_ranks(rank_pool: RankPool) -> None:
    build = partial(nn.Embedding, VOCABULARY, VOCABULARY)
    with pytest.raises(UserError, match="no layer of the model has experts"):
        trainer_of(build, "pytorch-ddp", 2, rank_pool, {"expert": 2}).fit(DATA, max_steps=1)


def test_an_optimizer_that_needs_whole_parameters_is_refused(rank_pool: RankPool) -> None:
    fields = {"optimizer": torch.optim.Adafactor}
    trainer = trainer_of(EXPERT_ENTRIES["moe"].build(), "pytorch-ddp", 2, rank_pool, {"expert": 2}, **fields)
    with pytest.raises(UserError, match=r"Adafactor needs whole parameters, and parallel\.expert=2 cuts"):
        trainer.fit(DATA, max_steps=1)


def test_a_replica_that_drifts_is_named(rank_pool: RankPool, mutants: Callable[[str], str]) -> None:
    """Also where every rank holds experts of its own, of which there is no copy to compare with."""
    for ranks, kind in ((2, "OneRankDrifts"), (4, "OnePartDrifts")):
        fields = {"divergence_check_steps": 1, "log_every_n_steps": 1}
        model = EXPERT_ENTRIES["moe"].build()
        trainer = trainer_of(model, mutants(kind), ranks, rank_pool, {"expert": 2}, **fields)
        with pytest.raises(WorkerError, match=r"rank [13] .* differs from the other ranks"):
            trainer.fit(DATA, max_steps=3)


# -- broken forms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ExpertsAreAveraged", "ExpertCopiesCountTwice", "TokensAreDropped"])
def test_a_broken_form_is_noticed(kind: str, rank_pool: RankPool, mutants: Callable[[str], str]) -> None:
    build = EXPERT_ENTRIES["mixtral"].build
    model = build()
    trainer_of(model, mutants(kind), 4, rank_pool, {"expert": 2}).fit(DATA, max_steps=STEPS)
    assert difference(model, reference("mixtral", build).weights) > 1e-6
