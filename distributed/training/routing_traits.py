"""Routers of experts whose training depends on which samples are in one micro-batch, each with its refusal.

A capacity drops the tokens that an expert gets too many of, and a load-balancing loss multiplies two means
over the tokens of a micro-batch. Both are other functions of a global batch when it is cut into other
micro-batches, so that accumulation or ranks would train something else.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from distributed.errors import UserError
from distributed.interfaces.plan import BatchPlan
from distributed.training.model_traits import micro_batch_field

__all__ = ["check_routing"]

_CAPACITIES = (
    *("expert_capacity", "moe_eval_capacity_token_fraction"),
    *("capacity_factor", "moe_capacity_factor", "moe_expert_capacity_factor"),
)
"""Attributes of routers that drop tokens: of DeepSpeed, fairseq, Megatron-LM, NLLB-MoE and their like."""
_DROPS = ("drops_tokens", "drop_tokens")
"""Attributes that decide for a router whether it does; the second is DeepSpeed's."""
_PER_SEQUENCE = ("SwitchTransformersTop1Router",)
"""Classes of transformers that count the tokens of an expert in each sequence by itself."""


def check_routing(
    model: nn.Module,
    batch: BatchPlan,
    own_loss: bool,
    parts: tuple[int, int] = (1, 1),
    is_chosen: bool = False,
) -> None:
    """Raise a UserError for routers that drop tokens, and for load-balancing losses.

    Args:
        batch: of a step.
        own_loss: the model may compute the loss itself.
        parts: numbers of pieces of a micro-batch and of slices of a sequence that are computed by themselves.
        is_chosen: whether ``batch_size=auto`` chooses the size; `batch` is the most divided one then.
    """
    pieces, slices = parts
    if batch.global_batch_size * pieces * slices <= batch.batch_size:
        return
    for name, module in model.named_modules():
        if _drops_tokens(module, slices):
            raise UserError(
                f"'{name}' drops the tokens that exceed the capacity of an expert, which is counted over a"
                " micro-batch, and a step has several (contracts C2 and C3)",
                **micro_batch_field(batch, parts, is_chosen),
                remedy="Route without a capacity (drop_tokens=False, or distributed_kernels.MoELayer), or set"
                " drops_tokens = False on the router if a sample does not depend on the others",
            )
        if own_loss and _balances(getattr(module, "config", None)):
            raise UserError(
                f"'{name or type(module).__name__}' adds a load-balancing loss, which multiplies means over"
                " the tokens of a micro-batch, and a step has several (contract C2)",
                **micro_batch_field(batch, parts, is_chosen),
                remedy="Set output_router_logits=False or router_aux_loss_coef=0 in the model's config,"
                " or give a loss_fn over the logits",
            )


def _drops_tokens(module: nn.Module, slices: int) -> bool:
    for attribute in _DROPS:
        decided = getattr(module, attribute, None)
        if isinstance(decided, bool):
            return decided
    if type(module).__name__ in _PER_SEQUENCE and slices == 1:
        return False
    limits = (getattr(module, attribute, None) for attribute in _CAPACITIES)
    return any(isinstance(limit, (int, float)) and limit > 0 for limit in limits)


def _balances(config: Any) -> bool:
    coefficient = getattr(config, "router_aux_loss_coef", 0.0)
    return bool(getattr(config, "output_router_logits", False)) and bool(coefficient)
