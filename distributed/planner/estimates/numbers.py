"""ModelNumbers: a transformer given by its sizes alone, with the counts that predictions need.

Sources: Kaplan et al., 2020 (arXiv:2001.08361), and Chowdhery et al., 2022 (arXiv:2204.02311, appendix B),
for floating-point operations per token; Korthikanti et al., 2022 (arXiv:2205.05198), for activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from distributed.errors import UserError
from distributed.interfaces.parallel_dims import ParallelDims

__all__ = ["FAMILIES", "ModelNumbers", "model_numbers"]

FAMILIES = ("llama", "gpt")
"""Forms of a block. ``llama``: gated feed-forward, RMSNorm, rotary positions, no biases, an output layer of
its own. ``gpt``: two-layer feed-forward, LayerNorm, learned positions, biases, dropout, the output layer
shared with the embedding."""

_ASPECT = 128
"""hidden / layers that is assumed when neither is given; 8B to 405B of Llama 3 have 102 to 130."""
_HEAD = 128
_VOCABULARY = 32_000
_BYTES = 256
_SMALL = 50_000_000
_AGREE = 0.05
"""Relative difference up to which a stated number of parameters agrees with the sizes."""


@dataclass(frozen=True)
class ModelNumbers:
    """Sizes of a transformer decoder and of its training batch. `model_numbers` completes partial sizes.

    Attributes:
        layers: number of blocks.
        hidden: width of the residual stream.
        heads: attention heads.
        kv_heads: heads of keys and values.
        ffn: width of a feed-forward layer, of one expert in a mixture.
        vocabulary: number of tokens.
        sequence: tokens of a sample.
        global_batch: samples of an optimizer step.
        head_size: width of a head.
        experts: experts of each block; 1 without a mixture.
        experts_per_token: experts that compute a token.
        family: of `FAMILIES`.
        tied: whether the output layer shares the embedding's weights.
        fused_attention: whether attention stores no matrix of ``sequence x sequence``.
        stated: number of parameters that was given beside the sizes; None without.
        assumed: names of the sizes that were not given.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    sequence: int
    global_batch: int
    head_size: int
    experts: int = 1
    experts_per_token: int = 1
    family: str = "llama"
    tied: bool = False
    fused_attention: bool = True
    stated: float | None = None
    assumed: tuple[str, ...] = ()

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer has a gate."""
        return self.family == "llama"

    @cached_property
    def attention_weights(self) -> int:
        """Elements of the four matrices of attention in a block."""
        query, key = self.heads * self.head_size, self.kv_heads * self.head_size
        return 2 * self.hidden * (query + key)

    @cached_property
    def expert_weights(self) -> int:
        """Elements of the matrices of one expert in a block."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @cached_property
    def shared_parameters(self) -> int:
        """Parameters of a block without its experts."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        if self.family == "llama":
            return self.attention_weights + router + 2 * self.hidden
        biases = (self.heads + 2 * self.kv_heads) * self.head_size + self.hidden
        return self.attention_weights + router + biases + 4 * self.hidden

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of all experts of a block: of its feed-forward layer without a mixture."""
        biases = self.ffn + self.hidden if self.family == "gpt" else 0
        return self.experts * (self.expert_weights + biases)

    @cached_property
    def embedding_parameters(self) -> int:
        """Parameters before the first block."""
        positions = self.sequence if self.family == "gpt" else 0
        return (self.vocabulary + positions) * self.hidden

    @cached_property
    def output_parameters(self) -> int:
        """Parameters behind the last block."""
        norm = (2 if self.family == "gpt" else 1) * self.hidden
        return norm + (0 if self.tied else self.vocabulary * self.hidden)

    @cached_property
    def counted(self) -> int:
        """Number of parameters by the sizes."""
        block = self.shared_parameters + self.expert_parameters
        return self.layers * block + self.embedding_parameters + self.output_parameters

    @property
    def parameters(self) -> float:
        """Number of parameters: as stated, else by the sizes."""
        return self.counted if self.stated is None else self.stated

    @cached_property
    def block_flops(self) -> int:
        """Floating-point operations of the matrices of a block per token, forward."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        return 2 * (self.attention_weights + self.experts_per_token * self.expert_weights + router)

    @cached_property
    def attention_flops(self) -> int:
        """Floating-point operations of a block's attention per token, forward, without a causal saving."""
        return 4 * self.sequence * self.heads * self.head_size

    @cached_property
    def output_flops(self) -> int:
        """Floating-point operations of the output layer per token, forward."""
        return 2 * self.vocabulary * self.hidden

    @cached_property
    def forward_flops(self) -> int:
        """Floating-point operations per token, forward."""
        return self.layers * (self.block_flops + self.attention_flops) + self.output_flops

    @property
    def step_flops(self) -> float:
        """Floating-point operations of an optimizer step without recomputation, which MFU counts."""
        return 3.0 * self.forward_flops * self.sequence * self.global_batch

    def with_batch(self, global_batch: int) -> ModelNumbers:
        """The same model with another batch."""
        return replace(self, global_batch=global_batch)

    def indivisible(self, dims: ParallelDims) -> str | None:
        """Why ranks cannot divide the model so; None if they can."""
        pairs = (
            ("tensor", "heads", self.heads),
            ("tensor", "kv_heads", self.kv_heads),
            ("tensor", "ffn", self.ffn),
            ("tensor", "vocabulary", self.vocabulary),
            ("context", "sequence", self.sequence),
        )
        for axis, name, size in pairs:
            if size % dims.size(axis):
                return f"{axis} ranks do not divide {name}={size}"
        # Ring attention gives each rank two chunks of a sequence; Ulysses divides heads instead.
        if self.sequence % (2 * dims.context) and self.heads // dims.tensor % dims.context:
            return f"context ranks do not divide sequence={self.sequence} into two chunks each, nor the heads"
        return None

    def activation_bytes(self, tensor: int = 1, sequence_parallel: bool = False, itemsize: int = 2) -> float:
        """Bytes that a block stores for backward per token of one rank.

        With ``family="gpt"``, ``ffn = 4 hidden`` and 16-bit values, this is
        ``hidden (34 + 5 heads sequence / hidden)``: equation 1
        of Korthikanti et al.; equation 2 with `tensor` ranks, 4 with `sequence_parallel`.

        Args:
            tensor: ranks that share each layer.
            sequence_parallel: whether what lies between the layers is cut along the sequence as well.
            itemsize: bytes of one stored value; masks of dropout take one byte each.
        """
        h, width = self.hidden, self.heads * self.head_size
        mask = 1 if self.family == "gpt" else 0
        # Inputs of two norms, of attention and of the feed-forward layer, and masks of dropout behind both.
        between = 4 * h * itemsize + 2 * h * mask
        keys = 2 * self.kv_heads * self.head_size
        hidden_layers = (4 if self.gated else 2) * self.ffn * self.experts_per_token
        inside = (2 * width + keys + hidden_layers) * itemsize
        if not self.fused_attention:
            inside += self.heads * self.sequence * (2 * itemsize + mask)
        return between / (tensor if sequence_parallel else 1) + inside / tensor

    def checkpoint_bytes(self, itemsize: int = 2) -> float:
        """Bytes that a block with activation checkpointing stores per token: its input."""
        return float(self.hidden * itemsize)


