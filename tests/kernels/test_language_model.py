"""The dilated language model: its sizes, its initial state, what it may see, and its factory's words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed_kernels import PRESETS, DilatedLanguageModel, KernelError, create_distributed_model

from tests.kernels.gloo_ranks import Ranks

TINY: Mapping[str, Any] = {
    "embed_dim": 32,
    "num_heads": 4,
    "num_layers": 2,
    "segment_lengths": (8, 32),
    "dilation_rates": (1, 4),
    "vocab_size": 17,
    "max_seq_len": 32,
}


def tiny(**options: Any) -> DilatedLanguageModel:
    torch.manual_seed(0)
    return create_distributed_model(**{**TINY, **options})


@pytest.mark.parametrize(
    ("preset", "smallest", "largest"),
    [("small", 125e6, 350e6), ("medium", 350e6, 1.3e9), ("large", 1.3e9, 2e9)],
)
def test_presets_have_the_sizes_they_are_named_for(preset: str, smallest: float, largest: float) -> None:
    with torch.device("meta"):
        model = create_distributed_model(preset)
    assert smallest <= sum(p.numel() for p in model.parameters()) <= largest
    assert model.max_seq_len >= max(PRESETS[preset]["segment_lengths"])


def test_it_begins_by_knowing_nothing() -> None:
    """Logits near zero: the first loss is that of a uniform guess."""
    model = tiny(vocab_size=256)
    tokens = torch.randint(256, (8, 32))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), torch.randint(256, (8, 32)).flatten())
    assert loss.item() == pytest.approx(math.log(256), rel=0.01)


def test_the_same_seed_builds_the_same_model() -> None:
    first, second = tiny().state_dict(), tiny().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_token_moves_no_logit_before_it() -> None:
    model = tiny().eval()
    tokens = torch.randint(17, (2, 32))
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 17
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20], after[:, 20])


def test_gradient_checkpointing_changes_no_gradient() -> None:
    tokens = torch.randint(17, (2, 32))
    gradients = []
    for option in (False, True):
        model = tiny(use_gradient_checkpointing=option)
        model(tokens).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(plain, again) for plain, again in zip(*gradients, strict=True))


def test_the_output_layer_is_the_embedding() -> None:
    model = tiny()
    assert model.head.weight is model.tokens.weight


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_a_sequence_compute_what_one_computes(ranks: Ranks, size: int) -> None:
    tokens = torch.randint(17, (2, 32))
    found = ranks.run("language_model", size, tokens=tokens, **TINY)
    torch.manual_seed(3)
    model = create_distributed_model(**TINY).double()
    logits = model(tokens)
    logits.square().sum().backward()
    joined = torch.cat([each["results"][0] for each in found[:size]], 1)
    torch.testing.assert_close(joined, logits, atol=1e-10, rtol=0)
    for mine, parameter in zip(found[0]["parameters"], model.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(mine, parameter.grad, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"preset": "tiny"}, ["tiny", "small, medium, large"]),
        ({"embed_dim": 32}, ["missing", "num_heads", "preset"]),
        ({**TINY, "use_deepspeed": True}, ["use_deepspeed", "backend: deepspeed"]),
        ({**TINY, "depth": 3}, ["depth", "num_layers"]),
        ({**TINY, "num_layers": 0}, ["num_layers", "0"]),
    ],
)
def test_the_factory_names_what_is_wrong(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(KernelError) as caught:
        create_distributed_model(**given)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_sequence_longer_than_the_positions_is_refused() -> None:
    with pytest.raises(KernelError, match="max_seq_len=32"):
        tiny()(torch.zeros(1, 33, dtype=torch.long))
