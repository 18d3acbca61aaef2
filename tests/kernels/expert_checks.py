"""Checks of experts that the ranks of a group divide, against the same layer on one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from distributed_kernels import KernelError, MoELayer, TopKRouter
from torch import Tensor, nn

DIM, HIDDEN, EXPERTS = 6, 10, 8
EXACT = 1e-12


def layer(group: Any = None, **given: Any) -> MoELayer:
    """The same weights every time."""
    torch.manual_seed(3)
    return MoELayer(DIM, HIDDEN, EXPERTS, dtype=torch.float64, group=group, **given)


class Everything(nn.Module):
    """A router that sends every token to the same experts."""

    def __init__(self, experts: tuple[int, ...]) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        index = torch.tensor(self.experts).expand(len(tokens), -1)
        return index, tokens.new_ones(index.shape) / len(self.experts)


def divided_layer(
    group: Any, *, rows: list[int], fixed: tuple[int, ...] = (), **given: Any
) -> dict[str, Any]:
    """Largest difference of values and gradients from the layer on one rank with the tokens of all ranks.

    Args:
        rows: number of tokens of each rank.
        fixed: experts of every token; empty for the router's.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    whole, own = layer(**given), layer(group, **given)
    if fixed:
        whole.router = own.router = Everything(fixed)  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randn(sum(rows), DIM, generator=generator, dtype=torch.float64)
    weights = torch.randn(sum(rows), DIM, generator=generator, dtype=torch.float64)
    all_tokens = tokens.clone().requires_grad_()
    expected = whole(all_tokens)
    (expected * weights).sum().backward()

    part = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    own_tokens = tokens[part].clone().requires_grad_()
    out = own(own_tokens)
    (out * weights[part]).sum().backward()
    near = {"out": (out, expected[part]), "tokens": (own_tokens.grad, all_tokens.grad[part])}
    for name in own.experts.expert_parameters():
        near[name] = (
            getattr(own.experts, name).grad,
            getattr(whole.experts, name).grad.chunk(size)[rank],
        )
    for name, parameter in own.router.named_parameters():
        # Each rank has the part of its own tokens.
        total = parameter.grad.clone()
        dist.all_reduce(total, group=group)
        near[f"router.{name}"] = (total, whole.router.get_parameter(name).grad)
    return {name: _distance(*pair) for name, pair in near.items()}


def _distance(own: Any, expected: Any) -> float:
    assert own.shape == expected.shape
    return float((own - expected).detach().abs().max()) if own.numel() else 0.0


def refused_groups(group: Any) -> list[str]:
    """What the layer says to a group that does not fit, and to a second one."""
    found = []
    for make in (
        lambda: MoELayer(DIM, HIDDEN, 6, group=group),
        lambda: layer(group).experts.set_expert_group(group),
    ):
        try:
            make()
        except KernelError as error:
            found.append(str(error))
    return found


def router_on(tokens: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    found: tuple[Tensor, Tensor] = TopKRouter(DIM, EXPERTS, dtype=tokens.dtype, **given)(tokens)
    return found
