"""What runs on the ranks. Every rank makes the whole input from the seed and takes its slice."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any
from unittest.mock import patch

import distributed_kernels as kernels
import torch
import torch.distributed as dist
from distributed_kernels import Experts, KernelError, count_traffic
from distributed_kernels.attention import block_sparse
from torch import Tensor

from tests.kernels import expert_checks

Result = dict[str, Any]


def whole_inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and the output's gradient of the whole sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]


def slices(
    group: Any, layout: str, shape: tuple[int, ...], shared: int, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    """This rank's q, k, v and dout, k and v with their first `shared` heads; and the mask of its keys, which
    leaves out the last quarter of the last sequence."""
    q, k, v, dout = whole_inputs(shape, dtype)
    mask = torch.ones(shape[0], shape[2], dtype=torch.bool)
    mask[-1, -(shape[2] // 4) :] = False
    cut = kernels.zigzag_slice if layout == "zigzag" else contiguous_slice
    return [cut(x, group, 2) for x in (q, k[:, :shared], v[:, :shared], dout)], cut(mask, group, 1)


def grouped(
    group: Any, *, function: str, shape: tuple[int, ...], shared: int, masked: bool, **options: Any
) -> Result:
    """Grouped-query attention in float64 on slices; the results are gathered into the sequence's order."""
    layout = options.get("layout", "contiguous")
    inputs, mask = slices(group, layout, shape, shared, torch.float64)
    if masked:
        options["key_mask"] = mask
    found = _values_and_gradients(partial(getattr(kernels, function), group=group, **options), inputs)
    if layout == "zigzag":
        found["results"] = [kernels.zigzag_gather(x, group, 2) for x in found["results"]]
    return found


def grouped_error(group: Any, *, shape: tuple[int, ...], shared: int) -> str:
    """The message of Ulysses attention for too few heads of keys."""
    (q, k, v, _), _ = slices(group, "contiguous", shape, shared, torch.float64)
    try:
        kernels.ulysses_attention(q, k, v, group=group)
    except KernelError as caught:
        return str(caught)
    return ""


def dropped(group: Any, *, function: str, shape: tuple[int, ...], p: float, **options: Any) -> Result:
    """What dropout leaves of weights that are all equal, by value vectors that name their positions.

    Scores are zero, so that every weight is 1 / length, and v is the identity: out is the matrix of weights.
    """
    length = shape[2]
    names = torch.eye(length, dtype=torch.float64).expand(*shape[:2], length, length)
    v = contiguous_slice(names, group)
    q = torch.zeros_like(v).requires_grad_()
    attention = partial(getattr(kernels, function), group=group, dropout_p=p, **options)
    torch.manual_seed(11)
    first = attention(q, q, v)
    torch.manual_seed(11)
    again = attention(q, q, v)
    return {
        "weights": first.detach(),
        "again": torch.equal(first, again),
        "next": attention(q, q, v).detach(),
    }


def dropout_gradients(group: Any, *, function: str, shape: tuple[int, ...], **options: Any) -> bool:
    """Whether the gradients are those of the masks of the forward, by finite differences."""
    q, k, v, _ = (contiguous_slice(x, group).requires_grad_() for x in whole_inputs(shape, torch.float64))

    def seeded(*qkv: Tensor) -> Tensor:
        torch.manual_seed(5)
        result: Tensor = getattr(kernels, function)(*qkv, group=group, dropout_p=0.4, **options)
        return result.square().sum()

    # A rank moves one number of its own at a time while the others move theirs: the sum over ranks is what
    # changes, so that each is compared with the gradient of the sum.
    directions = [torch.randn(x.shape, dtype=torch.float64) for x in (q, k, v)]
    grads = torch.autograd.grad(seeded(q, k, v), (q, k, v))
    slope = sum((g * d).sum() for g, d in zip(grads, directions, strict=True))
    step = 1e-5
    with torch.no_grad():
        ends = [
            seeded(*(x + sign * step * d for x, d in zip((q, k, v), directions, strict=True)))
            for sign in (1, -1)
        ]
    both = torch.stack([torch.as_tensor(slope), (ends[0] - ends[1]) / (2 * step)])
    dist.all_reduce(both, group=group)
    return bool(torch.isclose(both[0], both[1], rtol=1e-6))


def contiguous_slice(x: Tensor, group: Any, dim: int = 2) -> Tensor:
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def _values_and_gradients(attention: Any, inputs: list[Tensor]) -> Result:
    q, k, v, dout = inputs
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    with count_traffic() as forward:
        out = attention(*leaves)
    with count_traffic() as backward:
        grads = torch.autograd.grad(out, leaves, dout)
    return {
        "results": [out.detach(), *grads],
        "forward": forward.received,
        "backward": backward.received,
    }


def attention(
    group: Any, *, function: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **options: Any
) -> Result:
    """`function` of the room on contiguous slices: values, gradients, bytes."""
    if (inner := options.pop("inner", None)) is not None:
        options["attention"] = partial(getattr(kernels, inner.pop("function")), **inner)
    inputs = [contiguous_slice(x, group) for x in whole_inputs(shape, dtype)]
    return _values_and_gradients(partial(getattr(kernels, function), group=group, **options), inputs)


