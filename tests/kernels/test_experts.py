"""Mixtures of experts against a loop over tokens, and divided over ranks against one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed_kernels import KernelError, MoELayer, TopKRouter
from torch import Tensor

from tests.kernels.expert_checks import DIM, EXACT, EXPERTS, HIDDEN, layer, router_on
from tests.kernels.gloo_ranks import Ranks

F64 = torch.float64
GATED: dict[str, Any] = {"gated": True, "activation": "silu", "top_k": 2}
PLAIN: dict[str, Any] = {"gated": False, "activation": "gelu", "top_k": 1}


def token_by_token(moe: MoELayer, x: Tensor) -> Tensor:
    """Each token by itself, by each of its experts."""
    function = {"silu": F.silu, "gelu": F.gelu}[moe.experts.activation]
    rows = []
    for token in x.reshape(-1, DIM):
        shares = (moe.router.weight @ token).softmax(0)
        weights, index = shares.topk(moe.router.top_k)
        total = torch.zeros_like(token)
        for weight, expert in zip(weights / weights.sum(), index.tolist(), strict=True):
            hidden = moe.experts.up_weight[expert] @ token
            if moe.experts.gated:
                gate, up = hidden[:HIDDEN], hidden[HIDDEN:]
                hidden = function(gate) * up
            else:
                hidden = function(hidden)
            total = total + weight * (moe.experts.down_weight[expert] @ hidden)
        rows.append(total)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("given", [GATED, PLAIN], ids=["gated", "plain"])
def test_each_token_is_computed_by_its_experts(given: dict[str, Any]) -> None:
    moe = layer(**given)
    x = torch.randn(3, 5, DIM, dtype=F64, requires_grad=True)
    weights = torch.randn(3, 5, DIM, dtype=F64)
    tensors = [x, *moe.parameters()]
    found = torch.autograd.grad((moe(x) * weights).sum(), tensors)
    expected = torch.autograd.grad((token_by_token(moe, x) * weights).sum(), tensors)
    for own, other in zip([moe(x), *found], [token_by_token(moe, x), *expected], strict=True):
        assert float((own - other).detach().abs().max()) < EXACT


def test_a_token_does_not_depend_on_the_others() -> None:
    moe = layer()
    x = torch.randn(40, DIM, dtype=F64)
    one_by_one = torch.cat([moe(row[None]) for row in x])
    assert float((moe(x) - one_by_one).detach().abs().max()) < EXACT
    assert moe(x[:0]).shape == (0, DIM)


def test_the_router_keeps_the_largest_shares() -> None:
    tokens = torch.randn(9, DIM, dtype=F64)
    index, weights = router_on(tokens, top_k=3)
    _, shares = router_on(tokens, top_k=3, normalize=False)
    torch.testing.assert_close(weights.sum(-1), torch.ones(9, dtype=F64))
    torch.testing.assert_close(weights, shares / shares.sum(-1, keepdim=True))
    assert (shares.diff(dim=-1) <= 0).all()
    assert all(len(set(row)) == 3 for row in index.tolist())
    assert router_on(tokens.bfloat16())[1].dtype == torch.float32


@pytest.mark.parametrize("given", [GATED, PLAIN], ids=["gated", "plain"])
@pytest.mark.parametrize("rows", [[5, 5, 5, 5], [13, 0, 1, 7]], ids=["even", "uneven"])
def test_ranks_that_divide_the_experts_compute_the_same(
    rows: list[int], given: dict[str, Any], ranks: Ranks
) -> None:
    for found in ranks.run("divided_experts", 4, rows=rows, **given):
        assert max(found.values()) < EXACT, found


@pytest.mark.parametrize("fixed", [(0, 1), (7, 2)], ids=["on one rank", "on two"])
def test_ranks_without_a_token_have_gradients_of_zero(fixed: tuple[int, ...], ranks: Ranks) -> None:
    """All tokens go to two experts: the others' ranks receive none, and take part in the exchange."""
    for found in ranks.run("divided_experts", 4, rows=[3, 0, 4, 2], fixed=fixed, **GATED):
        assert max(found.values()) < EXACT, found


def test_two_groups_of_two_ranks(ranks: Ranks) -> None:
    for found in ranks.run("divided_experts", 2, rows=[6, 3], **GATED):
        assert max(found.values()) < EXACT, found


def test_a_mutant_that_drops_tokens_differs(ranks: Ranks) -> None:
    """The comparison notices experts that take 2 tokens from each rank at most."""
    found = ranks.run("experts_with_a_capacity", 4, rows=[13, 0, 1, 7], **GATED)
    assert max(found[0].values()) > 1e-3


def test_groups_that_do_not_fit_are_refused(ranks: Ranks) -> None:
    for uneven, twice in ranks.run("refused_expert_groups", 4):
        assert "4 ranks do not divide the experts. Got 6. Allowed: a multiple of 4." in uneven
        assert "the experts are divided already. Got '2 of 8 experts'." in twice


def test_arguments_that_cannot_be_computed_are_refused() -> None:
    with pytest.raises(KernelError, match=r"top_k: .* Allowed: 1 to num_experts=8"):
        TopKRouter(DIM, EXPERTS, 9)
    with pytest.raises(KernelError, match=r"activation: unknown function.*Allowed: silu, gelu, relu"):
        MoELayer(DIM, HIDDEN, EXPERTS, activation="tanh")