def model_numbers(
    *,
    parameters: float | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    ffn: int | None = None,
    vocabulary: int | None = None,
    sequence: int = 2048,
    global_batch: int = 1,
    head_size: int | None = None,
    experts: int = 1,
    experts_per_token: int | None = None,
    family: str = "llama",
    tied: bool | None = None,
    fused_attention: bool = True,
) -> ModelNumbers:
    """Complete partial sizes: by `parameters` alone, by `layers` and `hidden`, or by any of these with more.

    Args:
        parameters: number of parameters; counted from the sizes if it is not given.
        layers: number of blocks; see `ModelNumbers` for this and the other sizes.

    Raises:
        UserError: sizes are missing, not positive, do not divide each other, or contradict `parameters`.
    """
    given = {
        "parameters": parameters, "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads,
        "ffn": ffn, "vocabulary": vocabulary, "sequence": sequence, "global_batch": global_batch,
        "head_size": head_size, "experts": experts, "experts_per_token": experts_per_token,
    }  # fmt: skip
    _check_positive(given)
    if family not in FAMILIES:
        raise UserError(
            "unknown form of a transformer",
            field="family",
            got=family,
            allowed=", ".join(FAMILIES),
            remedy="Choose the nearest, or plan from the model object",
        )
    names = ["layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary"]
    names += ["head_size"] if heads is None else []  # that of given heads follows from the width
    names += ["experts_per_token"] if experts > 1 else []
    assumed = tuple(name for name in names if given[name] is None)
    if vocabulary is None:
        vocabulary = _BYTES if parameters is not None and parameters < _SMALL else _VOCABULARY
    top = experts_per_token if experts_per_token is not None else min(2, experts)

    def shaped(depth: int, width: int) -> ModelNumbers:
        return _shaped(
            ModelNumbers(
                layers=depth, hidden=width, heads=heads or 0, kv_heads=kv_heads or 0, ffn=ffn or 0,
                vocabulary=vocabulary, sequence=sequence, global_batch=global_batch, head_size=head_size or 0,
                experts=experts, experts_per_token=top, family=family,
                tied=family == "gpt" if tied is None else tied, fused_attention=fused_attention,
            )
        )  # fmt: skip

    depth, width = layers, hidden
    if depth is None or width is None:
        if parameters is None:
            raise UserError(
                "the size of the model is not known",
                field="layers" if layers is None else "hidden",
                allowed="parameters, or layers and hidden",
                remedy="Give the number of parameters, or the missing size",
            )
        depth, width = _fitted(parameters, layers, hidden, heads, shaped)
    numbers = shaped(depth, width)
    _check_shape(numbers)
    if parameters is None:
        return replace(numbers, assumed=assumed)
    if layers is not None and hidden is not None and abs(numbers.counted / parameters - 1) > _AGREE:
        raise UserError(
            f"the sizes make {numbers.counted:,} parameters",
            field="parameters",
            got=parameters,
            allowed=f"{numbers.counted:,}, within {_AGREE:.0%}",
            remedy="Leave it out, or give the other sizes too (ffn, kv_heads, experts, vocabulary, family)",
        )
    return replace(numbers, stated=float(parameters), assumed=assumed)


