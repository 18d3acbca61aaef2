"""Checks of the tensors of every attention in this package."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from distributed_kernels.errors import KernelError
from distributed_kernels.foreign_names import refuse_foreign

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


IN_CONFIG = {
    "use_deepspeed": "backend: deepspeed",
    "zero_stage": "zero_stage: 1, 2 or 3",
    "cpu_offload": "zero: {offload_optimizer: cpu} under deepspeed, fsdp: {cpu_offload: true} under fsdp,"
    " optimizer_offload: true under others",
    "model_parallel": "parallel: {tensor: N}",
    "use_model_parallel": "parallel: {tensor: N}",
    "sequence_parallel": "parallel: {context: N}",
    "use_sequence_parallel": "parallel: {context: N}",
    "use_gradient_checkpointing": "activation_checkpointing: full",
    "use_bf16": "mixed_precision: bf16",
    "use_fp16": "mixed_precision: fp16",
    "train_batch_size": "global_batch_size: N",
    "micro_batch_size": "batch_size: N",
    "gradient_accumulation_steps": "gradient_accumulation_steps: N",
}
"""What configures a run, not a layer: name -> fields of the run's configuration."""


def refuse_options(
    kind: str,
    unknown: Mapping[str, object],
    in_config: Mapping[str, str] = IN_CONFIG,
    own: Iterable[str] = (),
) -> None:
    """Raise unless `unknown` is empty.

    Args:
        kind: name of the class that got these arguments.
        unknown: arguments that the class does not have.
        in_config: what configures a run: name -> fields of the run's configuration.
        own: arguments of the class, which other libraries may call differently.

    Raises:
        KernelError: an argument that configures a run, or one of another library; names ours.
        TypeError: another one, as for every Python function.
    """
    refuse_foreign(f"{kind}.__init__", {n: v for n, v in unknown.items() if n not in in_config}, own)
    if unknown:
        fields = "; ".join(f"{name} -> {in_config[name]}" for name in unknown)
        raise KernelError(
            f"{', '.join(unknown)}: no argument of {kind}; how a model is trained is set in the run's"
            " configuration",
            got=", ".join(f"{name}={value}" for name, value in unknown.items()),
            remedy=f"Leave it out, and set in the configuration: {fields}. split_settings of"
            " distributed divides a dict of both",
        )


def scale_of(q: Tensor, scale: float | None) -> float:
    """`scale`, or one over the square root of the head's width."""
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


def check_attention(q: Tensor, k: Tensor, v: Tensor, *, same_length: bool = True) -> None:
    """Raise unless q, k, v are (batch, heads, length, head_dim) that attention can be computed of.

    Args:
        q, k, v: the tensors; the heads of k and v divide those of q.
        same_length: whether keys must be as many as queries.

    Raises:
        KernelError: shapes, dtypes or devices that do not agree, no float, or half precision on a device
            without it.
    """
    _check_shapes(q, k, v, same_length)
    for name, x in (("k", k), ("v", v)):
        if (x.dtype, x.device) != (q.dtype, q.device):
            raise KernelError(
                f"{name}: dtype or device differs from q's",
                got=f"{x.dtype} on {x.device}",
                allowed=f"{q.dtype} on {q.device}",
                remedy=f"Move it: {name}.to(q)",
            )
    _check_dtype(q)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, same_length: bool) -> None:
    if q.dim() != 4:
        raise KernelError(
            "q: needs four dimensions",
            got=tuple(q.shape),
            allowed="(batch, heads, length, head_dim)",
            remedy="Split the heads: x.unflatten(-1, (heads, -1)).transpose(1, 2)",
        )
    batch, heads, length, width = q.shape
    shared = k.shape[1] if k.dim() == 4 and k.shape[1] and heads % k.shape[1] == 0 else heads
    wanted = f"({batch}, {shared}, {length if same_length else 'keys'}, {width})"
    lengths = length if same_length or k.dim() != 4 else k.shape[2]
    for name, x in (("k", k), ("v", v)):
        if tuple(x.shape) != (batch, shared, lengths, width):
            raise KernelError(
                f"{name}: shape does not agree with q's {tuple(q.shape)}",
                got=tuple(x.shape),
                allowed=wanted,
                remedy="Heads of keys and values that several heads of queries share have to divide the heads"
                " of queries",
            )


def _check_dtype(q: Tensor) -> None:
    if q.dtype not in _FLOATS:
        raise KernelError(
            "q: not a floating-point dtype",
            got=q.dtype,
            allowed=", ".join(map(str, _FLOATS)),
            remedy="Convert q, k and v, for instance with .float()",
        )
    half_on_cpu = q.dtype == torch.float16 and q.device.type == "cpu"
    no_bfloat = (
        q.dtype == torch.bfloat16 and q.device.type == "cuda" and not torch.cuda.is_bf16_supported(False)
    )
    if half_on_cpu or no_bfloat:
        raise KernelError(
            f"q: {q.device.type} has no arithmetic in this precision",
            got=q.dtype,
            allowed="bfloat16 or float32" if half_on_cpu else "float16 or float32",
            remedy="Convert q, k and v; nothing is converted silently",
        )


def check_dropout(dropout_p: float) -> None:
    """Raise unless `dropout_p` is a probability below 1.

    Raises:
        KernelError: it is not.
    """
    if not 0.0 <= dropout_p < 1.0:
        raise KernelError(
            "dropout_p: not a probability with which an attention weight can be dropped",
            got=dropout_p,
            allowed="0 and more, below 1",
            remedy="Give 0.0 to drop nothing, as in evaluation",
        )


def check_segments(segment_lengths: Sequence[int], dilation_rates: Sequence[int]) -> None:
    """Raise unless there is one positive rate for each positive segment length.

    Raises:
        KernelError: names the list and the value that is wrong.
    """
    if not segment_lengths or len(segment_lengths) != len(dilation_rates):
        raise KernelError(
            "segment_lengths and dilation_rates: need one rate for each segment length",
            got=(list(segment_lengths), list(dilation_rates)),
            allowed="two lists of one length, at least 1",
            remedy="Each pair (length, rate) is a branch; give every branch both",
        )
    for name, values in (("segment_lengths", segment_lengths), ("dilation_rates", dilation_rates)):
        for place, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise KernelError(
                    f"{name}[{place}]: must be a positive whole number",
                    got=value,
                    allowed="1 and more",
                    remedy="LongNet takes powers of two, such as 2048, 4096, 8192 with rates 1, 2, 4",
                )
