"""Layers whose parameters are cut over the ranks of the tensor axis.

A word says how a module is cut; the words are those of Hugging Face's ``_tp_plan``, and a suffix
``_sequence`` for models that hold slices of the sequence between their layers. Parameters become DTensors,
and `forward` computes with this rank's part of them, so that a gradient has its parameter's layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from distributed.errors import UserError
from distributed.parallel.collectives import (
    from_partial,
    from_parts,
    part_of,
    parts_from_partial,
    to_parts,
    use_in_parts,
)
from distributed.parallel.original_model import OriginalModel

__all__ = ["DIVIDED", "WORDS", "Cut", "TensorAxis", "apply_word", "check_word"]

_SEQUENCE_DIM = -2
"""Of activations (batch, length, width)."""
_WHOLE_INPUT = ("colwise", "packed_colwise", "colwise_gather_output", "colwise_loss_parallel")
"""Words of layers whose input is whole on every rank."""

Forward = Callable[..., Tensor]


@dataclass
class TensorAxis:
    """The ranks that cut layers between them.

    Attributes:
        mesh: torch's mesh of these ranks.
        joins_vocabulary: whether the loss takes logits of which each rank has a part; otherwise a layer that
            is cut ``colwise_loss_parallel`` puts them together.
        partial: names of parameters that are not cut and whose gradients are sums over the ranks.
        check: called with (name of a module, its whole input) before it is used; None does not.
    """

    mesh: DeviceMesh
    joins_vocabulary: bool = False
    partial: set[str] = field(default_factory=set)
    check: Callable[[str, Tensor], None] | None = None

    @property
    def group(self) -> Any:
        """Process group of these ranks."""
        return self.mesh.get_group()

    @property
    def size(self) -> int:
        """Number of these ranks."""
        return self.mesh.size()

    @property
    def index(self) -> int:
        """Index of this rank among them."""
        return self.mesh.get_local_rank()


@dataclass(frozen=True)
class Cut:
    """How one module is cut.

    Attributes:
        name: of the module.
        module: it.
        word: from `WORDS`.
        parts: number of equal parts that a fused projection consists of.
        sequence: whether activations between layers are slices of the sequence.
    """

    name: str
    module: nn.Module
    word: str
    parts: int = 1
    sequence: bool = False


def apply_word(cut: Cut, axis: TensorAxis, original: OriginalModel) -> None:
    """Cut the parameters of one module, and compute its forward with them.

    Args:
        original: the model before, which is given what has to be undone.
    """
    own = getattr(cut.module, "tensor_parallel_style", None)
    if own is not None:  # a layer with a way of its own, as a torch ParallelStyle
        word = cut.word + "_sequence" * cut.sequence + (f":{cut.parts}" if cut.parts > 1 else "")
        try:
            with original.watched(cut.module):
                if cut.word in _WHOLE_INPUT and not cut.sequence:
                    cut.module.register_forward_pre_hook(partial(_check_whole, cut.name, axis))
                own(word)._apply(cut.module, axis.mesh)
        except ValueError as error:
            raise UserError(
                f"the layer '{cut.name}' cannot be cut: {error}",
                field="parallel.tensor_plan",
                remedy="Or leave it out of the plan",
            ) from error
        return
    WORDS[cut.word](cut, axis)


def _check_whole(name: str, axis: TensorAxis, module: nn.Module, args: tuple[Any, ...]) -> None:
    if axis.check is not None:
        axis.check(name, args[0])


def _cut_linear_rows(cut: Cut, axis: TensorAxis, forward: Forward) -> None:
    """Rows of a weight are outputs: each rank computes some of them."""
    layer: Any = cut.module
    for name in ("weight", "bias"):
        _replace(layer, name, axis, 0, cut.parts)
    _set_forward(layer, partial(forward, layer, cut, axis))


def _colwise(cut: Cut, axis: TensorAxis) -> None:
    _cut_linear_rows(cut, axis, _columns)


def _colwise_gather_output(cut: Cut, axis: TensorAxis) -> None:
    _cut_linear_rows(cut, axis, _gathered_columns)


def _colwise_loss_parallel(cut: Cut, axis: TensorAxis) -> None:
    _cut_linear_rows(cut, axis, _vocabulary)


def _rowwise(cut: Cut, axis: TensorAxis) -> None:
    """Columns of a weight are inputs: each rank multiplies some of them, and the results are added."""
    layer: Any = cut.module
    _replace(layer, "weight", axis, 1)
    if cut.sequence and layer.bias is not None:
        axis.partial.add(f"{cut.name}.bias")
    _set_forward(layer, partial(_rows, layer, cut, axis))


def _embedding_rowwise(cut: Cut, axis: TensorAxis) -> None:
    layer: Any = cut.module
    _replace(layer, "weight", axis, 0)
    _set_forward(layer, partial(_looked_up, layer, cut, axis))


def _embedding_of_slices(cut: Cut, axis: TensorAxis) -> None:
    """The embedding stays whole; of what it returns each rank keeps a slice of the sequence."""
    layer: Any = cut.module
    whole = layer.forward

    def forward(indices: Tensor) -> Tensor:
        return _slice(whole(indices), cut, axis)

    _set_forward(layer, forward)


def _sequence_parallel(cut: Cut, axis: TensorAxis) -> None:
    """Each rank computes with a slice of the sequence, hence a part of each gradient."""
    axis.partial |= {f"{cut.name}.{name}".lstrip(".") for name, _ in cut.module.named_parameters()}


def _input(x: Tensor, cut: Cut, axis: TensorAxis) -> Tensor:
    """The whole input of a layer of which each rank computes a part."""
    if cut.sequence:
        return to_parts(x, axis.group, x.dim() + _SEQUENCE_DIM)
    if axis.check is not None:
        axis.check(cut.name, x)
    return use_in_parts(x, axis.group)


def _columns(layer: nn.Linear, cut: Cut, axis: TensorAxis, x: Tensor) -> Tensor:
    return F.linear(_input(x, cut, axis), _local(layer.weight), _local(layer.bias))


def _gathered_columns(layer: nn.Linear, cut: Cut, axis: TensorAxis, x: Tensor) -> Tensor:
    out = _columns(layer, cut, axis, x)
    if cut.parts == 1:
        return from_parts(out, axis.group, out.dim() - 1)
    grouped = from_parts(out.unflatten(-1, (cut.parts, -1)), axis.group, out.dim())
    return grouped.flatten(-2)


def _vocabulary(layer: nn.Linear, cut: Cut, axis: TensorAxis, x: Tensor) -> Tensor:
    out = _columns(layer, cut, axis, x)
    if axis.joins_vocabulary and torch.is_grad_enabled():
        return DTensor.from_local(out, axis.mesh, [Shard(out.dim() - 1)], run_check=False)
    return from_parts(out, axis.group, out.dim() - 1)


def _rows(layer: nn.Linear, cut: Cut, axis: TensorAxis, x: Tensor) -> Tensor:
    if cut.word == "rowwise_split_input":
        x = part_of(x, axis.group, x.dim() - 1)
    out = F.linear(x, _local(layer.weight))
    if cut.sequence:
        out = parts_from_partial(out, axis.group, out.dim() + _SEQUENCE_DIM)
    else:
        out = from_partial(out, axis.group)
    return out if layer.bias is None else out + layer.bias.to(out.dtype)


def _looked_up(layer: nn.Embedding, cut: Cut, axis: TensorAxis, indices: Tensor) -> Tensor:
    weight = _local(layer.weight)
    first = len(weight) * axis.index
    own = indices - first
    elsewhere = (own < 0) | (own >= len(weight))
    _check_indices(indices, layer)
    padding = None if layer.padding_idx is None else layer.padding_idx - first
    here = padding if padding is not None and 0 <= padding < len(weight) else None
    out = F.embedding(own.masked_fill(elsewhere, 0), weight, here, norm_type=layer.norm_type)
    out = out.masked_fill(elsewhere.unsqueeze(-1), 0)
    if cut.sequence:
        dim = out.dim() + _SEQUENCE_DIM
        _check_length(out.shape[dim], cut, axis)
        return parts_from_partial(out, axis.group, dim)
    return from_partial(out, axis.group)


def _check_indices(indices: Tensor, layer: nn.Embedding) -> None:
    # On a GPU torch's own check is an assertion in the kernel; a mask would hide the index instead.
    if indices.is_cpu and indices.numel():
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= layer.num_embeddings:
            raise IndexError(
                f"index out of range in self: {low if low < 0 else high} of {layer.num_embeddings}"
            )


def _slice(x: Tensor, cut: Cut, axis: TensorAxis) -> Tensor:
    dim = x.dim() + _SEQUENCE_DIM
    _check_length(x.shape[dim], cut, axis)
    return part_of(x, axis.group, dim)


def _check_length(length: int, cut: Cut, axis: TensorAxis) -> None:
    if length % axis.size:
        low = length - length % axis.size
        raise UserError(
            f"'{cut.name}' gives each rank a slice of the sequence, and {length} tokens cannot be cut into"
            f" {axis.size} equal slices",
            field="parallel.tensor",
            got=axis.size,
            allowed=f"sequences of a multiple of {axis.size} tokens, such as {low or axis.size}",
            remedy="Pad the sequences with masked tokens, or use a tensor_plan without _sequence",
        )


def _local(parameter: Any) -> Any:
    """This rank's part, whose gradient gets the parameter's layout."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def check_word(cut: Cut, size: int) -> None:
    """Check that a module can be cut by its word over `size` ranks.

    Raises:
        UserError: it is another kind of module, or the ranks do not divide it.
    """
    if cut.word not in DIVIDED or hasattr(cut.module, "tensor_parallel_style"):
        return
    kind, what = DIVIDED[cut.word]
    module: Any = cut.module
    plain = isinstance(module, kind) and type(module).forward is kind.forward
    if not plain or "weight" not in module._parameters:
        raise UserError(
            f"'{cut.name}' cannot be cut {cut.word}: it is not a plain {kind.__name__}",
            field="parallel.tensor_plan",
            got=type(module).__name__,
            allowed=f"torch.nn.{kind.__name__}",
            remedy="Leave it out of the plan, or cut the module inside it",
        )
    total = int(getattr(module, what)) if what else 0
    width = total // cut.parts
    if total % cut.parts or width % size:
        parts = f" in each of its {cut.parts} parts" if cut.parts > 1 else ""
        raise UserError(
            f"'{cut.name}' has {what}={total}, which {size} ranks cannot divide{parts}",
            field="parallel.tensor",
            got=size,
            allowed=", ".join(str(n) for n in range(1, min(width, 4 * size) + 1) if width % n == 0),
            remedy="Or leave this module out with parallel.tensor_plan",
        )