def slices_in_one_piece(group: Any, **options: Any) -> Result:
    """`attention` with the blocks of a slice as one piece, as where a kernel skips blocks itself."""
    with patch.object(block_sparse, "fuses_kept_blocks", return_value=True):
        return attention(group, function="block_sparse_attention", **options)


def zigzag(group: Any, *, shape: tuple[int, ...], **options: Any) -> Result:
    """Ring attention on zigzag slices; the results are gathered into the sequence's order."""
    inputs = [kernels.zigzag_slice(x, group, 2) for x in whole_inputs(shape)]
    found = _values_and_gradients(partial(kernels.ring_attention, group=group, **options), inputs)
    found["results"] = [kernels.zigzag_gather(x, group, 2) for x in found["results"]]
    return found


def zigzag_differs_from_contiguous(group: Any, *, shape: tuple[int, ...]) -> bool:
    """Contiguous slices given to the zigzag layout are another attention: the layout is not decoration."""
    inputs = [contiguous_slice(x, group) for x in whole_inputs(shape)][:3]
    zigzag, contiguous = (
        kernels.ring_attention(*inputs, group=group, causal=True, layout=layout)
        for layout in ("zigzag", "contiguous")
    )
    return not torch.allclose(zigzag, contiguous)


def layout_warnings(group: Any, *, cut: str, layout: str, causal: bool) -> list[str]:
    """Warnings of ring attention for slices that `cut` makes."""
    whole = whole_inputs((2, 4, 32, 8))[:3]
    if cut == "packed":
        parts = torch.cat((*whole, whole[0]), 3)
        q, k, v, _ = contiguous_slice(parts, group).contiguous().chunk(4, 3)
    else:
        of = kernels.zigzag_slice if cut == "zigzag" else contiguous_slice
        q, k, v = (of(x, group, 2) for x in whole)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernels.ring_attention(q, k, v, group=group, causal=causal, layout=layout)
    return [str(each.message) for each in caught]


def module(group: Any, *, name: str, shape: tuple[int, int, int], own_group: bool, **options: Any) -> Result:
    """A module on slices: its output and input gradient, and the parameters' gradients summed."""
    layer = seeded_module(name, shape[-1], group=group if own_group else None, **options)
    x, dout = (contiguous_slice(each, group, 1) for each in whole_inputs(shape)[:2])
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(dout)
    for parameter in layer.parameters():
        dist.all_reduce(parameter.grad, group=group)
    assert x.grad is not None
    return {"results": [out.detach(), x.grad], "parameters": [p.grad for p in layer.parameters()]}


def language_model(group: Any, *, tokens: torch.Tensor, **options: Any) -> Result:
    """The logits of this rank's slice of `tokens`, and the parameters' gradients of all slices."""
    torch.manual_seed(3)
    model = kernels.create_distributed_model(group=group, **options).double()
    logits = model(contiguous_slice(tokens, group, 1))
    logits.square().sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
    return {"results": [logits.detach()], "parameters": [p.grad for p in model.parameters()]}


def module_error(group: Any, *, name: str) -> str:
    """The message of the KernelError of a module that was given no group, on this rank."""
    layer = seeded_module(name, 16, num_heads=4, segment_lengths=[8], dilation_rates=[1])
    try:
        layer(torch.zeros(1, 8, 16))
    except KernelError as caught:
        return str(caught)
    return ""


def seeded_module(name: str, width: int, **options: Any) -> torch.nn.Module:
    torch.manual_seed(3)
    layer: torch.nn.Module = getattr(kernels, name)(width, **options)
    return layer


def error(group: Any, *, function: str, shape: tuple[int, ...], uneven: bool = False, **options: Any) -> str:
    """The message of the KernelError that `function` raises, on this rank."""
    q, k, v, _ = (contiguous_slice(x, group) for x in whole_inputs(shape))
    if uneven and dist.get_rank(group) == 0:
        q, k, v = (x[:, :, :-1] for x in (q, k, v))
    try:
        getattr(kernels, function)(q, k, v, group=group, **options)
    except KernelError as caught:
        return str(caught)
    return ""


def foreign_group(group: Any) -> str:
    """The message when a rank uses a group that it is no member of; rank 0 is in it and does nothing."""
    alone = dist.new_group([0])
    if dist.get_rank() == 0:
        return ""
    inputs = whole_inputs((1, 2, 8, 4))[:3]
    try:
        # A non-member is handed this stand-in by torch.
        kernels.ring_attention(*inputs, group=alone)
    except KernelError as caught:
        return str(caught)
    return "no error"


def divided_experts(group: Any, **given: Any) -> Result:
    """See `expert_checks.divided_layer`."""
    return expert_checks.divided_layer(group, **given)


def experts_with_a_capacity(group: Any, **given: Any) -> Result:
    """The same of experts that leave out what exceeds two tokens of a rank."""
    whole = Experts._compute

    def dropping(experts: Experts, rows: Tensor, counts: list[int]) -> Tensor:
        out = whole(experts, rows, counts)
        kept = [torch.arange(n) < (2 if experts.is_part else n) for n in counts]
        return out * torch.cat(kept).unsqueeze(1)

    Experts._compute = dropping  # type: ignore[method-assign]
    try:
        return expert_checks.divided_layer(group, **given)
    finally:
        Experts._compute = whole  # type: ignore[method-assign]


def refused_expert_groups(group: Any) -> list[str]:
    """See `expert_checks.refused_groups`."""
    return expert_checks.refused_groups(group)
