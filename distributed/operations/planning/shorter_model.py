"""A model with fewer of its blocks, to verify a plan where the whole model does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from distributed.errors import UserError
from distributed.training.blocks import find_blocks

__all__ = ["check_number_of_blocks", "keep_blocks", "lists_of_blocks", "shortened"]


def shortened(model: Any, optimizer: Any, number: int, names: Sequence[str] = ()) -> tuple[Any, Any]:
    """`model` with the first `number` of its blocks, and `optimizer` for the parameters that are left.

    Args:
        model: a module, which is changed, or a factory.
        optimizer: as the `Trainer` takes it; an optimizer object is changed.
        names: class names of the blocks, as `block_classes` has them.

    Raises:
        UserError: as `keep_blocks`; for a factory, when it is called.
    """
    if not isinstance(model, nn.Module):
        return partial(_build_shortened, model, number, names), optimizer
    keep_blocks(model, number, names)
    if isinstance(optimizer, torch.optim.Optimizer):
        left = set(model.parameters())
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter in left]
        for parameter in [p for p in optimizer.state if p not in left]:
            del optimizer.state[parameter]
        optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
    return model, optimizer


def _build_shortened(factory: Callable[[], nn.Module], number: int, names: Sequence[str]) -> nn.Module:
    model = factory()
    keep_blocks(model, number, names)
    return model


def keep_blocks(model: nn.Module, number: int, names: Sequence[str] = ()) -> None:
    """Leave the first `number` blocks of each list of blocks in `model`.

    Args:
        names: class names of the blocks, as `block_classes` has them.

    Raises:
        UserError: the blocks are in no list, or there are fewer of them.
    """
    lists, blocks = lists_of_blocks(model, number, names)
    for module in lists:
        kept, count = [], 0
        for child in module.children():
            count += child in blocks
            if child not in blocks or count <= number:
                kept.append(child)
        del module[:]
        for child in kept:
            module.append(child)
    config: Any = getattr(model, "config", None)
    if getattr(config, "num_hidden_layers", None) is not None:
        config.num_hidden_layers = number


def lists_of_blocks(
    model: nn.Module, number: int, names: Sequence[str] = ()
) -> tuple[list[nn.ModuleList | nn.Sequential], set[nn.Module]]:
    """The lists whose blocks `keep_blocks` leaves out, and all blocks.

    Raises:
        UserError: as `keep_blocks`.
    """
    blocks = set(find_blocks(model, names))
    lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and blocks & set(module.children())
    ]
    check_number_of_blocks(number, max((len(blocks & set(module.children())) for module in lists), default=0))
    return lists, blocks


def check_number_of_blocks(number: int, most: int) -> None:
    """Check that `number` of `most` blocks can be kept.

    Raises:
        UserError: there are fewer.
    """
    if most == 0:
        raise UserError(
            "the model cannot be shortened: 0 blocks were found, which are modules of one class with modules"
            " inside them, side by side in a ModuleList or Sequential",
            field="--verify-layers",
            got=number,
            remedy="Leave it out, or name the class of the blocks (block_classes)",
        )
    if not 1 <= number <= most:
        raise UserError(
            f"the model cannot be shortened to so many layers; {most} blocks were found",
            field="--verify-layers",
            got=number,
            allowed=f"1 to {most}",
            remedy="Choose a number in this range, or leave it out",
        )
