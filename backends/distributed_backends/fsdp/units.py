"""Select the modules that FSDP gathers together, and those whose activations are recomputed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from distributed.errors import UserError
from distributed_backends.fsdp.section import FSDPSection

__all__ = ["find_units", "recompute", "stop_recomputing"]

# Their forward reads the parameters of modules inside them without calling these.
_INDIVISIBLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_LISTS = (nn.ModuleList, nn.ModuleDict)

Recomputed = list[tuple[nn.Module, Any]]


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
        chosen = _by_class(model, section)
    inner_first = reversed([module for module in _divisible(model) if module in chosen])
    return [unit for unit in inner_first if unit is not model and _can_be_a_unit(model, unit)]


def _by_class(model: nn.Module, section: FSDPSection) -> set[nn.Module]:
    names = set(section.block_classes or getattr(model, "_no_split_modules", None) or ())
    found = {module for module in model.modules() if type(module).__name__ in names}
    missing = set(section.block_classes) - {type(module).__name__ for module in found}
    if missing:
        present = Counter(type(module).__name__ for module in model.modules())
        raise UserError(
            f"the model has no module of class {', '.join(sorted(missing))}",
            field="fsdp.block_classes",
            got=", ".join(section.block_classes),
            allowed=", ".join(f"{name} ({count})" for name, count in present.most_common(12)),
        )
    return found or _repeated(model)


def _repeated(model: nn.Module) -> set[nn.Module]:
    """Blocks: modules of one class, side by side in a list or sequence, made of other modules."""
    found: set[nn.Module] = set()
    for parent in model.modules():
        if isinstance(parent, (nn.ModuleList, nn.Sequential)):
            made = [child for child in parent if any(True for _ in child.children())]
            counts = Counter(type(child) for child in made)
            found |= {child for child in made if counts[type(child)] > 1}
    return found


def _by_size(model: nn.Module, min_params: int) -> set[nn.Module]:
    """From the inside out: modules with `min_params` parameters that no chosen one inside has."""
    chosen: set[nn.Module] = set()
    taken: set[int] = set()
    for module in reversed(list(_divisible(model))):
        left = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        if sum(left.values()) >= min_params and _can_be_a_unit(model, module):
            chosen.add(module)
            taken |= left.keys()
    return chosen


def _divisible(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterable[nn.Module]:
    """`module` and all modules inside it, outer first, none from inside an indivisible one."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    yield module
    if not isinstance(module, _INDIVISIBLE):
        for child in module.children():
            yield from _divisible(child, seen)


def _can_be_a_unit(model: nn.Module, unit: nn.Module) -> bool:
    own = {id(p) for p in unit.parameters()}
    inside = set(unit.modules())
    outside = {
        id(p) for module in model.modules() if module not in inside for p in module._parameters.values()
    }
    return bool(own) and not isinstance(unit, _LISTS) and not own & outside


def recompute(model: nn.Module, units: list[nn.Module]) -> Recomputed:
    """Let backward compute the activations of the outermost `units` again.

    Returns:
        What `stop_recomputing` takes.

    Raises:
        UserError: there are no units, or BatchNorm in one would see every batch twice.
    """
    inner = {module for unit in units for module in unit.modules() if module is not unit}
    outermost = [unit for unit in units if unit not in inner]
    if not outermost:
        raise UserError(
            f"found no blocks in {type(model).__name__} whose activations could be recomputed",
            field="fsdp.activation_checkpointing",
            got=True,
            remedy="Name their classes: fsdp.wrap=blocks, fsdp.block_classes=[...]",
        )
    if any(isinstance(module, _BatchNorm) for unit in outermost for module in unit.modules()):
        raise UserError(
            "BatchNorm in a recomputed block would add every batch to its statistics twice",
            field="fsdp.activation_checkpointing",
            got=True,
            allowed="false with BatchNorm inside the blocks",
        )
    done: Recomputed = []
    for unit in outermost:
        done.append((unit, vars(unit).get("forward")))
        unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)
    return done


def stop_recomputing(done: Recomputed) -> None:
    """Undo `recompute`."""
    for unit, forward in done:
        del unit.forward
        if forward is not None:
            unit.forward = forward
