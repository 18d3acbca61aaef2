"""A causal language model over dilated attention, and the factory with the usual sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distributed_kernels.attention.input_checks import IN_CONFIG, refuse_options
from distributed_kernels.attention.modules import DilatedTransformerBlock
from distributed_kernels.errors import KernelError

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "small": {
        "embed_dim": 768,
        "num_heads": 12,
        "num_layers": 12,
        "segment_lengths": (2048, 4096, 8192),
        "dilation_rates": (1, 2, 4),
        "vocab_size": 50_000,
        "max_seq_len": 16_384,
    },
    "medium": {
        "embed_dim": 1024,
        "num_heads": 16,
        "num_layers": 24,
        "segment_lengths": (2048, 4096, 8192, 16_384),
        "dilation_rates": (1, 2, 4, 8),
        "vocab_size": 50_000,
        "max_seq_len": 16_384,
    },
    "large": {
        "embed_dim": 2048,
        "num_heads": 32,
        "num_layers": 24,
        "segment_lengths": (2048, 4096, 8192, 16_384, 32_768),
        "dilation_rates": (1, 2, 4, 8, 16),
        "vocab_size": 50_000,
        "max_seq_len": 32_768,
    },
}
"""Presets of `create_distributed_model`: 140 million, 370 million and 1.4 billion parameters."""

_STD = 0.02
_IN_CONFIG = {
    **IN_CONFIG,
    **dict.fromkeys(
        ("sequence_parallel", "use_sequence_parallel"),
        "parallel: {context: N}, or group=... of the model in a loop of your own",
    ),
}
"""What configures a run, not a model: name -> fields of the run's configuration."""


class DilatedLanguageModel(nn.Module):
    """Predict the next token: (batch, length) int64 -> logits (batch, length, vocab_size).

    Learned positions, pre-norm blocks of causal dilated attention, and an output layer that shares the
    embedding's weight. Initialised as GPT-2 (Radford et al. 2019): normal, standard deviation 0.02,
    what ends in the residual stream divided by sqrt(2 x num_layers).

    Args:
        embed_dim: width of the residual stream; a multiple of `num_heads`.
        num_heads: number of attention heads.
        num_layers: number of blocks.
        segment_lengths: segment lengths of the dilated branches, in tokens.
        dilation_rates: one for each segment length.
        vocab_size: number of tokens that exist.
        max_seq_len: the longest sequence, in tokens, over all ranks of `group`.
        dropout: dropout rate after attention and in the feed-forward part.
        use_gradient_checkpointing: keep a block's input alone, and compute the block again in backward.
        group: ranks that share each sequence, rank r holding the r-th of equal slices; None keeps
            sequences whole.

    Raises:
        KernelError: a size is not positive, the attention's arguments do not fit together, or an argument
            configures a run; in `forward`, a sequence longer than `max_seq_len`.
    """

    _tp_plan: ClassVar[Mapping[str, str]] = {
        "tokens": "embedding_rowwise",
        "blocks.*.attention.qkv": "packed_colwise:3",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.mlp.0": "colwise",
        "blocks.*.mlp.2": "rowwise",
        "head": "colwise_loss_parallel",
    }
    """How tensor parallelism cuts the model, in the words of Hugging Face's models."""

    sequence_plan: ClassVar[Mapping[str, str]] = {
        "tokens": "embedding_rowwise_sequence",
        "positions": "embedding_sequence",
        "blocks.*.attention_norm": "sequence_parallel",
        "blocks.*.attention.qkv": "packed_colwise_sequence:3",
        "blocks.*.attention.out": "rowwise_sequence",
        "blocks.*.mlp_norm": "sequence_parallel",
        "blocks.*.mlp.0": "colwise_sequence",
        "blocks.*.mlp.2": "rowwise_sequence",
        "norm": "sequence_parallel",
        "head": "colwise_loss_parallel_sequence",
    }
    """The same with slices of the sequence between the layers, for sequences that the ranks divide."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_layers: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        vocab_size: int,
        max_seq_len: int,
        *,
        dropout: float = 0.0,
        use_gradient_checkpointing: bool = False,
        group: dist.ProcessGroup | None = None,
        **unknown: Any,
    ) -> None:
        refuse_options(type(self).__name__, unknown, _IN_CONFIG)
        super().__init__()
        _check_positive(num_layers=num_layers, vocab_size=vocab_size, max_seq_len=max_seq_len)
        self.max_seq_len = max_seq_len
        self.use_gradient_checkpointing = use_gradient_checkpointing
        self.tokens = nn.Embedding(vocab_size, embed_dim)
        self.positions = nn.Embedding(max_seq_len, embed_dim)
        self.blocks = nn.ModuleList(
            DilatedTransformerBlock(
                embed_dim,
                num_heads,
                segment_lengths,
                dilation_rates,
                dropout=dropout,
                causal=True,
                group=group,
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        self.reset_parameters()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share each sequence, as the blocks know them; None for whole sequences."""
        block = self.blocks[0]
        assert isinstance(block, DilatedTransformerBlock)
        return block.attention.group

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reinitialize every parameter from torch's global generator."""
        # The outputs of these layers are added to the residual stream.
        residual = {id(block.get_submodule(n)) for block in self.blocks for n in ("attention.out", "mlp.2")}
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear | nn.Embedding) and module is not self.head:
                scale = sqrt(2 * len(self.blocks)) if id(module) in residual else 1.0
                module.weight.normal_(std=_STD / scale)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) int64 -> (batch, length, vocab_size); this rank's slice under a `group`."""
        hidden = self.tokens(tokens) + self.positions(self._places(tokens))
        for block in self.blocks:
            if self.use_gradient_checkpointing and self.training:
                hidden = checkpoint(block, hidden, use_reentrant=False)
            else:
                hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def _places(self, tokens: Tensor) -> Tensor:
        """Positions in the whole sequence, (length,)."""
        length, group = tokens.shape[1], self.group
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if length * size > self.max_seq_len:
            raise KernelError(
                "tokens: the sequence is longer than the model's number of positions",
                got=f"{length * size} tokens",
                allowed=f"up to max_seq_len={self.max_seq_len}",
                remedy="Cut the sequences, or build the model with a larger max_seq_len",
            )
        return torch.arange(rank * length, (rank + 1) * length, device=tokens.device)


