"""Recomputed activations: the same training to the bit, on every backend, and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed import UserError
from distributed.checkpoint.reader import PortableReader
from distributed.interfaces.callback import Context
from distributed.testing.rank_pool import RankPool
from distributed.training.activation_checkpointing import _Unchanged, recompute
from distributed.training.blocks import find_blocks
from tests.benchmarks.activation_memory import step_bytes
from tests.support.training import OnStep, make_trainer

MODES = ("full", "selective", "offload")
STEPS = 7
WIDTH = 8


class Layer(nn.Module):
    """Attention and two matrix products, each with dropout: a block of a transformer."""

    calls = 0

    def __init__(self, drop: float = 0.2) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.enter, self.leave = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, *, scale: dict[str, Tensor]) -> Tensor:
        Layer.calls += 1
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        x = x + self.drop(F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0))
        # Draws of Python and NumPy, as in stochastic depth.
        gate = random.uniform(0.5, 1.5) * float(np.random.uniform(0.5, 1.5)) if self.training else 1.0
        return x + gate * scale["by"] * self.leave(self.drop(F.gelu(self.enter(x))))


class Words(nn.Module):
    """A small transformer over 11 words."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.heat = nn.Parameter(torch.ones(WIDTH))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x, scale={"by": self.heat * 2})
        out: Tensor = self.head(x).mean(1)
        return out


class Counts(Layer):
    """Changes a buffer in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor, *, scale: dict[str, Tensor]) -> Tensor:
        self.seen += 1
        return super().forward(x, scale=scale)


class Spectral(nn.Module):
    """A power iteration in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, *, scale: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class Remembers(nn.Module):
    """Attends to the keys of its earlier calls, too."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.before = nn.Linear(WIDTH, WIDTH), list[Tensor]()

    def forward(self, x: Tensor, *, scale: dict[str, Tensor]) -> Tensor:
        self.before.append(self.keys(x))
        keys = torch.cat(self.before, -2)
        return x + F.softmax(x @ keys.mT, -1) @ keys


class InPlace(nn.Module):
    """Adds to its input, which `full` would start from again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: dict[str, Tensor]) -> Tensor:
        x += torch.tanh(self.inner(x * 2))
        return x


class ChangesProduct(nn.Module):
    """Adds to the result of a matrix product, of which `_unsafe_view` hides the version."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, *, scale: dict[str, Tensor]) -> Tensor:
        out = self.inner(x)
        out += scale["by"]
        return x + torch.tanh(out)


class ReturnsProduct(nn.Module):
    """Returns a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, *, scale: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.inner(torch.tanh(x))
        return out


class AddsInPlace(Words):
    """Adds to what a block returned."""

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            out = layer(x, scale={"by": self.heat})
            out += x
            x = out.tanh()
        logits: Tensor = self.head(x).mean(1)
        return logits


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor, *, scale: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.norm(x)
        return out


