"""A decoder with the numbers of a plan and random tokens, on which the plan is verified."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distributed.errors import UserError
from distributed.operations.planning.decoder import Decoder, next_token_loss
from distributed.planner.estimates.numbers import ModelNumbers

__all__ = ["check_form", "decoder_of", "tokens_of", "training_step"]

training_step = next_token_loss


def check_form(family: str, experts: int) -> None:
    """Check that there is a model of such numbers here.

    Args:
        family: as in `ModelNumbers`.
        experts: of each block.

    Raises:
        UserError: they are of a mixture of experts, or not in the form of Llama.
    """
    if experts > 1 or family != "llama":
        raise UserError(
            "a plan from these numbers is verified on a model of your own",
            field="--verify",
            got=f"family {family}, {experts} experts",
            allowed="family llama without experts",
            remedy="Plan from a script with the model: --script FILE --verify",
        )


def decoder_of(numbers: ModelNumbers) -> nn.Module:
    """A model with these sizes.

    Raises:
        UserError: as `check_form`.
    """
    check_form(numbers.family, numbers.experts)
    return Decoder(
        layers=numbers.layers,
        hidden=numbers.hidden,
        heads=numbers.heads,
        kv_heads=numbers.kv_heads,
        ffn=numbers.ffn,
        vocabulary=numbers.vocabulary,
        sequence=numbers.sequence,
        tied=numbers.tied,
    )


def tokens_of(numbers: ModelNumbers, steps: int) -> Any:
    """Random inputs and targets for so many steps."""
    shape = (numbers.global_batch * steps, numbers.sequence)
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, numbers.vocabulary, shape, generator=generator) for _ in range(2)]
    return torch.utils.data.TensorDataset(*tokens)
