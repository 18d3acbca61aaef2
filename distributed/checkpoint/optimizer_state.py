"""An optimizer's groups and per-parameter state, by parameter name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from distributed.checkpoint.dtensor import is_sharded, local_part, read_part, wrap_like
from distributed.errors import UserError
from distributed.interfaces.state import StateReader
from distributed.system.strict_json import shown

NAMES = "names"
_LIVE = ("params", "param_names")
SCALAR_DTYPES = "scalar_dtypes"
_OWN = "own_state"
"""Key in the first group: an optimizer's own ``state_dict``, with references to state by name."""
_REFERENCE = "state of"
_PREFIX = "optimizer."
_LIST, _DICT = "list of ", "dict of "
"""Start of the slots of what an optimizer keeps in an attribute."""
IMPLEMENTATION = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""How a step is computed here, not what it computes: these follow the machine."""
# Hyper-parameters that distinguish families of optimizers in all implementations.
_FAMILY = frozenset(
    {
        *("betas", "momentum", "alpha", "rho", "lr_decay", "beta2_decay", "etas", "history_size"),
        "momentum_decay",
    }
)
KIND = frozenset({"decoupled_weight_decay"})
"""Keys that distinguish optimizers with the same state, such as AdamW and Adam: a checkpoint does not change
it."""

WHOLE_STATE = "holds_whole_state"
"""Attribute of an optimizer whose state is whole on every rank, also of parameters that are not."""

Groups = list[tuple[dict[str, Any], Mapping[str, Any]]]


def parts_of(optimizer: Any) -> list[Any]:
    """`optimizer`, and the optimizers that it holds in attributes and steps itself."""
    found = [optimizer]
    for part in found:
        for value in vars(part).values() if isinstance(part, Optimizer) else ():
            held = value.values() if isinstance(value, dict) else value
            for one in held if isinstance(value, list | tuple | dict) else [value]:
                if isinstance(one, Optimizer) and all(one is not other for other in found):
                    found.append(one)
    return found


def _all_groups(optimizer: Any) -> list[dict[str, Any]]:
    """The parameter groups of all parts; parts may share them."""
    return list({id(group): group for part in parts_of(optimizer) for group in part.param_groups}.values())


def _places(optimizer: Any) -> Iterator[tuple[str, Any, dict[str, Any], Tensor]]:
    """(start of the slots' names, part, its group, parameter) of all state that parts may have."""
    seen: list[Any] = []
    for number, part in enumerate(parts_of(optimizer)):
        if any(part.state is state for state in seen):
            continue
        seen.append(part.state)
        prefix = f"{number}." if number else ""
        yield from ((prefix, part, group, p) for group in part.param_groups for p in group["params"])


def _slots(optimizer: Any) -> Iterator[tuple[dict[str, Any], Tensor, str, Any]]:
    """(group, parameter, slot, value) of the state of all parts, and of what they keep in attributes."""
    kept = {id(part): list(kept_beside(part)) for part in parts_of(optimizer)}
    for prefix, part, group, p in _places(optimizer):
        yield from ((group, p, prefix + slot, value) for slot, value in part.state.get(p, {}).items())
        for name, kind, tensors in kept[id(part)]:
            yield from ((group, p, f"{prefix}{kind}{name}", value) for q, value in tensors if q is p)


def kept_beside(optimizer: Any) -> Iterator[tuple[str, str, list[tuple[Tensor, Tensor]]]]:
    """(attribute, kind, (parameter, tensor) pairs) of each list or dict beside ``Optimizer.state`` in which
    an optimizer keeps a tensor like each parameter."""
    if getattr(type(optimizer), "state_dict", None) is not Optimizer.state_dict:
        return  # it saves what it needs
    held = [p for group in optimizer.param_groups for p in group["params"]]
    known = set(map(id, held))
    for name, value in vars(optimizer).items():
        if type(value) in (list, tuple) and value and len(value) == len(held):
            kind, pairs = _LIST, list(zip(held, value, strict=True))
        elif isinstance(value, dict) and value and all(id(key) in known for key in value):
            kind, pairs = _DICT, list(value.items())
        else:
            continue
        if all(
            isinstance(tensor, Tensor) and tensor is not p and tensor.shape == p.shape for p, tensor in pairs
        ):
            yield name, kind, pairs


def _put_beside(optimizer: Any) -> None:
    """Move what `kept_beside` has found from the state of an optimizer to its attributes."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for p in [p for group in optimizer.param_groups for p in group["params"]]:
        state = optimizer.state.get(p, {})
        for slot in [slot for slot in state if slot.startswith((_LIST, _DICT))]:
            found.setdefault(slot, []).append((p, state.pop(slot)))
        if not state:
            optimizer.state.pop(p, None)
    for slot, pairs in found.items():
        is_list = slot.startswith(_LIST)
        values: Any = [value for _, value in pairs] if is_list else dict(pairs)
        setattr(optimizer, slot.removeprefix(_LIST if is_list else _DICT), values)


def _own_state(optimizer: Any, names: Mapping[int, str]) -> Any:
    """Return the optimizer's own ``state_dict``, with references in place of state that is exported by
    name; None where it is torch's."""
    if getattr(type(optimizer), "state_dict", None) in (None, Optimizer.state_dict):
        return None
    found = {
        id(value): {_REFERENCE: [names[id(p)], slot]}
        for _, p, slot, value in _slots(optimizer)
        if isinstance(value, Tensor)
    }
    return _mapped(optimizer.state_dict(), lambda value: found.get(id(value), value))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` applied to it, or else to what its containers hold."""
    changed = change(value)
    if changed is not value:
        return changed
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in value)
    return _copied(value)


def _load_own(optimizer: Any, own: Any, names: Mapping[int, str]) -> None:
    """Let the optimizer's own ``load_state_dict`` take what `_own_state` returned."""
    found = {(names[id(p)], slot): value for _, p, slot, value in _slots(optimizer)}

    def resolve(value: Any) -> Any:
        is_reference = isinstance(value, dict) and value.keys() == {_REFERENCE}
        return found[tuple(value[_REFERENCE])] if is_reference else value

    fixed = [{key: g[key] for key in IMPLEMENTATION | KIND if key in g} for g in _all_groups(optimizer)]
    optimizer.load_state_dict(_mapped(own, resolve))
    for group, values in zip(_all_groups(optimizer), fixed, strict=True):
        group.update(values)


def export_groups(optimizer: Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Hyper-parameters of each group, copied, with its parameters' names under ``names``.

    ``scalar_dtypes`` holds the dtypes of 0-dimensional state (``{"step": "float32"}``), as
    `BackendState.scalars` holds plain numbers.

    Args:
        names: ``id(parameter) -> canonical name``.

    Raises:
        UserError: a parameter is not the model's.
    """
    groups = []
    dtypes: dict[int, dict[str, str]] = {}
    for group, p, slot, value in _slots(optimizer):
        if isinstance(value, Tensor) and _is_scalar(p, slot, value):
            dtypes.setdefault(id(group), {})[slot] = str(value.dtype).removeprefix("torch.")
    for number, group in enumerate(_all_groups(optimizer)):
        exported = {key: _copied(value) for key, value in group.items() if key not in _LIVE}
        exported[NAMES] = [_name(p, names, number) for p in group["params"]]
        exported[SCALAR_DTYPES] = dtypes.get(id(group), {})
        groups.append(exported)
    own = _own_state(optimizer, names)
    if own is not None:
        groups[0][_OWN] = own
    return groups


def parameter_slots(
    optimizer: Optimizer, names: Mapping[int, str], scalars: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, str, Tensor]]:
    """(name, slot, tensor) of all state that has a shape; what has none goes into `scalars`."""
    for _, p, slot, value in _slots(optimizer):
        name = _name(p, names, 0)
        if isinstance(value, Tensor) and not _is_scalar(p, slot, value):
            yield name, slot, _dequantized(value)
        else:
            scalars.setdefault(name, {})[slot] = value.item() if isinstance(value, Tensor) else _copied(value)


def add_groups(
    reader: StateReader, optimizer: Any, names: Mapping[int, str], tensors: Mapping[str, Tensor]
) -> None:
    """Add the groups that the saved run has added to its optimizer: those of `tensors`, by name in the
    checkpoint, that `optimizer` does not hold. Nothing is added to an optimizer with other groups."""
    own = [{names.get(id(p), "") for p in group["params"]} for group in _all_groups(optimizer)]
    saved = [(group, _owners(group, reader)) for group in reader.groups]
    if len(parts_of(optimizer)) > 1 or not all(any(group == found for _, found in saved) for group in own):
        return
    for group, found in saved:
        if found and found <= tensors.keys() and not any(found & held for held in own):
            optimizer.add_param_group({"params": [tensors[name] for name in group[NAMES]]})


def check_groups(reader: StateReader, optimizer: Optimizer, names: Mapping[int, str]) -> Groups:
    """Match the optimizer's groups with the saved ones by their parameters' names.

    Args:
        names: ``id(parameter) -> name in the checkpoint``.

    Returns:
        (group of the optimizer, saved group) pairs.

    Raises:
        UserError: no saved group has the same parameters, or it is another kind of optimizer's.
    """
    if not reader.groups:
        raise UserError(
            "the checkpoint holds no optimizer state",
            remedy="Load the model's weights alone, or resume from another checkpoint",
        )
    left = list(reader.groups)
    pairs: Groups = []
    for number, group in enumerate(_all_groups(optimizer)):
        wanted = {_name(p, names, number) for p in group["params"]}
        match = next((saved for saved in left if wanted == _owners(saved, reader)), None)
        if match is None:
            raise _other_groups(number, wanted, reader)
        _check_family(number, group, match)
        left.remove(match)
        pairs.append((group, match))
    if left:
        raise UserError(
            f"the optimizer has {len(pairs)} parameter groups and the checkpoint {len(reader.groups)}",
            remedy="Build the optimizer with the same groups",
        )
    return pairs


def import_optimizer(
    reader: StateReader,
    optimizer: Optimizer,
    names: Mapping[int, str],
    pairs: Groups,
    dtypes: Mapping[str, torch.dtype],
    starts: Mapping[str, int] | None = None,
) -> None:
    """Create the optimizer's state and restore its hyper-parameters, `pairs` from `check_groups`.

    State that had its parameter's dtype when saved gets its parameter's dtype; other state, such
    as float32 moments of a bfloat16 parameter, keeps its own.

    Args:
        names: ``id(parameter) -> name in the checkpoint``.
        dtypes: saved dtype of each parameter by its name in the checkpoint. Parameters left out
            get no state: another rank holds them.
        starts: name in the checkpoint -> first element, where the optimizer holds a flat piece.
    """
    slots: dict[str, list[str]] = {}
    for key, name in reader.tensors():
        if key.startswith(_PREFIX):
            slots.setdefault(name, []).append(key.removeprefix(_PREFIX))
    for group, saved in pairs:
        restore_group(group, saved)
    for part in parts_of(optimizer):
        part.state.clear()
    saved_of = {id(group): saved for group, saved in pairs}
    for prefix, part, group, p in _places(optimizer):
        name, saved = names[id(p)], saved_of[id(group)]
        if name not in dtypes:
            continue
        state: dict[str, Any] = {}
        divided = is_sharded(p) and not getattr(part, WHOLE_STATE, False)
        for slot in _of_part(slots.get(name, []), prefix):
            value = _read_slot(reader, prefix + slot, name, p, starts or {}, divided)
            follows = value.is_floating_point() and value.dtype == dtypes[name]
            value = value.to(local_part(p).device, p.dtype if follows else value.dtype)
            state[slot] = wrap_like(p, value) if divided else value
        numbers, kinds = reader.scalars.get(name, {}), saved.get(SCALAR_DTYPES, {})
        for slot in _of_part(numbers, prefix):
            own_saved = {**saved, SCALAR_DTYPES: {slot: kinds.get(prefix + slot)}} if prefix else saved
            state[slot] = _scalar(part, group, own_saved, slot, numbers[prefix + slot], p)
        if state:
            part.state[p] = state
    for part in parts_of(optimizer):
        _put_beside(part)
    if _OWN in reader.groups[0]:
        _load_own(optimizer, reader.groups[0][_OWN], names)


def _of_part(slots: Iterable[str], prefix: str) -> list[str]:
    """Names of a part, without their `prefix`."""
    numbered = [(slot, slot.partition(".")) for slot in slots]
    if prefix:
        return [tail for _, (head, dot, tail) in numbered if head + dot == prefix]
    return [slot for slot, (head, dot, _) in numbered if not (dot and head.isdecimal())]


def _read_slot(
    reader: StateReader, slot: str, name: str, p: Tensor, starts: Mapping[str, int], divided: bool
) -> Tensor:
    """What the optimizer holds here of one saved tensor of its state."""
    key = _PREFIX + slot
    if name in starts:
        piece: Tensor = reader.read(key, name, starts[name], p.numel())
        return piece
    shape = reader.tensors()[key, name]
    if not divided:
        value: Tensor = reader.read(key, name).reshape(shape)
        return value
    if tuple(shape) != tuple(p.shape):
        raise UserError(
            f"'{name}' ({key}) of shape {tuple(shape)} is not elementwise state, so it cannot be sharded"
            " like its parameter",
            field="optimizer",
            allowed="optimizers that treat every element by itself, such as SGD, Adam and AdamW",
        )
    return read_part(reader, key, name, p)


def restore_group(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Set `group`'s hyper-parameters to the saved ones; a tensor stays the tensor it is."""
    for key, value in saved.items():
        current = group.get(key)
        if key in (NAMES, SCALAR_DTYPES, _OWN) or key in IMPLEMENTATION or (key in KIND and key in group):
            continue
        if isinstance(current, Tensor):
            with torch.no_grad():
                current.copy_(torch.as_tensor(value))
        elif isinstance(value, Tensor) and isinstance(current, float):
            group[key] = float(value)
        else:
            group[key] = _copied(value)


def _is_scalar(p: Tensor, slot: str, value: Tensor) -> bool:
    # All state of a 0-dimensional parameter has no dimension; only its step is a counter.
    return value.dim() == 0 and (p.dim() > 0 or slot.rpartition(".")[2] == "step")


def _scalar(
    optimizer: Optimizer, group: Mapping[str, Any], saved: Mapping[str, Any], slot: str, value: Any, p: Tensor
) -> Any:
    """A number as this optimizer keeps it: torch's own keep 0-dimensional tensors."""
    dtype = saved.get(SCALAR_DTYPES, {}).get(slot)
    if SCALAR_DTYPES not in saved and slot == "step" and type(optimizer).__module__.startswith("torch.optim"):
        dtype = "float64" if torch.get_default_dtype() == torch.float64 else "float32"
    if dtype is None:
        return _placed(_copied(value), p.device)
    on_device = group.get("capturable") or group.get("fused")
    return torch.tensor(value, dtype=getattr(torch, dtype), device=p.device if on_device else "cpu")


def _dequantized(value: Tensor) -> Tensor:
    """State of fewer bits (torchao) as numbers of the dtype that it stands for; others as they are."""
    if hasattr(value, "__tensor_flatten__") and hasattr(value, "qmap"):
        return value.dequantize().to(value.dtype)
    return value


def _placed(value: Any, device: torch.device) -> Any:
    """Tensors inside lists, tuples and dicts moved to `device` (LBFGS keeps such histories)."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(_placed(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _placed(item, device) for key, item in value.items()}
    return value


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _name(p: Tensor, names: Mapping[int, str], group: int) -> str:
    if id(p) not in names:
        raise UserError(
            f"parameter group {group} of the optimizer holds a parameter of shape {tuple(p.shape)} that is"
            " not the model's, so that it has no name in a checkpoint",
            field="optimizer",
            remedy="Make it a parameter of the model",
        )
    return names[id(p)]


def _owners(saved: Mapping[str, Any], reader: StateReader) -> set[str]:
    return {reader.aliases.get(name, name) for name in saved[NAMES]}


def _other_groups(number: int, wanted: set[str], reader: StateReader) -> UserError:
    nearest = max((_owners(saved, reader) for saved in reader.groups), key=lambda names: len(names & wanted))
    return UserError(
        f"parameter group {number} of the optimizer has no counterpart in the checkpoint: of the nearest"
        f" saved group it lacks {sorted(nearest - wanted)[:3]}"
        f" and has in addition {sorted(wanted - nearest)[:3]}",
        field="optimizer",
        remedy="Build the optimizer with the same parameter groups",
    )


def _check_family(number: int, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    here, there = _FAMILY & group.keys(), _FAMILY & saved.keys()
    if here != there:
        raise UserError(
            f"the checkpoint is of another kind of optimizer: parameter group {number} has"
            f" {sorted(here) or 'none'} where the checkpoint has {sorted(there) or 'none'}",
            field="optimizer",
            remedy="Resume with the optimizer that was saved",
        )
    for key in sorted(group.keys() & saved.keys()):
        if not same_kind(group[key], saved[key]):
            raise UserError(
                f"parameter group {number} has {key}={shown(saved[key])} in the checkpoint, and"
                f" {key}={shown(group[key])} in the optimizer",
                field="optimizer",
                remedy="Resume from an older checkpoint",
            )


def same_kind(own: Any, saved: Any) -> bool:
    """Whether `saved` can take the place of a number or of several numbers, `own`; True of other values."""
    if isinstance(own, list | tuple) and own and all(map(_is_number, own)):
        if not isinstance(saved, list | tuple):
            return False
        fits = isinstance(own, list) or len(own) == len(saved)
        return fits and all(map(_is_number, saved))
    return saved is None or not _is_number(own) or _is_number(saved)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Tensor)
