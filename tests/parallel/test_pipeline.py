"""Pipelines train as one process does: stages, schedules and pieces of micro-batches change no weight."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

from distributed import Callback, Trainer, UserError
from distributed.interfaces.launcher import Launcher, RankCommand
from distributed.interfaces.plan import RunPlan
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.parallel.expert_models import EXPERT_ENTRIES
from tests.parallel.models import (
    ENTRIES,
    LENGTH,
    SEQUENCES,
    VOCABULARY,
    WIDTH,
    Reference,
    tokens,
    train_plainly,
)
from tests.support.training import make_trainer

pytest.importorskip("transformers")

DATA = tokens(21)
GLOBAL_BATCH, STEPS, MAX_NORM = 8, 10, 0.5
_references: dict[tuple[str, int], Reference] = {}


def reference(name: str, build: Any, steps: int = STEPS) -> Reference:
    if (name, steps) not in _references:
        options: dict[str, Any] = {"global_batch_size": GLOBAL_BATCH, "steps": steps, "max_norm": MAX_NORM}
        _references[name, steps] = train_plainly(build(), DATA, **options)
    return _references[name, steps]


def trainer_of(model: Any, ranks: int, launcher: Launcher | None, parallel: Any, **given: Any) -> Trainer:
    fields = {
        "backend": "pytorch-ddp",
        "global_batch_size": GLOBAL_BATCH,
        "optimizer": partial(torch.optim.AdamW, eps=1e-4),
        "learning_rate": 0.01,
        "gradient_clipping": MAX_NORM,
        "parallel": parallel,
    }
    return make_trainer(model, ranks, launcher, **{**fields, **given})


def difference(model: nn.Module, expected: Reference) -> float:
    own = dict(model.named_parameters())
    assert own.keys() == expected.weights.keys()
    return max(float((own[name] - weight).detach().abs().max()) for name, weight in expected.weights.items())


class Chain(nn.Sequential):
    """Tokens -> logits by a plain Sequential of eight modules."""

    def __init__(self) -> None:
        super().__init__(
            nn.Embedding(VOCABULARY, WIDTH),
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, VOCABULARY),
        )


def chain() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Chain().double()


MODELS = {
    "chain": chain,
    "gpt2": SEQUENCES["gpt2"].build,
    "mixtral": EXPERT_ENTRIES["mixtral"].build,
    **{name: entry.build for name, entry in ENTRIES.items() if name != "bert with a plan"},
}


# Masked tokens, clipping, and a last window of 5 sequences, in all of them.
@pytest.mark.parametrize("name", list(MODELS))
def test_a_divided_model_trains_as_one_process_does(name: str, rank_pool: RankPool) -> None:
    model = MODELS[name]()
    trainer = trainer_of(model, 2, rank_pool, {"pipeline": 2}, gradient_accumulation_steps=2)
    trainer.fit(DATA, max_steps=STEPS)
    assert difference(model, reference(name, MODELS[name])) < EXACT
    tied = {id(p) for p in model.parameters()}
    assert len(tied) == len({id(p) for p in MODELS[name]().parameters()})


@pytest.mark.parametrize(
    ("schedule", "pieces"),
    [
        ("gpipe", 1),
        ("interleaved-1f1b", 2),
        ("looped-bfs", 2),
        ("interleaved-zero-bubble", 2),
        ("zbv", 1),
        ("dualpipev", 2),
    ],
)
def test_every_schedule_trains_the_same(schedule: str, pieces: int, rank_pool: RankPool) -> None:
    """With a frozen part in the first stage, whose boundary needs a gradient all the same."""

    def build() -> nn.Module:
        model = chain()
        model[0].requires_grad_(False)  # type: ignore[index]
        model[1].requires_grad_(False)  # type: ignore[index]
        return model

    model = build()
    parallel = {"pipeline": 2, "schedule": schedule, "num_microbatches": pieces}
    trainer = trainer_of(model, 2, rank_pool, parallel, gradient_accumulation_steps=2)
    trainer.fit(DATA, max_steps=STEPS)
    assert difference(model, reference("frozen chain", build)) < EXACT


@pytest.mark.parametrize(
    "parallel",
    [
        {"pipeline": 4, "schedule": "gpipe"},
        {"pipeline": 4, "schedule": "1f1b"},
        {"pipeline": 2, "tensor": 2},
        {"pipeline": 2, "data": 2},
        {"pipeline": 2, "tensor": 2, "schedule": "zbv"},
        {"pipeline": 2, "expert": 2},
    ],
)
def test_four_ranks(parallel: dict[str, Any], rank_pool: RankPool) -> None:
    """Tied embedding and head, on the first and the last stage."""
    name = "dilated" if parallel["pipeline"] == 4 or "schedule" in parallel else "llama tied"
    name = "mixtral" if "expert" in parallel else name
    model = MODELS[name]()
    trainer = trainer_of(model, 4, rank_pool, parallel)
    trainer.fit(DATA, max_steps=STEPS)
    assert difference(model, reference(name, MODELS[name])) < EXACT


def test_stages_that_are_named(rank_pool: RankPool) -> None:
    model = chain()
    trainer = trainer_of(model, 2, rank_pool, {"pipeline": 2, "stages": ("0", "5")})
    trainer.fit(DATA, max_steps=STEPS)
    assert difference(model, reference("chain", chain)) < EXACT


class ExpectNorms(Callback):
    """Fails a run with another norm than one process has."""

    def __init__(self, norms: list[float]) -> None:
        self.norms = norms

    def on_log(self, context: Any, record: Any) -> None:
        assert record["grad_norm"] == pytest.approx(self.norms[context.progress.step - 1], rel=1e-10)


def test_norm_and_evaluation_are_those_of_the_whole_model(rank_pool: RankPool) -> None:
    model = MODELS["llama tied"]()
    trainer = trainer_of(model, 2, rank_pool, {"pipeline": 2})
    trainer.callbacks = [ExpectNorms(reference("llama tied", MODELS["llama tied"]).norms)]
    history = trainer.fit(DATA, tokens(13), epochs=1)
    inputs, targets = tokens(13)
    model.eval()
    with torch.no_grad():
        logits = model(inputs).logits
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert history.epochs[-1]["val_loss"] == pytest.approx(float(loss), abs=EXACT)


def own_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """A training step that looks at the targets before it calls the model."""
    inputs, targets = batch
    kept = targets != -100
    logits = model(inputs)
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), kept.sum()


def test_a_training_step_of_the_users_own(rank_pool: RankPool) -> None:
    model = chain()
    trainer = trainer_of(model, 2, rank_pool, {"pipeline": 2}, training_step=own_loss)
    trainer.fit(DATA, max_steps=STEPS)
    assert difference(model, reference("chain", chain)) < EXACT


def test_a_second_fit_continues_with_the_whole_optimizer_state(rank_pool: RankPool) -> None:
    model = chain()
    trainer = trainer_of(model, 2, rank_pool, {"pipeline": 2})
    trainer.fit(DATA, max_steps=4)
    trainer.fit(DATA, max_steps=6)
    assert difference(model, reference("chain", chain)) < EXACT


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activations_are_recomputed_in_their_stage(mode: str, rank_pool: RankPool) -> None:
    model = MODELS["llama"]()
    trainer = trainer_of(model, 2, rank_pool, {"pipeline": 2}, activation_checkpointing=mode)
    trainer.fit(DATA, max_steps=STEPS)
    assert difference(model, reference("llama", MODELS["llama"])) < EXACT


MESHES: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"pipeline": 2}),
    (2, {"tensor": 2}),
    (2, {"pipeline": 2, "schedule": "zbv"}),
    (4, {"pipeline": 2, "tensor": 2}),
]


def test_a_checkpoint_of_one_mesh_is_resumed_on_another(rank_pool: RankPool, tmp_path: Path) -> None:
    """Each resumes from what the one before has saved, among others in the middle of an epoch."""
    for number, steps in ((1, 2), (0, 3), (1, 5), (2, 6), (3, 7), (4, 8), (1, STEPS)):
        ranks, parallel = MESHES[number]
        model = MODELS["dilated"]()
        trainer = trainer_of(
            model,
            ranks,
            rank_pool if ranks > 1 else None,
            parallel,
            checkpoint_dir=str(tmp_path),
            resume_from_checkpoint=steps > 2,
        )
        trainer.fit(DATA, max_steps=steps)
        assert difference(model, reference("dilated", MODELS["dilated"], steps)) < EXACT, (number, steps)


def test_the_same_mesh_resumes_with_the_same_bits(rank_pool: RankPool, tmp_path: Path) -> None:
    results = []
    for folder, stops in (("whole", [STEPS]), ("halves", [5, STEPS])):
        for stop in stops:
            model = MODELS["encoder"]()
            trainer = trainer_of(
                model,
                2,
                rank_pool,
                {"pipeline": 2},
                deterministic=True,
                checkpoint_dir=str(tmp_path / folder),
                resume_from_checkpoint=stop != stops[0],
            )
            trainer.fit(DATA, max_steps=stop)
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# -- what is refused -----------------------------------------------------------------------------------


class NoRanks(Launcher):
    """Fails a test whose run starts ranks."""

    def run(self, plan: RunPlan, command: RankCommand) -> None:
        raise AssertionError("ranks were started")


@pytest.mark.parametrize(
    ("parallel", "given", "field", "text"),
    [
        ({"num_microbatches": 3}, {}, "parallel.num_microbatches", "equal pieces"),
        ({}, {"batch_size": 1, "global_batch_size": 1}, "parallel.num_microbatches", "1f1b on 2 ranks"),
        (
            {"schedule": "dualpipev", "num_microbatches": 2},
            {},
            "parallel.num_microbatches",
            "two micro-batches or more",
        ),
        ({"schedule": "zbv", "stages": ("1", "2", "3")}, {}, "parallel.stages", "cannot have 3 stages"),
        ({"schedule": "zbv"}, {"compile": "blocks"}, "compile", "apart"),
        ({"schedule": "zbv"}, {"activation_checkpointing": "full"}, "activation_checkpointing", "apart"),
        ({"schedule": "zbv", "shard": 2}, {"backend": "fsdp"}, "parallel.schedule", "FSDP reduces them"),
        ({}, {"compile": "model"}, "compile", "divides the model"),
        ({}, {"matmul_precision": "fp8"}, "matmul_precision", "divides the model"),
    ],
)
def test_settings_that_are_not_exact_are_refused_in_the_plan(
    parallel: dict[str, Any], given: dict[str, Any], field: str, text: str
) -> None:
    parallel = {"pipeline": 2, **parallel}
    trainer = trainer_of(chain(), 2 * parallel.get("shard", 1), NoRanks(), parallel, **given)
    with pytest.raises(UserError, match=text) as caught:
        trainer.fit(DATA, max_steps=1)
    assert caught.value.field == field


class Skips(nn.Module):
    """Adds what goes into its blocks to what comes out of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return (x + self.blocks(x)) @ self.tokens.weight.T


