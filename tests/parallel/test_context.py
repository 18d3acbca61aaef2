"""Models whose sequences ranks divide between them train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_kernels import DistributedMultiheadDilatedAttention
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distributed import UserError
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.parallel.models import LENGTH, SEQUENCES, VOCABULARY, WIDTH, Classifier, Perceptron, tokens
from tests.parallel.test_tensor_parallel import (
    DATA,
    STEPS,
    ExpectNorms,
    NoRanks,
    difference,
    reference,
    trainer_of,
)
from tests.support.training import make_trainer

pytest.importorskip("transformers")

MESHES = {
    "context 2": ("pytorch-ddp", 2, {"context": 2}),
    "data 2 x context 2": ("pytorch-ddp", 4, {"context": 2}),
    "shard 2 x context 2": ("fsdp", 4, {"context": 2}),
    "context 2 x tensor 2": ("pytorch-ddp", 4, {"context": 2, "tensor": 2}),
}
CASES = [
    ("context 2", "dilated", "dilated"),
    ("context 2", "dilated", "ulysses"),
    ("context 2", "block-sparse", "block-sparse"),
    ("context 2", "llama", "ring"),
    ("context 2", "llama tied", "ulysses"),
    ("context 2", "bert", "ring"),
    ("data 2 x context 2", "gpt2", "auto"),
    ("shard 2 x context 2", "dilated", "auto"),
    ("context 2 x tensor 2", "llama", "ring"),
]


@pytest.mark.parametrize(("mesh", "name", "method"), CASES)
def test_slices_of_sequences_train_as_one_process_does(
    mesh: str, name: str, method: str, rank_pool: RankPool
) -> None:
    """Masked tokens, clipping, accumulation, and a last window of 5 sequences."""
    backend, ranks, axes = MESHES[mesh]
    build = SEQUENCES[name].build
    model, expected = build(), reference(name, build)
    parallel = {**axes, "context_attention": method}
    trainer = trainer_of(model, backend, ranks, rank_pool, parallel, gradient_accumulation_steps=2)
    trainer.callbacks = [ExpectNorms(expected.norms)]
    history = trainer.fit(DATA, max_steps=STEPS)
    assert difference(model, expected.weights) < EXACT
    assert history.batch["data_parallel_size"] == ranks // 2 // axes.get("tensor", 1)


class ByRank:
    """Builds a perceptron whose weights depend on the rank."""

    def __call__(self) -> nn.Module:
        model = SEQUENCES["perceptron"].build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * (dist.get_rank() if dist.is_initialized() else 0)
        return model


def test_all_slices_begin_with_the_weights_of_rank_0(rank_pool: RankPool) -> None:
    model = ByRank()
    trainer = trainer_of(model, "pytorch-ddp", 2, rank_pool, {"context": 2})
    trainer.fit(DATA, max_steps=STEPS)
    expected = reference("perceptron", SEQUENCES["perceptron"].build)
    assert difference(trainer.model, expected.weights) < EXACT


def test_frozen_parts_stay(rank_pool: RankPool) -> None:
    def build() -> nn.Module:
        model = SEQUENCES["llama"].build()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.0" not in name and "embed" not in name)
        return model

    model = build()
    trainer_of(model, "fsdp", 4, rank_pool, {"context": 2}).fit(DATA, max_steps=STEPS)
    assert difference(model, reference("frozen", build).weights) < EXACT


def test_activations_are_recomputed_across_the_ranks(rank_pool: RankPool) -> None:
    model = SEQUENCES["llama"].build()
    fields = {"activation_checkpointing": "full"}
    trainer_of(model, "pytorch-ddp", 2, rank_pool, {"context": 2}, **fields).fit(DATA, max_steps=STEPS)
    assert difference(model, reference("llama", SEQUENCES["llama"].build).weights) < EXACT


def test_the_evaluation_counts_each_token_once(rank_pool: RankPool) -> None:
    model = SEQUENCES["llama"].build()
    history = trainer_of(model, "pytorch-ddp", 4, rank_pool, {"context": 2}).fit(DATA, tokens(13), epochs=2)
    inputs, targets = tokens(13)
    model.eval()
    with torch.no_grad():
        logits = model(inputs).logits.flatten(0, 1)
    kept = targets.flatten() != -100
    correct = (logits.argmax(-1) == targets.flatten())[kept].double().mean()
    last = history.epochs[-1]
    assert last["val_loss"] == pytest.approx(float(cross_entropy(logits, targets.flatten())), abs=EXACT)
    assert last["val_accuracy"] == pytest.approx(float(correct), abs=EXACT)


def test_a_run_goes_on_from_slices_to_one_process_and_back(rank_pool: RankPool, tmp_path: Path) -> None:
    build = SEQUENCES["llama tied"].build
    fields = {"checkpoint_dir": str(tmp_path), "resume_from_checkpoint": True}
    for steps, ranks, backend, axes in (
        (3, 2, "pytorch-ddp", {"context": 2}),
        (6, 1, "serial", {}),
        (8, 4, "fsdp", {"context": 2}),
        (10, 2, "pytorch-ddp", {"context": 2}),
    ):
        model = build()
        trainer_of(model, backend, ranks, rank_pool, axes, **fields).fit(DATA, max_steps=steps)
    assert difference(model, reference("llama tied", build).weights) < EXACT


# -- masks, lengths and dropout -----------------------------------------------------------------------------


class Padded(torch.utils.data.Dataset[Any]):
    """(tokens, mask of padding, targets), padded at the end."""

    def __init__(self, number: int) -> None:
        self.inputs, self.targets = tokens(number)
        lengths = torch.arange(number) % (LENGTH - 2) + 3
        self.mask = (torch.arange(LENGTH) < lengths[:, None]).long()
        self.targets = self.targets.masked_fill(self.mask == 0, -100)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.inputs[index], self.mask[index], self.targets[index]


@pytest.mark.parametrize(("name", "method"), [("llama", "ring"), ("bert", "ring"), ("llama tied", "ulysses")])
def test_padding_is_left_out_for_all_slices(name: str, method: str, rank_pool: RankPool) -> None:
    weights = []
    for ranks, axes in ((1, {}), (2, {"context": 2, "context_attention": method})):
        model = SEQUENCES[name].build()
        backend = "pytorch-ddp" if axes else "serial"
        trainer_of(model, backend, ranks, rank_pool, axes).fit(Padded(16), max_steps=4)
        weights.append({n: p.detach() for n, p in model.named_parameters()})
    assert difference(model, weights[0]) < EXACT


def of_lengths(*lengths: int) -> list[tuple[Tensor, Tensor]]:
    """A batch of 8 sequences of each of `lengths`."""
    inputs, targets = tokens(8)
    return [(inputs[:, :length], targets[:, :length]) for length in lengths]


class Batches(torch.utils.data.Dataset[Any]):
    """Single samples of batches of several lengths, in their order."""

    def __init__(self, *lengths: int) -> None:
        self.rows = [pair for batch in of_lengths(*lengths) for pair in zip(*batch, strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index]


def loader(*lengths: int) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(Batches(*lengths), batch_size=8)


def test_lengths_may_change_between_windows(rank_pool: RankPool) -> None:
    """Ring for 8 and 4 positions, Ulysses for 6, whose quarters are not whole."""
    weights = []
    for ranks, axes in ((1, {}), (2, {"context": 2})):
        model = SEQUENCES["llama"].build()
        trainer_of(model, "pytorch-ddp" if axes else "serial", ranks, rank_pool, axes).fit(
            loader(8, 6, 4), epochs=2
        )
        weights.append({n: p.detach() for n, p in model.named_parameters()})
    assert difference(model, weights[0]) < EXACT


def test_a_length_that_the_ranks_do_not_divide_is_refused_in_its_step(rank_pool: RankPool) -> None:
    trainer = trainer_of(SEQUENCES["llama"].build(), "pytorch-ddp", 2, rank_pool, {"context": 2})
    with pytest.raises(UserError, match=r"sequence of 7 .*Got 7\. Allowed: 4, 8\.") as caught:
        trainer.fit(loader(8, 7), epochs=1)
    assert caught.value.field == "parallel.context"


class Dropped(Perceptron):
    """With dropout before the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3] = nn.Dropout(0.5)


