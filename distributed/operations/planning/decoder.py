"""Facts about a model of which only numbers are known: a decoder as in Llama, without data."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from distributed.errors import UserError
from distributed.operations.planning.collect_facts import collect_facts
from distributed.planner.estimates.model_facts import ModelFacts

__all__ = ["Decoder", "facts_from_numbers", "next_token_loss"]


class Decoder(nn.Module):
    """Tokens to logits: attention with rotary positions and grouped keys, gated feed-forward, RMS norms.

    Source: Touvron et al., 2023 (arXiv:2302.13971); Ainslie et al., 2023 (arXiv:2305.13245).

    Args:
        layers: number of blocks.
        hidden: width.
        heads: of queries.
        kv_heads: of keys and values.
        ffn: width inside a feed-forward layer.
        vocabulary: number of tokens.
        sequence: tokens of a sample.
        tied: whether the embedding is the output layer, too.
    """

    angles: Tensor
    _tp_plan: ClassVar[dict[str, str]] = {
        **{f"layers.*.{name}": "colwise" for name in ("queries", "keys", "values", "gate", "up")},
        **{f"layers.*.{name}": "rowwise" for name in ("output", "down")},
        "head": "colwise_gather_output",
    }

    def __init__(
        self,
        layers: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        ffn: int,
        vocabulary: int,
        sequence: int,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(_Layer(hidden, heads, kv_heads, ffn) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("angles", torch.zeros(sequence, hidden // heads))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (samples x sequence, vocabulary)."""
        x = self.embedding(tokens)
        turns = self.angles.cos(), self.angles.sin()
        for layer in self.layers:
            x = layer(x, turns)
        logits: Tensor = self.head(self.norm(x)).flatten(0, 1)
        return logits


class _Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.width = hidden // heads
        self.queries = nn.Linear(hidden, hidden, bias=False)
        self.keys = nn.Linear(hidden, kv_heads * self.width, bias=False)
        self.values = nn.Linear(hidden, kv_heads * self.width, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self._attend(self.norms[0](x), turns)
        y = self.norms[1](x)
        found: Tensor = x + self.down(silu(self.gate(y)) * self.up(y))
        return found

    def _attend(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        queries, keys, values = (
            layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        mixed = scaled_dot_product_attention(
            _turned(queries, *turns), _turned(keys, *turns), values, is_causal=True, enable_gqa=True
        )
        found: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return found


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of heads (samples, heads, sequence, width)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def facts_from_numbers(
    *,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    vocabulary: int,
    sequence: int,
    kv_heads: int | None = None,
    tied: bool = False,
    precision: str = "fp32",
    optimizer: str = "adamw",
    momentum: float = 0.0,
    device: str = "cpu",
) -> ModelFacts:
    """Facts about training a `Decoder` of these numbers with a cross-entropy over all tokens.

    Args:
        layers, hidden, heads, ffn, vocabulary, sequence, tied: as of `Decoder`.
        kv_heads: of keys and values; None for as many as of queries.
        precision: ``fp32``, ``bf16`` or ``fp16``: autocast as in training.
        optimizer: name of the optimizer that the configuration builds.
        momentum: of SGD.
        device: of the rank.

    Raises:
        UserError: a number is not positive, or no multiple of another.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    numbers = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "vocabulary": vocabulary,
        "sequence": sequence,
    }
    for name, number in numbers.items():
        if number < 1:
            raise UserError(
                "a number of the model is not positive",
                field=name,
                got=number,
                allowed="1 or more",
                remedy="Give the number as the model's configuration has it",
            )
    for name, part in (("hidden", "heads"), ("heads", "kv_heads")):
        if numbers[name] % numbers[part]:
            raise UserError(
                "a number of the model is no multiple of another",
                field=name,
                got=numbers[name],
                allowed=f"a multiple of {part}={numbers[part]}",
                remedy="Give the numbers as the model's configuration has them",
            )
    with torch.device("meta"):
        model = Decoder(**numbers, tied=tied)
        tokens = torch.zeros(1, sequence, dtype=torch.long)
        targets = torch.zeros(1, sequence, dtype=torch.long)
    return collect_facts(
        model,
        (tokens, targets),
        training_step=next_token_loss,
        precision=precision,
        optimizer=optimizer,
        optimizer_settings={"momentum": momentum} if momentum else {},
        device=device,
    )


def next_token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of the targets, as a `training_step`."""
    tokens, targets = batch
    return nn.functional.cross_entropy(model(tokens), targets.flatten())