class Normed(nn.Module):
    """A BatchNorm between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH), nn.BatchNorm1d(LENGTH), nn.Linear(WIDTH, VOCABULARY)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.layers(tokens)
        return logits


class Wanders(nn.Sequential):
    """In training, its last block also uses a layer inside the first one."""

    def __init__(self) -> None:
        first = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))
        super().__init__(first, nn.Tanh(), Borrows(first[1]))


class Borrows(nn.Module):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other, self.head = (other,), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x + self.other[0](x) if self.training else x)
        return logits


@pytest.mark.parametrize(
    ("build", "ranks", "field", "text"),
    [
        (Wanders, 2, "parallel.pipeline", "whose parameters another stage holds"),
        (Skips, 2, "parallel.pipeline", "something else"),
        (lambda: nn.Sequential(nn.Embedding(VOCABULARY, VOCABULARY)), 2, "parallel.pipeline", "no chain"),
        (Normed, 2, "parallel.num_microbatches", "normalizes over the samples"),
    ],
)
def test_models_that_stages_would_change_are_refused(
    build: Any, ranks: int, field: str, text: str, rank_pool: RankPool
) -> None:
    trainer = trainer_of(build().double(), ranks, rank_pool, {"pipeline": 2})
    with pytest.raises(UserError, match=text) as caught:
        trainer.fit(DATA, max_steps=1)
    assert caught.value.field == field


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(*DATA, strict=True)


def test_a_stream_is_refused(rank_pool: RankPool) -> None:
    """The first samples would be missing from it."""
    trainer = trainer_of(chain(), 2, rank_pool, {"pipeline": 2})
    with pytest.raises(UserError, match=r"a forward pass with the first samples, .* is a stream") as caught:
        trainer.fit(Stream(), max_steps=1)
    assert caught.value.field == "parallel.pipeline"


def test_samples_of_another_length_are_refused(rank_pool: RankPool) -> None:
    inputs, targets = DATA
    data = [
        (i[: LENGTH - (n >= 8)], t[: LENGTH - (n >= 8)])
        for n, (i, t) in enumerate(zip(inputs, targets, strict=True))
    ]
    trainer = trainer_of(chain(), 2, rank_pool, {"pipeline": 2}, data={"shuffle": False})
    with pytest.raises(UserError, match="another shape") as caught:
        trainer.fit(data, epochs=1)
    assert caught.value.field == "parallel.pipeline"


class Augmented(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Leaves out a token that depends on the rank.

    Args:
        start: index of the first sample of which it does.
    """

    def __init__(self, start: int) -> None:
        self.start = start

    def __len__(self) -> int:
        return len(DATA[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = DATA[0][index].clone()
        if index >= self.start:
            inputs[torch.distributed.get_rank()] = 0
        return inputs, DATA[1][index]


@pytest.mark.parametrize("start", [0, 2], ids=["all", "after the first two"])
def test_samples_that_depend_on_the_rank_are_refused(start: int, rank_pool: RankPool) -> None:
    """The first stage would compute other samples than the loss of the last is for."""
    trainer = trainer_of(chain(), 2, rank_pool, {"pipeline": 2})
    with pytest.raises(UserError, match="have different samples"):
        trainer.fit(Augmented(start), max_steps=1)


class Limited(nn.Linear):
    """Declares that it drops tokens."""

    capacity_factor = 1.25


@pytest.mark.parametrize(
    ("index", "layer", "text"),
    [
        (-1, Limited(WIDTH, VOCABULARY), "drops the tokens that exceed the capacity"),
        (0, nn.Embedding(VOCABULARY, WIDTH, scale_grad_by_freq=True), "how often a row occurs"),
    ],
)
def test_layers_that_depend_on_a_whole_micro_batch_are_refused(
    index: int, layer: nn.Module, text: str, rank_pool: RankPool
) -> None:
    """One micro-batch is a step, of which the stages see two pieces."""
    layers: list[nn.Module] = [
        nn.Embedding(VOCABULARY, WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.Linear(WIDTH, VOCABULARY),
    ]
    layers[index] = layer
    model = nn.Sequential(*layers)
    trainer = trainer_of(model.double(), 2, rank_pool, {"pipeline": 2}, batch_size=GLOBAL_BATCH)
    with pytest.raises(UserError, match=text):
        trainer.fit(DATA, max_steps=1)