def trained_twice(backend: str, pool: RankPool) -> float:
    """How much a step on sequences that repeat their first half, cut in two, differs from one on that half.

    Nothing, if both ranks draw the same masks.
    """
    halves = [x[:, : LENGTH // 2] for x in tokens(8, masked=0.0)]
    models = []
    for name, data, axes in (
        ("serial", halves, {}),
        (backend, [torch.cat([x, x], dim=1) for x in halves], {"context": 2}),
    ):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            models.append(Dropped().double())
        trainer_of(models[-1], name, 2 if axes else 1, pool, axes).fit(tuple(data), max_steps=1)
    return difference(models[0], dict(models[1].named_parameters()))


def test_ranks_draw_masks_of_their_own(rank_pool: RankPool) -> None:
    assert trained_twice("pytorch-ddp", rank_pool) > 1e-6


# -- what is refused ----------------------------------------------------------------------------------------


class Positions(Perceptron):
    """Adds the number of each position, from zero in every slice."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = super().forward(tokens)
        return logits + torch.arange(tokens.shape[1])[:, None] * self.layers[0].bias[0]


class OwnAttention(nn.Module):
    """Calls torch's attention itself, in a branch whose output is zero before training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Perceptron()
        self.gate = nn.Parameter(torch.full((1,), 1e-12))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.inner(tokens)
        heads = logits[:, None]
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return logits + self.gate * mixed[:, 0]


class Running(Perceptron):
    """Mixes positions in a branch that is zero before training."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(VOCABULARY, VOCABULARY, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = super().forward(tokens)
        return logits + self.out(logits.cumsum(1))


class Pooled(Perceptron):
    """One output for each sequence."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).mean(1)


def attention(**given: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        DistributedMultiheadDilatedAttention(WIDTH, 4, (4, 8), (1, 2), causal=True, **given),
        nn.Linear(WIDTH, VOCABULARY),
    ).double()


def per_sample(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return cross_entropy(output.flatten(0, 1), target.flatten()) * len(target), len(target)


def exact_sequences(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output.argmax(-1) == target).all(1).sum(), len(target)


def mean_of_logits(model: Any, batch: Any) -> Tensor:
    mean: Tensor = model(batch[0]).mean()
    return mean


REFUSED_AT_ONCE: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "encoder": (Classifier, {}, "parallel.context_attention", "'encoder.layers.0.self_attn' is an nn.Multi"),
    "ring for ours": (
        SEQUENCES["dilated"].build,
        {"context_attention": "ring"},
        "parallel.context_attention",
        "Got 'ring'. Allowed: auto, dilated, ulysses",
    ),
    "dilated for theirs": (
        SEQUENCES["llama"].build,
        {"context_attention": "dilated"},
        "parallel.context_attention",
        "Allowed: auto, ring, ulysses",
    ),
    "heads": (
        SEQUENCES["llama"].build,
        {"context": 4, "context_attention": "ulysses"},
        "parallel.context_attention",
        "ring, or ulysses on 1, 2 ranks",
    ),
    "norm": (lambda: nn.Sequential(nn.BatchNorm1d(LENGTH)), {}, "parallel.context", "'0' takes statistics"),
    "compile": (Perceptron, {"compile": "blocks"}, "compile", "Got 'blocks'. Allowed: none"),
}


@pytest.mark.parametrize("name", REFUSED_AT_ONCE)
def test_what_cannot_be_computed_over_slices_is_refused_before_ranks_start(name: str) -> None:
    build, given, field, text = REFUSED_AT_ONCE[name]
    fields = {key: value for key, value in given.items() if key == "compile"}
    axes = {"context": 2, **{key: value for key, value in given.items() if key not in fields}}
    trainer = trainer_of(build(), "pytorch-ddp", axes["context"], NoRanks(), axes, **fields)
    with pytest.raises(UserError) as caught:
        trainer.fit(DATA, max_steps=1)
    assert caught.value.field == field
    assert text in str(caught.value)


def by_name(number: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": x, "labels": x} for x in tokens(number)[0]]


def sliding() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4}
    return MistralForCausalLM(MistralConfig(**sizes, **heads, vocab_size=VOCABULARY, use_cache=False))


def with_positions() -> list[tuple[Tensor, ...]]:
    inputs, targets = tokens(16)
    places = torch.arange(LENGTH).expand_as(inputs)
    return list(zip(inputs, torch.ones_like(inputs), places, targets, strict=True))


REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str, str]] = {
    "own positions": (Positions, DATA, {}, "parallel.context", "computes something else when 2 ranks"),
    "own attention": (
        OwnAttention,
        DATA,
        {},
        "parallel.context",
        "calls scaled_dot_product_attention itself",
    ),
    "branch of zeros": (Running, DATA, {}, "parallel.context", "computes something else when 2 ranks"),
    "pooled": (Pooled, (DATA[0], DATA[1][:, 0]), {}, "train_loader", "(8, 8), (8,)'. Allowed: inputs and"),
    "segments": (
        SEQUENCES["dilated"].build,
        tuple(x[:, :6] for x in DATA),
        {},
        "parallel.context",
        "4 neither divides nor is a multiple of a rank's slice of 3",
    ),
    "sliding window": (
        sliding,
        DATA,
        {},
        "parallel.context",
        "sliding_window: the model",
    ),
    "positions": (
        SEQUENCES["llama"].build,
        with_positions(),
        {},
        "parallel.context",
        "position_ids: slices of a sequence get theirs",
    ),
    "labels inside": (SEQUENCES["llama"].build, by_name(16), {}, "train_loader", "shifts labels across"),
    "loss by sample": (
        Perceptron,
        DATA,
        {"loss_fn": per_sample},
        "loss_fn",
        "'loss' of slices does not add up",
    ),
    "loss of samples": (Perceptron, DATA, {"loss_fn": nn.MSELoss()}, "loss_fn", "a mean over samples"),
    "metric": (
        Perceptron,
        DATA,
        {"metrics": {"exact": exact_sequences}},
        "metrics",
        "'exact' of slices does not add up",
    ),
    "training_step": (
        Perceptron,
        DATA,
        {"training_step": mean_of_logits},
        "training_step",
        "ranks that hold slices",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_training_on_slices_is_refused_before_the_first_step(
    name: str, rank_pool: RankPool
) -> None:
    build, data, given, field, text = REFUSED[name]
    model = build().double()
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(UserError) as caught:
        trainer_of(model, "pytorch-ddp", 2, rank_pool, {"context": 2}, **given).fit(data, max_steps=1)
    assert caught.value.field == field
    assert text in str(caught.value)
    assert difference(model, weights) == 0.0


def test_sequence_parallel_is_the_axis_context_under_a_trainer(rank_pool: RankPool) -> None:
    """An attention class's own argument would take the ranks' different samples for one sequence."""
    fields = {"backend": "pytorch-ddp", "global_batch_size": 8, "learning_rate": 0.01}
    with pytest.raises(UserError, match=r"parallel\.context.*sequence_parallel=True.*parallel\.context=2"):
        make_trainer(attention(sequence_parallel=True), 2, rank_pool, **fields).fit(DATA, max_steps=1)
    expected = attention()
    make_trainer(expected, 1, None, **{**fields, "backend": "serial"}).fit(DATA, max_steps=STEPS)
    for given in (True, False):
        model = attention(sequence_parallel=given)
        fields["parallel"] = {"context": 2}
        make_trainer(model, 2, rank_pool, **fields).fit(DATA, max_steps=STEPS)
        assert difference(model, dict(expected.named_parameters())) < EXACT
