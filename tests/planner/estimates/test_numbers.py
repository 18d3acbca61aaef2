"""Counts of models given by their sizes, against published counts and against models of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from distributed import UserError
from distributed.planner.estimates.numbers import ModelNumbers, model_numbers

LLAMA_3 = {"kv_heads": 8, "vocabulary": 128256, "sequence": 8192}


@pytest.mark.parametrize(
    ("sizes", "published"),
    [
        # Model cards of Llama 3 and 3.1, Mixtral 8x7B and GPT-2: numbers of elements of their checkpoints.
        ({**LLAMA_3, "layers": 32, "hidden": 4096, "heads": 32, "ffn": 14336}, 8_030_261_248),
        ({**LLAMA_3, "layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672}, 70_553_706_496),
        ({**LLAMA_3, "layers": 126, "hidden": 16384, "heads": 128, "ffn": 53248}, 405_853_388_800),
        (
            {
                "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocabulary": 32000,
                "experts": 8, "experts_per_token": 2,
            },
            46_702_792_704,
        ),
        (
            {
                "layers": 12, "hidden": 768, "heads": 12, "vocabulary": 50257, "sequence": 1024,
                "family": "gpt",
            },
            124_439_808,
        ),
    ],
)  # fmt: skip
def test_parameters_are_those_of_published_models(sizes: dict[str, Any], published: int) -> None:
    assert model_numbers(**sizes).parameters == published


def test_gpt_3_has_the_parameters_of_its_paper() -> None:
    """Brown et al., 2020, table 2.1: 175.0 billion."""
    gpt = model_numbers(
        layers=96, hidden=12288, heads=96, vocabulary=50257, sequence=2048, family="gpt", parameters=175e9
    )
    assert gpt.counted == 174_604_259_328
    assert gpt.parameters == 175e9


def test_a_mixture_computes_with_some_of_its_parameters() -> None:
    """Jiang et al., 2024: 12.9 of 46.7 billion are active for a token of Mixtral."""
    mixtral = model_numbers(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=32000, experts=8
    )
    products = mixtral.forward_flops - mixtral.layers * mixtral.attention_flops
    assert products == pytest.approx(2 * 12.9e9, rel=0.02)


def _llama() -> tuple[torch.nn.Module, ModelNumbers]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=100, attn_implementation="eager",
    )  # fmt: skip
    sizes = model_numbers(
        layers=3, hidden=64, heads=8, kv_heads=2, ffn=160, vocabulary=100, sequence=32, fused_attention=False
    )
    return LlamaForCausalLM(config), sizes


def _gpt() -> tuple[torch.nn.Module, ModelNumbers]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=32, attn_implementation="eager"
    )
    return GPT2LMHeadModel(config), model_numbers(
        layers=2, hidden=64, heads=4, vocabulary=100, sequence=32, family="gpt", fused_attention=False
    )


@pytest.mark.parametrize("build", [_llama, _gpt])
def test_counts_are_those_of_a_model_of_transformers(build: Any) -> None:
    """Parameters one by one, and operations as torch counts them in a forward pass of two samples."""
    model, numbers = build()
    assert numbers.counted == sum(p.numel() for p in model.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(2, 32, dtype=torch.long))
    # Rotary embeddings multiply positions and frequencies, sequence x head_size / 2 products, once for all.
    rotary = 2 * 32 * numbers.head_size // 2 if numbers.family == "llama" else 0
    assert counter.get_total_flops() == 2 * 32 * numbers.forward_flops + rotary


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_activations_are_those_of_the_paper(tensor: int) -> None:
    """Korthikanti et al., 2022, table 2, for 22B: bytes of a block, divided by its tokens."""
    h, a, s = 6144, 64, 2048
    numbers = model_numbers(layers=48, hidden=h, heads=a, family="gpt", sequence=s, fused_attention=False)
    fused = model_numbers(layers=48, hidden=h, heads=a, family="gpt", sequence=s)
    whole = h * (34 + 5 * a * s / h)
    assert numbers.activation_bytes() == pytest.approx(whole)
    divided = h * (10 + 24 / tensor + 5 * a * s / (h * tensor))
    assert numbers.activation_bytes(tensor) == pytest.approx(divided)
    assert numbers.activation_bytes(tensor, sequence_parallel=True) == pytest.approx(whole / tensor)
    assert fused.activation_bytes(tensor, sequence_parallel=True) == pytest.approx(34 * h / tensor)
    assert numbers.checkpoint_bytes() == 2 * h


@pytest.mark.parametrize("parameters", [1e6, 1.25e8, 7e9, 7e10, 1e12])
def test_a_number_of_parameters_is_enough(parameters: float) -> None:
    numbers = model_numbers(parameters=parameters)
    assert numbers.parameters == parameters
    assert numbers.counted == pytest.approx(parameters, rel=0.15 if parameters < 1e8 else 0.03)
    assert {"layers", "hidden", "heads", "ffn"} <= set(numbers.assumed)


@pytest.mark.parametrize("given", [{"layers": 32}, {"hidden": 4096}])
def test_a_missing_size_follows_from_the_parameters(given: dict[str, int]) -> None:
    numbers = model_numbers(parameters=8e9, **given)
    assert numbers.counted == pytest.approx(8e9, rel=0.03)
    assert {"layers": numbers.layers, "hidden": numbers.hidden}.items() >= given.items()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "layers"),
        ({"layers": 4}, "hidden"),
        ({"layers": 0, "hidden": 64}, "layers"),
        ({"layers": 4, "hidden": -64}, "hidden"),
        ({"layers": 4, "hidden": 64.5}, "hidden"),
        ({"parameters": float("nan")}, "parameters"),
        ({"parameters": 8e9, "layers": 2, "hidden": 64}, "parameters"),
        ({"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 3}, "kv_heads"),
        ({"layers": 4, "hidden": 64, "experts": 4, "experts_per_token": 8}, "experts_per_token"),
        ({"layers": 4, "hidden": 64, "family": "mamba"}, "family"),
    ],
)
def test_sizes_that_cannot_be_are_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError) as caught:
        model_numbers(**given)
    assert caught.value.field == field
    assert caught.value.allowed
    assert caught.value.remedy
