"""Select the modules that FSDP gathers together."""

from __future__ import annotations

from torch import nn

from distributed.training.blocks import can_stand_alone, divisible, named_blocks
from distributed_backends.fsdp.section import FSDPSection

__all__ = ["find_units"]


def find_units(model: nn.Module, section: FSDPSection) -> list[nn.Module]:
    """The modules of `model` to gather one at a time, inner ones first; the rest of the model
    is gathered as a whole.

    A module whose parameters are tied to another's outside it is left to what surrounds both.

    Raises:
        UserError: the model has no module of a class in ``block_classes``.
    """
    if section.wrap == "size":
        chosen = _by_size(model, section.min_params)
    elif section.wrap == "whole":
        chosen = set()
    else:
        chosen = named_blocks(model, section.block_classes, "fsdp.block_classes")
    inner_first = reversed([module for module in divisible(model) if module in chosen])
    return [unit for unit in inner_first if unit is not model and can_stand_alone(model, unit)]


def _by_size(model: nn.Module, min_params: int) -> set[nn.Module]:
    """From the inside out: modules with `min_params` parameters that no chosen one inside has."""
    chosen: set[nn.Module] = set()
    taken: set[int] = set()
    for module in reversed(list(divisible(model))):
        left = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        if sum(left.values()) >= min_params and can_stand_alone(model, module):
            chosen.add(module)
            taken |= left.keys()
    return chosen
