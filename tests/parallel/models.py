"""Models that the tests of meshes train, and what plain PyTorch makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distributed.testing.oracle import sample_order

VOCABULARY, LENGTH, WIDTH = 32, 8, 16


@dataclass(frozen=True)
class Entry:
    """A model.

    Attributes:
        build: makes it, with the same weights every time, in float64.
        plan: ``parallel.tensor_plan``; empty leaves it to the model, or to pairs of layers.
        frozen: whether a part of it does not learn.
    """

    build: Callable[[], nn.Module]
    plan: dict[str, str] = field(default_factory=dict)


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def seeded() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build().double()

    return seeded


class Classifier(nn.Module):
    """Tokens -> logits of tokens by a plain nn.TransformerEncoder."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.tokens(tokens)))
        return logits


class Perceptron(nn.Module):
    """Tokens -> logits, each token by itself, by three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, VOCABULARY)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.layers(self.tokens(tokens))
        return logits


class Sketched(nn.Module):
    """Tokens -> logits by two layers of thin factors, half of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        from distributed_kernels import SKLinear

        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.up = SKLinear(WIDTH, 2 * WIDTH, 6, train_both=False)
        self.down = SKLinear(2 * WIDTH, VOCABULARY, 6, train_both=False, seed=1)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.down(self.up(self.tokens(tokens)).tanh())
        return logits


def dilated() -> nn.Module:
    from distributed_kernels import create_distributed_model

    return create_distributed_model(
        embed_dim=WIDTH,
        num_heads=4,
        num_layers=2,
        segment_lengths=(4, 8),
        dilation_rates=(1, 2),
        vocab_size=VOCABULARY,
        max_seq_len=LENGTH,
    )


def _llama(tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=tied,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return with_exact_norms(LlamaForCausalLM(config))


def with_exact_norms(model: nn.Module) -> nn.Module:
    """A Llama with norms in its own dtype: theirs compute in float32, whose rounding would hide what is
    looked for."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            model.set_submodule(name, nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon))
    return model


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    return BertForMaskedLM(config)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=WIDTH,
        n_head=4,
        n_layer=2,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


class BlockSparse(nn.Module):
    """Tokens -> logits by block-sparse attention, without positions."""

    def __init__(self) -> None:
        super().__init__()
        from distributed_kernels import BlockSparseRingDistributedDilatedAttention, DilatedTransformerBlock

        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        sparse: dict[str, Any] = {"block_size": 1, "sparsity_ratio": 0.6, "causal": True}
        kind = BlockSparseRingDistributedDilatedAttention
        self.block = DilatedTransformerBlock(WIDTH, 4, (4, 8), (1, 2), attention=kind, **sparse)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.block(self.tokens(tokens)))
        return logits


BERT_PLAN = {
    "bert.embeddings.word_embeddings": "embedding_rowwise",
    "bert.encoder.layer.*.attention.self.query": "colwise",
    "bert.encoder.layer.*.attention.self.key": "colwise",
    "bert.encoder.layer.*.attention.self.value": "colwise",
    "bert.encoder.layer.*.attention.output.dense": "rowwise",
    "bert.encoder.layer.*.intermediate.dense": "colwise",
    "bert.encoder.layer.*.output.dense": "rowwise",
    "cls.predictions.decoder": "colwise_gather_output",
}

ENTRIES: dict[str, Entry] = {
    "perceptron": Entry(seeded(Perceptron)),
    "encoder": Entry(seeded(Classifier)),
    "dilated": Entry(seeded(dilated)),
    "llama": Entry(seeded(lambda: _llama(tied=False))),
    "llama tied": Entry(seeded(lambda: _llama(tied=True))),
    "sketched": Entry(seeded(Sketched), {"up": "colwise", "down": "rowwise"}),
    "bert": Entry(seeded(_bert)),
    "bert with a plan": Entry(seeded(_bert), BERT_PLAN),
}


SEQUENCES: dict[str, Entry] = {
    **{name: ENTRIES[name] for name in ("perceptron", "dilated", "llama", "llama tied", "bert")},
    "gpt2": Entry(seeded(_gpt2)),
    "block-sparse": Entry(seeded(BlockSparse)),
}
"""Models whose sequences ranks can divide."""


def tokens(number: int, masked: float = 0.3) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of `number` sequences; a share of the targets is -100."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randint(0, VOCABULARY, (number, LENGTH), generator=generator)
    targets = torch.randint(0, VOCABULARY, (number, LENGTH), generator=generator)
    return inputs, targets.masked_fill(torch.rand(number, LENGTH, generator=generator) < masked, -100)


@dataclass
class Reference:
    """What plain PyTorch came to: weights by name, and the norm of each step before clipping."""

    weights: dict[str, Tensor]
    norms: list[float]


def train_plainly(
    model: nn.Module, data: tuple[Tensor, Tensor], *, global_batch_size: int, steps: int, max_norm: float
) -> Reference:
    """AdamW on the mean over the unmasked tokens of each global batch."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.01, eps=1e-4)
    (inputs, targets), norms, epoch = data, [], 0
    model.train()
    while len(norms) < steps:
        order = sample_order(len(inputs), 0, epoch)
        for batch in order.split(global_batch_size)[: steps - len(norms)]:
            optimizer.zero_grad()
            output: Any = model(inputs[batch])
            logits = getattr(output, "logits", output)
            cross_entropy(logits.flatten(0, 1), targets[batch].flatten()).backward()
            norms.append(float(nn.utils.clip_grad_norm_(trainable, max_norm)))
            optimizer.step()
        epoch += 1
    return Reference({name: p.detach().clone() for name, p in model.named_parameters()}, norms)