def build(layer: Callable[[], nn.Module] = Layer, kind: type[Words] = Words) -> nn.Module:
    """The same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return kind(layer).double()


def words(length: int = 26) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randint(0, 11, (length, 5), generator=generator),
        torch.randint(0, 11, (length,), generator=generator),
    )


def bits(model: nn.Module) -> dict[str, Any]:
    return {name: value.detach().numpy().tobytes() for name, value in model.state_dict().items()}


def train(
    backend: str, ranks: int, pool: RankPool | None, **given: Any
) -> tuple[dict[str, Any], list[float]]:
    """(bits of the weights, losses) after a few steps with accumulation and a validation."""
    model = build()
    trainer = make_trainer(
        model, ranks, pool, backend=backend, batch_size=2, gradient_accumulation_steps=2, optimizer="adamw",
        learning_rate=0.02, gradient_clipping=0.5, **given,
    )  # fmt: skip
    trainer.callbacks = [OnStep(names_stay)]
    history = trainer.fit(words(), words(5), max_steps=STEPS)
    return bits(model), [*history.steps["loss"], history.epochs[-1]["val_loss"]]


def names_stay(context: Context) -> None:
    assert list(context.model.state_dict()) == NAMES


NAMES = list(build().state_dict())


@pytest.mark.parametrize(
    ("backend", "ranks", "given"),
    [
        ("serial", 1, {}),
        ("pytorch-ddp", 2, {}),
        ("fsdp", 2, {}),
        ("horovod", 2, {}),
        ("deepspeed", 2, {"zero_stage": 1}),
        ("deepspeed", 2, {"zero_stage": 3}),
    ],
    ids=["serial", "ddp", "fsdp", "horovod", "zero-1", "zero-3"],
)
def test_recomputation_changes_no_bit(
    backend: str, ranks: int, given: dict[str, Any], rank_pool: RankPool
) -> None:
    """Weights, losses and validation, with dropout of torch and draws of Python and NumPy in the blocks."""
    plain = train(backend, ranks, rank_pool, **given)
    for mode in MODES:
        found = train(backend, ranks, rank_pool, activation_checkpointing=mode, **given)
        assert found == plain, mode


def test_each_mode_stores_what_it_states() -> None:
    """Bytes of activations between forward and backward, and how often the blocks run."""
    model, (x, y) = build(partial(Layer, 0.0)), words(256)
    measure = partial(step_bytes, model, lambda: F.cross_entropy(model(x), y))
    measure()
    stored = {"none": measure()[0]}
    for mode in MODES:
        recomputed = recompute(model, find_blocks(model, ()), mode)
        Layer.calls = 0
        stored[mode] = measure()[0]
        assert Layer.calls == 6, "each of three blocks runs once forward and once in backward"
        recomputed.undo()
        assert not any("forward" in vars(module) for module in model.modules())
    assert stored["full"] < 0.2 * stored["none"] < stored["selective"] < 0.7 * stored["none"]
    assert stored["offload"] == pytest.approx(stored["full"], rel=0.01), "host memory is where it is already"
    assert measure()[0] == stored["none"]


# -- models without blocks -------------------------------------------------------------------------


def flat(drop: float = 0.2) -> nn.Module:
    """Nine layers side by side, behind an embedding of each of five words."""
    layers = [nn.Linear(5 * WIDTH, 64), nn.GELU(), nn.Linear(64, 64), nn.Dropout(drop), nn.Tanh()]
    layers += [nn.Linear(64, 64), nn.GELU(), nn.Dropout(drop), nn.Linear(64, 11)]
    return nn.Sequential(nn.Embedding(11, WIDTH), nn.Flatten(), nn.Sequential(*layers))


def train_flat(backend: str, ranks: int, pool: RankPool, **given: Any) -> tuple[dict[str, Any], list[float]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = flat().double()
    names = list(model.state_dict())
    settings: dict[str, Any] = {
        "backend": backend,
        "batch_size": 2,
        "optimizer": "adamw",
        "learning_rate": 0.02,
    }
    trainer = make_trainer(model, ranks, pool, **settings, **given)
    history = trainer.fit(words(), words(5), max_steps=STEPS)
    assert list(model.state_dict()) == names
    return bits(model), [*history.steps["loss"], history.epochs[-1]["val_loss"]]


@pytest.mark.parametrize(
    ("backend", "ranks", "given"),
    [("serial", 1, {}), ("fsdp", 2, {}), ("deepspeed", 2, {"zero_stage": 3})],
    ids=["serial", "fsdp", "zero-3"],
)
def test_a_flat_sequential_needs_no_names_of_blocks(
    backend: str, ranks: int, given: dict[str, Any], rank_pool: RankPool
) -> None:
    plain = train_flat(backend, ranks, rank_pool, **given)
    for mode in MODES:
        assert train_flat(backend, ranks, rank_pool, activation_checkpointing=mode, **given) == plain, mode


def test_parts_of_a_flat_sequential_store_their_inputs_alone() -> None:
    # The output of every layer is as large; of 16 in four parts, the inputs of the parts stay.
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU())))
    x = torch.randn(256, 64, requires_grad=True)
    measure = partial(step_bytes, model, lambda: model(x).square().mean())
    measure()
    plain = measure()[0]
    recomputed = recompute(model, [], "full")
    stored = measure()[0]
    recomputed.undo()
    assert stored < 0.5 * plain
    assert measure()[0] == plain
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_without_blocks_or_layers_side_by_side_is_refused() -> None:
    with pytest.raises(UserError, match="found no blocks in Linear"):
        recompute(nn.Linear(2, 2), [], "full")
    with pytest.raises(UserError, match="BatchNorm in a recomputed block"):
        recompute(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.ReLU()), [], "full")


# -- models of libraries ---------------------------------------------------------------------------


def language_model() -> nn.Module:
    from distributed_kernels.attention.language_model import create_distributed_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return create_distributed_model(
            embed_dim=16, num_heads=2, num_layers=2, segment_lengths=[4, 8], dilation_rates=[1, 2],
            vocab_size=11, max_seq_len=8, dropout=0.1,
        )  # fmt: skip


def llama(use_cache: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(**sizes, vocab_size=11, attention_dropout=0.1, use_cache=use_cache)
        )


def next_word(model: nn.Module, batch: list[Tensor]) -> Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())


def texts(length: int = 8) -> list[Tensor]:
    return list(torch.randint(0, 11, (length, 8), generator=torch.Generator().manual_seed(2)))


@pytest.mark.slow
@pytest.mark.parametrize("build", [language_model, llama, partial(llama, True)])
def test_models_of_libraries_train_the_same(build: Callable[[], nn.Module], rank_pool: RankPool) -> None:
    """The blocks are found in them, and no bit changes. No cache of keys and values is filled meanwhile."""
    found = {}
    for mode in ("none", *MODES):
        model = llama() if build is not language_model and mode == "none" else build()
        given: dict[str, Any] = {"batch_size": 2, "learning_rate": 0.01, "activation_checkpointing": mode}
        if build is not language_model:
            data: Any = [{"input_ids": text, "labels": text} for text in texts()]
        else:
            data, given["training_step"] = torch.utils.data.TensorDataset(torch.stack(texts())), next_word
        make_trainer(model, 2, rank_pool, backend="pytorch-ddp", **given).fit(data, max_steps=6)
        found[mode] = bits(model)
    assert all(found[mode] == found["none"] for mode in MODES)


class Frozen:
    """A configuration that refuses changes."""

    def __init__(self, config: Any) -> None:
        vars(self)["_config"] = config

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} is read only")


@pytest.mark.parametrize("frozen", [False, True])
def test_the_configuration_of_a_model_is_not_changed(frozen: bool, tmp_path: Path) -> None:
    """A callback that saves the model while it trains finds the user's own values, and bits are the same."""
    found = []
    for mode in ("none", "full"):
        model: Any = llama(use_cache=mode == "full")
        own = model.config
        if frozen and mode == "full":
            model.model.config = Frozen(own)

        def save(context: Context, own: Any = own) -> None:
            own.save_pretrained(tmp_path)

        trainer = make_trainer(
            model, backend="serial", batch_size=2, activation_checkpointing=mode, callbacks=[OnStep(save)]
        )
        trainer.fit([{"input_ids": text, "labels": text} for text in texts()], max_steps=2)
        assert json.loads((tmp_path / "config.json").read_text())["use_cache"] is (mode == "full")
        found.append(bits(model))
    assert found[0] == found[1]


