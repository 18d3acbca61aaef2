"""The blocks of a model: the modules that are repeated in it, such as the layers of a transformer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable

from torch import nn

from distributed.errors import UserError

__all__ = ["can_stand_alone", "divisible", "find_blocks", "flat_parts", "named_blocks", "outermost"]

# Their forward reads the parameters of modules inside them without calling these.
_INDIVISIBLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_LISTS = (nn.ModuleList, nn.ModuleDict)
_FEWEST_LAYERS = 4
"""Least number of a Sequential that is divided: two parts of two layers."""


def find_blocks(model: nn.Module, names: Collection[str], field: str = "block_classes") -> list[nn.Module]:
    """The outermost blocks of `model`, in its order; empty without.

    Args:
        names: class names of the blocks. Without, those of the model's ``_no_split_modules``, else the
            modules that have submodules and are repeated (same class) in a ModuleList or Sequential.
        field: that holds `names`.

    Raises:
        UserError: the model has no module of a class in `names`.
    """
    chosen = named_blocks(model, names, field)
    found = [module for module in divisible(model) if module in chosen and module is not model]
    return outermost([module for module in found if not isinstance(module, _LISTS)])


def named_blocks(model: nn.Module, names: Collection[str], field: str) -> set[nn.Module]:
    """The modules that `find_blocks` chooses from, inner ones too."""
    wanted = set(names or getattr(model, "_no_split_modules", None) or ())
    found = {module for module in model.modules() if type(module).__name__ in wanted}
    missing = set(names) - {type(module).__name__ for module in found}
    if missing:
        present = Counter(type(module).__name__ for module in model.modules())
        raise UserError(
            f"the model has no module of class {', '.join(sorted(missing))}",
            field=field,
            got=", ".join(names),
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


def flat_parts(model: nn.Module) -> dict[nn.Sequential, list[nn.Sequential]]:
    """Divide the layers of each outermost Sequential of a model without blocks, into about as many parts as a
    part has layers. A part is a Sequential that the model does not hold.

    Returns:
        Sequential of the model -> its parts, in their order; empty without one of four layers or more.
    """
    plain = [
        module
        for module in divisible(model)
        if isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and len(module) >= _FEWEST_LAYERS
    ]
    found: dict[nn.Sequential, list[nn.Sequential]] = {}
    for sequence in plain:
        if not any(sequence in outer.modules() for outer in found):
            layers, size = list(sequence), math.isqrt(len(sequence) - 1) + 1
            starts = range(0, len(layers), size)
            found[sequence] = [nn.Sequential(*layers[start : start + size]) for start in starts]
    return found


def outermost(blocks: list[nn.Module]) -> list[nn.Module]:
    """Those of `blocks` that are inside no other."""
    inner = {module for block in blocks for module in block.modules() if module is not block}
    return [block for block in blocks if block not in inner]


def divisible(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterable[nn.Module]:
    """`module` and all modules inside it, outer first, none from inside an indivisible one."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    yield module
    if not isinstance(module, _INDIVISIBLE):
        for child in module.children():
            yield from divisible(child, seen)


def can_stand_alone(model: nn.Module, block: nn.Module) -> bool:
    """Whether `block` has parameters, is called, and shares no parameter with modules outside it."""
    own = {id(p) for p in block.parameters()}
    inside = set(block.modules())
    outside = {
        id(p) for module in model.modules() if module not in inside for p in module._parameters.values()
    }
    return bool(own) and not isinstance(block, _LISTS) and not own & outside