def _set_forward(module: nn.Module, forward: Forward) -> None:
    vars(module)["forward"] = forward


def _replace(module: nn.Module, name: str, axis: TensorAxis, dim: int, parts: int = 1) -> None:
    """Put a DTensor in the place of a parameter, with this rank's part of each of its `parts`."""
    parameter = module._parameters[name]
    if parameter is None:
        return
    data = parameter.detach()
    own = [part.chunk(axis.size, dim)[axis.index] for part in data.chunk(parts, dim)]
    local = (torch.cat(own, dim) if parts > 1 else own[0]).clone(memory_format=torch.contiguous_format)
    placement = Shard(dim) if parts == 1 else _StridedShard(dim, split_factor=parts)
    cut = DTensor.from_local(
        local, axis.mesh, [placement], run_check=False, shape=data.shape, stride=data.contiguous().stride()
    )
    module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))


_OUT, _IN = (nn.Linear, "out_features"), (nn.Linear, "in_features")
DIVIDED: dict[str, tuple[type[nn.Module], str]] = {
    **dict.fromkeys(("colwise", "packed_colwise", "colwise_gather_output", "colwise_loss_parallel"), _OUT),
    **dict.fromkeys(("rowwise", "rowwise_split_input"), _IN),
    "embedding_rowwise": (nn.Embedding, "num_embeddings"),
    "embedding": (nn.Embedding, ""),
}
"""Word -> kind of module, and what the ranks divide; empty for nothing."""

WORDS: dict[str, Callable[[Cut, TensorAxis], None]] = {
    "colwise": _colwise,
    "packed_colwise": _colwise,
    "colwise_gather_output": _colwise_gather_output,
    "colwise_loss_parallel": _colwise_loss_parallel,
    "rowwise": _rowwise,
    "rowwise_split_input": _rowwise,
    "embedding_rowwise": _embedding_rowwise,
    "embedding": _embedding_of_slices,
    "sequence_parallel": _sequence_parallel,
    "replicated_with_grad_allreduce": _sequence_parallel,
}
"""Word of a plan -> what cuts a module so."""