def test_a_cache_that_is_asked_for_is_filled() -> None:
    """As `generate` does in a callback. Without a request none is."""
    model: Any = llama(use_cache=True).eval()
    lever = recompute(model, find_blocks(model, ()), "full")
    with torch.no_grad():
        assert model(texts()[0][None]).past_key_values is None
        assert model(texts()[0][None], use_cache=True).past_key_values is not None
        lever.undo()
        assert model(texts()[0][None]).past_key_values is not None


@pytest.mark.parametrize(
    ("build_model", "mode"),
    [
        (partial(build, InPlace), "offload"),
        (partial(build, ChangesProduct), "selective"),
        (partial(build, ReturnsProduct, AddsInPlace), "selective"),
    ],
    ids=["inputs", "products", "returned-products"],
)
def test_what_is_stored_is_copied_before_it_is_changed_in_place(
    build_model: Callable[[], nn.Module], mode: str
) -> None:
    found = []
    for chosen in ("none", mode):
        model = build_model()
        trainer = make_trainer(model, backend="serial", batch_size=2, activation_checkpointing=chosen)
        trainer.fit(words(), max_steps=3)
        found.append(bits(model))
    assert found[0] == found[1]


# -- checkpoints ------------------------------------------------------------------------------------


def serial_part(until_step: int, folder: Any, **given: Any) -> tuple[nn.Module, str | None]:
    """(model, newest checkpoint) of a serial training that resumes if there is something."""
    model = build()
    resume = {"resume_from_checkpoint": True} if folder else {}
    trainer = make_trainer(model, folder=folder, backend="serial", batch_size=3, **resume, **given)
    return model, trainer.fit(words(), max_steps=until_step).checkpoint