def create_distributed_model(preset: str | None = None, **parameters: Any) -> DilatedLanguageModel:
    """A `DilatedLanguageModel`, of one of the `PRESETS` or by its parameters.

    Backend, ZeRO stage and offloading are set by the run's config and not here: the model is the same
    under each. Pass ``functools.partial(create_distributed_model, "large")``
    as `Trainer(model=...)`, so that ranks build it themselves.

    Args:
        preset: "small", "medium" or "large".
        parameters: of `DilatedLanguageModel`; they are stronger than the preset's.

    Raises:
        KernelError: no such preset; a parameter is unknown or missing.
    """
    if preset is not None and preset not in PRESETS:
        raise KernelError(
            "preset: unknown preset",
            got=preset,
            allowed=", ".join(PRESETS),
            remedy="It builds a model of attention. Give TensorFlowDistributedTrainer the function that"
            " builds the Keras model, with or without the scope of a strategy"
            if hasattr(preset, "scope")
            else "Choose one of these",
        )
    chosen = {**(PRESETS[preset] if preset else {}), **parameters}
    needed = set(PRESETS["small"])
    options = {"dropout", "use_gradient_checkpointing", "group"}
    _check_names(set(chosen), needed, options)
    return DilatedLanguageModel(**chosen)


def _check_names(given: set[str], needed: set[str], options: set[str]) -> None:
    unknown = sorted(given - needed - options)
    if unknown:
        elsewhere = [f"{name} -> {_IN_CONFIG[name]}" for name in unknown if name in _IN_CONFIG]
        raise KernelError(
            "unknown parameter of the model",
            got=", ".join(unknown),
            allowed=", ".join(sorted(needed | options)),
            remedy=f"Set it in the run's config ({'; '.join(elsewhere)}). split_settings of"
            " distributed divides a dict of both"
            if elsewhere
            else "Leave it out",
        )
    missing = sorted(needed - given)
    if missing:
        raise KernelError(
            "missing parameters of the model",
            got=", ".join(sorted(given)) or "none",
            allowed=", ".join(sorted(needed)),
            remedy=f"Give {', '.join(missing)}, or name a preset: {', '.join(PRESETS)}",
        )


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise KernelError(
                f"{name}: must be positive", got=size, allowed="1 and more", remedy=f"Give another {name}"
            )
