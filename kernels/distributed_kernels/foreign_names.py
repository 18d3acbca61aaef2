"""Arguments that other libraries have, answered by one sentence with ours.

The names are those of flash-attn, ring-flash-attn, torchscale, xformers, DeepSpeed, Panther and torch itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

from distributed_kernels.errors import KernelError

P = ParamSpec("P")
R = TypeVar("R")

OURS = {
    **dict.fromkeys(("query", "query_states"), "q"),
    **dict.fromkeys(("key", "key_states"), "k"),
    **dict.fromkeys(("value", "value_states"), "v"),
    **dict.fromkeys(("softmax_scale", "scaling", "sm_scale"), "scale"),
    **dict.fromkeys(("is_causal", "causal_mask"), "causal"),
    **dict.fromkeys(("p", "dropout", "attention_dropout", "attn_dropout"), "dropout_p"),
    **dict.fromkeys(
        ("process_group", "sequence_process_group", "sp_group", "cp_group", "ring_pg", "ulysses_pg"), "group"
    ),
    **dict.fromkeys(("segment_length", "segment_size", "segment_sizes"), "segment_lengths"),
    **dict.fromkeys(
        ("dilated_ratio", "dilated_ratios", "dilation_ratio", "dilation_rate", "dilation"), "dilation_rates"
    ),
    **dict.fromkeys(("local_attention", "local_attn", "attn_fn"), "attention"),
    **dict.fromkeys(("sparsity", "density"), "sparsity_ratio"),
    **dict.fromkeys(("block", "BLOCK_SIZE"), "block_size"),
    **dict.fromkeys(("layout_mask", "sparsity_layout"), "mask"),
    **dict.fromkeys(("d_model", "hidden_size", "dim"), "embed_dim"),
    **dict.fromkeys(("nhead", "n_heads", "num_attention_heads"), "num_heads"),
    **dict.fromkeys(("stride_size",), "stride"),
    **dict.fromkeys(("r", "low_rank_dim", "lora_rank"), "rank"),
}
"""Name elsewhere -> our argument of the same meaning, where the function has it."""

_DOCUMENTS = "pattern_attention(q, k, v, documents(cu_seqlens.diff())) keeps documents in one row apart"
_LEAVE = "Leave it out"
INSTEAD = {
    "window_size": "pattern_attention(q, k, v, sliding_window(length, before, after)) computes a window",
    "sliding_window": "pattern_attention(q, k, v, sliding_window(length, before, after)) computes a window",
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), _DOCUMENTS),
    **dict.fromkeys(
        ("max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_length_q", "max_length_k"),
        f"{_LEAVE}: documents() needs the lengths alone",
    ),
    **dict.fromkeys(
        ("attn_bias", "attn_mask", "attention_mask"),
        "A boolean mask of pairs is attention_with_lse(block_mask=), one of blocks"
        " block_sparse_attention(mask=); a bias added to the scores is not computed",
    ),
    "key_padding_mask": "ring_attention and ulysses_attention take key_mask, True where a key may be seen",
    **dict.fromkeys(
        ("alibi_slopes", "softcap", "score_mod", "rel_pos"),
        "Scores are q k^T times the scale alone; torch's flex_attention computes others",
    ),
    "deterministic": "Call torch.use_deterministic_algorithms(True)",
    **dict.fromkeys(
        ("return_attn_probs", "return_softmax", "return_lse", "return_softmax_lse", "need_weights"),
        "attention_with_lse also returns the softmax's denominator; weights are never formed",
    ),
    "enable_gqa": f"{_LEAVE}: k and v may have fewer heads than q",
    **dict.fromkeys(
        ("scatter_idx", "gather_idx"), f"{_LEAVE}: heads are dimension 1 and positions dimension 2"
    ),
    **dict.fromkeys(("heads_k_stride", "local_k_slice"), f"{_LEAVE}: slices are equal and in one layout"),
    "op": "use_blocks(name) selects the implementation",
    "layer_norm": f"{_LEAVE}: normalise outside of the attention",
    "num_terms": "Its L terms of rank k are one layer: give rank",
    "low_rank": "Its L terms of rank k are one layer: give rank",
    "W_init": "factorize_linear(linear, rank) and factorize_conv start from weights",
    "padding_mode": "Zeros are padded; other modes are not computed",
}
"""Name elsewhere -> what to do instead of passing it."""

_FLASH_LAYOUT = frozenset(
    name for name in ("softmax_scale", "window_size", "cu_seqlens", "attn_bias", "p", "alibi_slopes")
)
"""Names of libraries whose tensors are (batch, length, heads, head_dim)."""


def advice(name: str, own: Iterable[str]) -> str:
    """One sentence for an argument `name` that a function with the arguments `own` lacks; or nothing."""
    ours = OURS.get(name)
    if ours is not None and ours in own:
        return f"{name} is {ours} here"
    return INSTEAD.get(name, "")


def refuse_foreign(function: str, unknown: Mapping[str, object], own: Iterable[str]) -> None:
    """Raise for arguments of other libraries among `unknown`.

    Raises:
        KernelError: an argument that `advice` knows; names ours.
        TypeError: another one, as for every Python function.
    """
    found = {name: advice(name, own) for name in unknown}
    for name, sentence in found.items():
        if not sentence:
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}'")
    if not found:
        return
    remedy = list(found.values())
    if not _FLASH_LAYOUT.isdisjoint(found):
        remedy.append("Tensors are (batch, heads, length, head_dim): x.transpose(1, 2) of flash-attn's")
    raise KernelError(
        f"{', '.join(found)}: no argument of {function}",
        got=", ".join(f"{name}={_short(unknown[name])}" for name in found),
        remedy="; ".join(dict.fromkeys(remedy)),
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 and "\n" not in text else type(value).__name__


def answers_foreign_names(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that arguments of other libraries raise a `KernelError` that names its own."""
    own = frozenset(inspect.signature(function).parameters)

    @wraps(function)
    def answered(*args: P.args, **kwargs: P.kwargs) -> R:
        if not own.issuperset(kwargs):
            refuse_foreign(function.__name__, {name: kwargs[name] for name in kwargs if name not in own}, own)
        return function(*args, **kwargs)

    return answered