def test_a_checkpoint_loads_with_and_without_recomputation(tmp_path: Any) -> None:
    """Saved under one setting and resumed under another, a run ends with the bits of the whole one."""
    whole = bits(serial_part(6, None)[0])
    for number, (first, second) in enumerate([("none", "full"), ("selective", "none"), ("full", "offload")]):
        folder = tmp_path / str(number)
        saved = serial_part(3, folder, activation_checkpointing=first)[1]
        assert sorted(name for key, name in PortableReader(saved).tensors() if key == "model") == sorted(
            NAMES
        )
        resumed, _ = serial_part(6, folder, activation_checkpointing=second)
        assert bits(resumed) == whole


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "mode", "text"),
    [
        (Norm, "full", "BatchNorm in a recomputed block.*Allowed: none with BatchNorm"),
        (Counts, "full", "Counts changes its buffer 'seen'.*recomputation would change it again"),
        (Spectral, "offload", "Spectral changes its buffer '_u'"),
        (InPlace, "full", "an input of a block, or .* changed in place.*Allowed: none, offload"),
        (Remembers, "full", "keeps state between calls.*use_cache = False"),
    ],
)
def test_what_would_silently_differ_is_refused(layer: Any, mode: str, text: str) -> None:
    model = layer() if isinstance(layer, partial) else build(layer)
    data: Any = (
        words() if isinstance(model, Words) else [{"input_ids": text, "labels": text} for text in texts()]
    )
    before = {name: value.clone() for name, value in model.state_dict().items() if "buffer" not in name}
    trainer = make_trainer(model, backend="serial", batch_size=2, activation_checkpointing=mode)
    with pytest.raises(UserError, match=f"^activation_checkpointing: .*{text}"):
        trainer.fit(data, max_steps=2)
    weights = dict(model.named_parameters())
    assert all(torch.equal(weights[name], before[name]) for name in weights), "no step was taken"
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("by_call", [True, False])
def test_stored_results_of_each_version_of_torch_are_protected(by_call: bool) -> None:
    """torch from 2.12 on stores the results of an operation by call, and before as a list."""
    product = torch.ones(3)
    stored = SimpleNamespace(val=product, version=product._version)
    _Unchanged({torch.ops.aten.mm: {0: stored} if by_call else [stored]}).protect([product])
    product.zero_()
    assert (stored.val.tolist(), stored.version) == ([1.0] * 3, stored.val._version)
