"""Models of transformers with a few million parameters, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MODELS", "Pairs", "Samples", "as_pair"]

_VOCABULARY, _LENGTH = 2048, 128


class Samples(torch.utils.data.Dataset[dict[str, Any]]):
    """The rows of a batch."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return len(next(iter(self._batch.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self._batch.items()}


class Pairs(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """The rows of a batch of tokens and labels, as (tokens, targets)."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self._tokens, self._targets = as_pair(batch)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._tokens[index], self._targets[index]


def as_pair(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(tokens, targets) of a batch of a language model."""
    return batch.get("input_ids", batch["labels"]), batch["labels"]


def _tokens(number: int) -> Tensor:
    return torch.randint(0, _VOCABULARY, (number, _LENGTH))


def _classes(number: int) -> Tensor:
    return torch.randint(0, 2, (number,))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
        )
    )


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=_VOCABULARY, n_positions=256, n_embd=256, n_layer=4, n_head=4)
    )


def _qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=_VOCABULARY,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
        )
    )


def _mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(
        MistralConfig(
            vocab_size=_VOCABULARY,
            hidden_size=192,
            intermediate_size=640,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=6,
            max_position_embeddings=256,
            sliding_window=None,
        )
    )


def _phi() -> nn.Module:
    from transformers import PhiConfig, PhiForCausalLM

    return PhiForCausalLM(
        PhiConfig(
            vocab_size=_VOCABULARY,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=256,
        )
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=_VOCABULARY,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=256,
        )
    )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=64,
            patch_size=8,
        )
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]] = {
    "llama": (_llama, lambda n: {"input_ids": _tokens(n), "labels": _tokens(n)}),
    "gpt2": (_gpt2, lambda n: {"input_ids": _tokens(n), "labels": _tokens(n)}),
    "qwen2": (_qwen2, lambda n: {"input_ids": _tokens(n), "labels": _tokens(n)}),
    "mistral": (_mistral, lambda n: {"input_ids": _tokens(n), "labels": _tokens(n)}),
    "phi": (_phi, lambda n: {"input_ids": _tokens(n), "labels": _tokens(n)}),
    "bert": (_bert, lambda n: {"input_ids": _tokens(n), "labels": _classes(n)}),
    "vit": (_vit, lambda n: {"pixel_values": torch.randn(n, 3, 64, 64), "labels": _classes(n)}),
}
"""Name -> (builds the model, makes a batch of so many samples)."""
