"""Routers whose training depends on which samples are in one micro-batch are refused, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distributed import UserError
from distributed.interfaces.plan import BatchPlan
from distributed.training.routing_traits import check_routing
from tests.parallel.expert_models import mixtral
from tests.parallel.models import tokens
from tests.support.training import make_trainer

pytest.importorskip("transformers")

ONE, TWO = BatchPlan(8, 1, 1), BatchPlan(4, 2, 1)


def refused(module: nn.Module, batch: BatchPlan = TWO, own_loss: bool = True) -> bool:
    try:
        check_routing(nn.Sequential(module), batch, own_loss)
    except UserError:
        return True
    return False


class Router(nn.Linear):
    """A router with the attributes of a library's."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(4, 4)
        vars(self).update(attributes)


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"capacity_factor": 1.25}, True),
        ({"expert_capacity": 64}, True),
        ({"moe_capacity_factor": 2, "drop_tokens": True}, True),
        ({"capacity_factor": 1.25, "drop_tokens": False}, False),
        ({"expert_capacity": None}, False),
        ({"expert_capacity": 64, "drops_tokens": False}, False),
        ({"drops_tokens": True}, True),
        ({}, False),
    ],
    ids=str,
)
def test_attributes_of_routers(attributes: dict[str, Any], expected: bool) -> None:
    assert refused(Router(**attributes)) == expected
    assert not refused(Router(**attributes), ONE)


def test_the_error_names_the_batch_that_trains_exactly() -> None:
    with pytest.raises(UserError, match=r"'0' drops the tokens .* \(contracts C2 and C3\)") as caught:
        check_routing(nn.Sequential(Router(capacity_factor=1.0)), TWO, own_loss=True)
    assert (caught.value.field, caught.value.got) == ("global_batch_size", 8)
    assert caught.value.allowed == "4, one micro-batch on one rank"


@pytest.mark.parametrize("parts", [(2, 1), (1, 2)])
def test_parts_of_one_micro_batch_are_several(parts: tuple[int, int]) -> None:
    """Pieces in a pipeline, and slices of sequences."""
    with pytest.raises(UserError, match="counted over a micro-batch") as caught:
        check_routing(nn.Sequential(Router(capacity_factor=1.0)), ONE, own_loss=False, parts=parts)
    assert caught.value.allowed == (
        "8, one micro-batch on one rank, with parallel.num_microbatches=1 and parallel.context=1"
    )


def test_a_router_that_counts_each_sequence_drops_by_slice() -> None:
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import (
        SwitchTransformersTop1Router,
    )

    router = nn.Sequential(SwitchTransformersTop1Router(SwitchTransformersConfig(d_model=4, num_experts=2)))
    check_routing(router, TWO, own_loss=False, parts=(2, 1))
    with pytest.raises(UserError, match="drops the tokens"):
        check_routing(router, TWO, own_loss=False, parts=(1, 2))


def test_the_gate_of_deepspeed() -> None:
    sharded_moe = pytest.importorskip("deepspeed.moe.sharded_moe")
    assert refused(sharded_moe.TopKGate(8, 4))
    assert not refused(sharded_moe.TopKGate(8, 4, drop_tokens=False))


def test_the_router_of_nllb_moe_drops_by_micro_batch() -> None:
    """Equal tokens for an expert of capacity 1: a second sequence in the micro-batch has none left."""
    from transformers import NllbMoeConfig
    from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeTop2Router

    config = NllbMoeConfig(d_model=8, num_experts=2, expert_capacity=1)
    router = NllbMoeTop2Router(config).eval()
    router.moe_eval_capacity_token_fraction = -1.0
    sequences = torch.ones(2, 4, 8)
    together = router(sequences)[0]
    alone = torch.cat([router(sequence[None])[0] for sequence in sequences])
    assert not torch.equal(together.bool(), alone.bool())
    assert refused(router)


def test_the_router_of_switch_transformers_drops_by_sequence() -> None:
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import (
        SwitchTransformersTop1Router,
    )

    config = SwitchTransformersConfig(hidden_size=8, num_experts=2, expert_capacity=3)
    router = SwitchTransformersTop1Router(config).eval()  # which adds no noise
    sequences = torch.randn(4, 10, 8)
    together, _, _ = router(sequences)
    alone = torch.cat([router(sequence[None])[0] for sequence in sequences])
    assert torch.equal(together, alone)
    assert int(together.sum()) < 40  # some are dropped
    assert not refused(router)


def test_a_load_balancing_loss_of_mixtral() -> None:
    model = mixtral(output_router_logits=True)
    assert refused(model)
    assert not refused(model, ONE)
    assert not refused(model, own_loss=False)
    assert not refused(mixtral(output_router_logits=True, router_aux_loss_coef=0.0))
    assert not refused(mixtral())


def test_it_is_refused_before_the_first_step() -> None:
    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"input_ids": tokens(8)[0][index], "labels": tokens(8)[0][index]}

    fields: dict[str, Any] = {"backend": "serial", "global_batch_size": 4, "batch_size": 2}
    trainer = make_trainer(mixtral(output_router_logits=True), **fields)
    with pytest.raises(UserError, match=r"adds a load-balancing loss, .* a step has several"):
        trainer.fit(Rows(), max_steps=1)
