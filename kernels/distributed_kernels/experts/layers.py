"""A mixture of experts: each token is computed by the k experts that a router chooses (Shazeer et al. 2017).

No expert has a capacity and no token is dropped, so that what a token becomes does not depend on the other
tokens of its batch, and neither on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from distributed_kernels.errors import KernelError
from distributed_kernels.experts.exchange import exchange_counts, exchange_rows

__all__ = ["Experts", "MoELayer", "TopKRouter"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}
_HALF = (torch.float16, torch.bfloat16)


class TopKRouter(nn.Module):
    """Chooses experts for each token, by a linear layer and a softmax over its outputs.

    Args:
        dim: width of a token.
        num_experts: number of experts.
        top_k: number of experts of each token.
        normalize: scale the weights of a token's experts to a sum of 1, as Mixtral does; False keeps their
            softmax over all experts.

    Raises:
        KernelError: top_k is not between 1 and num_experts.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int = 2,
        *,
        normalize: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise KernelError(
                "top_k: a token cannot be computed by that number of experts",
                got=top_k,
                allowed=f"1 to num_experts={num_experts}",
                remedy="Choose one of these",
            )
        self.top_k, self.normalize = top_k, normalize
        self.weight = nn.Parameter(torch.empty(num_experts, dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialize the weight from torch's global generator."""
        nn.init.normal_(self.weight, std=1 / sqrt(self.weight.shape[1]))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(n, dim) -> indices of experts, (n, top_k) int64, and their weights, (n, top_k).

        The softmax of half-precision outputs is computed in float32.
        """
        logits = F.linear(tokens, self.weight)
        shares = logits.softmax(-1, dtype=torch.float32 if logits.dtype in _HALF else logits.dtype)
        weights, index = shares.topk(self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return index, weights


class Experts(nn.Module):
    """MLPs of stacked weights, each applied to the tokens that are routed to it.

    With a group of P ranks, rank i of it holds the num_experts / P experts from i * num_experts / P on. Ranks
    have tokens of their own, in any number, 0 included: these travel to the ranks of their experts and back,
    in forward and in backward. All ranks of the group call the layer equally often.

    Args:
        num_experts: number of experts, over all ranks of the group.
        dim: width of a token.
        hidden_dim: width between the two layers of an expert.
        gated: down(activation(gate(x)) * up(x)), where gate and up are the halves of `up_weight`; otherwise
            down(activation(up(x))).
        activation: "silu", "gelu" or "relu".
        group: the ranks that divide the experts; None for one rank.

    Attributes:
        up_weight: (experts, 2 * hidden_dim, dim), or (experts, hidden_dim, dim) if not gated.
        down_weight: (experts, dim, hidden_dim).

    Raises:
        KernelError: an unknown activation; the ranks of `group` do not divide the experts.
    """

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden_dim: int,
        *,
        gated: bool = True,
        activation: str = "silu",
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise KernelError(
                "activation: unknown function",
                got=activation,
                allowed=", ".join(_ACTIVATIONS),
                remedy="Choose one of these",
            )
        self.num_experts, self.gated, self.activation = num_experts, gated, activation
        self.group: dist.ProcessGroup | None = None
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.up_weight = nn.Parameter(torch.empty(num_experts, (1 + gated) * hidden_dim, dim, **made))
        self.down_weight = nn.Parameter(torch.empty(num_experts, dim, hidden_dim, **made))
        self.reset_parameters()
        if group is not None:
            self.set_expert_group(group)

    @property
    def is_part(self) -> bool:
        """Whether this rank holds some of the experts only."""
        return self.group is not None

    def expert_parameters(self) -> tuple[str, ...]:
        """Names of the parameters whose first dimension counts experts."""
        return "up_weight", "down_weight"

    def reset_parameters(self) -> None:
        """Reinitialize the weights that this rank holds from torch's global generator."""
        for weight in (self.up_weight, self.down_weight):
            nn.init.normal_(weight, std=1 / sqrt(weight.shape[2]))

    @torch.no_grad()
    def set_expert_group(self, group: dist.ProcessGroup) -> None:
        """Keep this rank's experts alone, and exchange tokens over `group` from now on.

        Raises:
            KernelError: the experts are divided already, the ranks do not divide them, or this rank is not
                in the group.
        """
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self._check_group(size, rank)
        for name in self.expert_parameters():
            whole = getattr(self, name)
            own = whole.detach().chunk(size)[rank].clone()
            self.register_parameter(name, nn.Parameter(own, requires_grad=whole.requires_grad))
        self.group = group

    def _check_group(self, size: int, rank: int) -> None:
        if rank < 0:
            raise KernelError(
                "group: this rank is not in it",
                got=dist.get_rank(),
                allowed="a group that this rank belongs to",
                remedy="Make the group on every rank, and give each layer the rank's own",
            )
        if self.group is not None:
            raise KernelError(
                "group: the experts are divided already",
                got=f"{len(self.up_weight)} of {self.num_experts} experts",
                allowed="a layer that holds all experts",
                remedy="Divide a layer once",
            )
        if self.num_experts % size:
            raise KernelError(
                f"num_experts: {size} ranks do not divide the experts",
                got=self.num_experts,
                allowed=f"a multiple of {size}",
                remedy="Use a group of another size, or another number of experts",
            )

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of what its experts make of each token.

        Args:
            tokens: (n, dim).
            index: of the experts of each token, (n, k) int64.
            weights: of these, (n, k).

        Returns:
            (n, dim).
        """
        chosen = index.flatten()
        order = chosen.argsort(stable=True)
        rows = tokens[order // index.shape[1]]
        counts = chosen.bincount(minlength=self.num_experts)
        out = self._compute(rows, counts.tolist()) if self.group is None else self._elsewhere(rows, counts)
        placed = torch.zeros_like(out).index_copy(0, order, out).unflatten(0, index.shape)
        combined: Tensor = (placed * weights.unsqueeze(-1).to(placed.dtype)).sum(1).to(tokens.dtype)
        return combined

    def _elsewhere(self, rows: Tensor, counts: Tensor) -> Tensor:
        """What the experts of all ranks make of this rank's `rows`, sorted by expert."""
        assert self.group is not None
        of_ranks = counts.view(dist.get_world_size(self.group), -1)
        received = exchange_counts(of_ranks, self.group)
        send, receive = of_ranks.sum(1).tolist(), received.sum(1).tolist()
        arrived = exchange_rows(rows, send, receive, self.group)
        # They are sorted by sender, and by expert of each sender.
        expert = torch.arange(received.shape[1], device=rows.device).repeat(len(received))
        order = expert.repeat_interleave(received.flatten()).argsort(stable=True)
        out = self._compute(arrived[order], received.sum(0).tolist())
        return exchange_rows(torch.zeros_like(out).index_copy(0, order, out), receive, send, self.group)

    def _compute(self, rows: Tensor, counts: list[int]) -> Tensor:
        """The experts of this rank, each on its consecutive rows. Without rows their gradients are 0."""
        function = _ACTIVATIONS[self.activation]
        found = []
        for part, up, down in zip(rows.split(counts), self.up_weight, self.down_weight, strict=True):
            hidden = F.linear(part, up)
            if self.gated:
                gate, hidden = hidden.chunk(2, -1)
                hidden = function(gate) * hidden
            else:
                hidden = function(hidden)
            found.append(F.linear(hidden, down))
        return torch.cat(found)

    def extra_repr(self) -> str:
        """The experts, and the part of them that this rank holds."""
        held = f", {len(self.up_weight)} on this rank" if self.group is not None else ""
        return f"num_experts={self.num_experts}{held}, gated={self.gated}, activation={self.activation}"


class MoELayer(nn.Module):
    """A router and its experts, in the place of a transformer block's MLP.

    Args:
        dim: width of a token.
        hidden_dim: width between the two layers of an expert.
        num_experts: number of experts.
        top_k: number of experts of each token.
        normalize: as for `TopKRouter`.
        gated, activation: as for `Experts`.
        group: the ranks that divide the experts; None for one rank. `Experts.set_expert_group` divides them
            later. The router is whole on every rank.

    Raises:
        KernelError: as `TopKRouter` and `Experts`.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int = 2,
        *,
        normalize: bool = True,
        gated: bool = True,
        activation: str = "silu",
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.router = TopKRouter(dim, num_experts, top_k, normalize=normalize, **made)
        self.experts = Experts(
            num_experts, dim, hidden_dim, gated=gated, activation=activation, group=group, **made
        )

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        tokens = x.flatten(0, -2)
        out: Tensor = self.experts(tokens, *self.router(tokens))
        return out.view_as(x)