def _check_positive(given: dict[str, float | None]) -> None:
    for name, value in given.items():
        whole = name == "parameters" or isinstance(value, int)
        if value is not None and (isinstance(value, bool) or not whole or not 0 < value < float("inf")):
            raise UserError(
                "a size of the model has to be a positive number",
                field=name,
                got=value,
                allowed="a number above 0" if name == "parameters" else "a whole number above 0",
                remedy="Correct it",
            )


def _shaped(sizes: ModelNumbers) -> ModelNumbers:
    """`sizes` with what is 0 derived from layers and hidden."""
    head = sizes.head_size or (sizes.hidden // sizes.heads if sizes.heads else min(_HEAD, sizes.hidden))
    heads = sizes.heads or max(1, sizes.hidden // head)
    # SwiGLU with as many parameters as a layer of width 4 hidden: Shazeer, 2020 (arXiv:2002.05202).
    wide = 4 * sizes.hidden if sizes.family == "gpt" else -(-8 * sizes.hidden // 3 // 64) * 64
    return replace(
        sizes, head_size=max(1, head), heads=heads, kv_heads=sizes.kv_heads or heads, ffn=sizes.ffn or wide
    )


def _fitted(
    parameters: float,
    layers: int | None,
    hidden: int | None,
    heads: int | None,
    shaped: Callable[[int, int], ModelNumbers],
) -> tuple[int, int]:
    """Layers and hidden of a model of about `parameters`, where one of the two may be given."""
    if hidden is not None:
        base = shaped(1, hidden)
        block = base.shared_parameters + base.expert_parameters
        rest = parameters - base.embedding_parameters - base.output_parameters
        return max(1, round(rest / block)), hidden
    unit = heads or 64
    low, high = 1, 2
    while shaped(layers or _depth(high * unit), high * unit).counted < parameters:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        smaller = shaped(layers or _depth(middle * unit), middle * unit).counted < parameters
        low, high = (middle, high) if smaller else (low, middle)
    width = unit * min(
        (low, high), key=lambda n: abs(shaped(layers or _depth(n * unit), n * unit).counted - parameters)
    )
    return layers or _depth(width), width


def _depth(width: int) -> int:
    return max(1, round(width / _ASPECT))


def _check_shape(numbers: ModelNumbers) -> None:
    heads, experts = numbers.heads, numbers.experts
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    for field, got, fits in (
        ("kv_heads", numbers.kv_heads, divisors),
        ("experts_per_token", numbers.experts_per_token, list(range(1, experts + 1))),
    ):
        if got not in fits:
            raise UserError(
                f"it does not agree with heads={heads} and experts={experts}",
                field=field,
                got=got,
                allowed=", ".join(map(str, fits)),
                remedy="Choose one of these",
            )
