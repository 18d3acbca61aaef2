"""Torch models to and from the neutral form, by name: replicated ones (serial, DDP, Horovod) and
those whose parameters are DTensors (FSDP2, tensor parallelism).
"""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distributed.checkpoint.codec import decode_json, encode
from distributed.checkpoint.dtensor import is_sharded, local_part, own_copies, own_shares, read_part
from distributed.checkpoint.optimizer_state import (
    add_groups,
    check_groups,
    export_groups,
    import_optimizer,
    parameter_slots,
)
from distributed.checkpoint.random_state import capture_rng, restore_rng
from distributed.checkpoint.schema import EXTRA_STATE
from distributed.checkpoint.staging_buffers import to_host
from distributed.checkpoint.weight_digests import add_digests, check_omitted, weight_digests
from distributed.errors import UserError
from distributed.interfaces.state import BackendState, Chunk, StateReader
from distributed.system.tensors import assign_values

__all__ = [
    "Part",
    "canonical_name",
    "capture_rng",
    "check_shapes",
    "export_replicated",
    "few",
    "fill_model",
    "import_replicated",
    "load_full_model",
    "named_tensors",
    "report_differences",
    "restore_rng",
    "same_tensors",
    "stored_names",
]

logger = logging.getLogger("distributed")

MODEL = "model"
Pieces = Mapping[Tensor, tuple[str, int]]
Parts = Mapping[Tensor, "Part"]
Copies = Callable[[str, Tensor], tuple[int, int]]
# Components that a wrapper adds and no user wrote: DDP, torch.compile, activation checkpointing.
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module"}


def canonical_name(name: str) -> str:
    """``module._orig_mod.layer.weight`` -> ``layer.weight``: the name without any wrapper's part."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and persistent buffers by canonical name.

    Returns:
        (tensors, aliases): every tensor once, under the first of its names; the other names of
        tied tensors -> that name.

    Raises:
        UserError: two tensors have the same canonical name.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    owners: dict[int, str] = {}
    for raw, tensor in _all_tensors(model):
        name = canonical_name(raw)
        owner = owners.setdefault(id(tensor), name)
        if tensors.get(name, tensor) is not tensor or aliases.get(name, owner) != owner:
            raise UserError(
                f"two tensors of the model are called '{name}' once wrappers are taken away",
                got=raw,
                remedy="Rename a submodule called 'module'",
            )
        if owner == name:
            tensors[name] = tensor
        else:
            aliases[name] = owner
    return tensors, aliases


class Part(NamedTuple):
    """What this rank holds of a parameter, where that is not the parameter's own data.

    Attributes:
        shape: of the whole parameter.
        start: the first element of the range in the flattened parameter.
        data: the range, 1-dimensional; live. It may be wider than the parameter (masters).
    """

    shape: tuple[int, ...]
    start: int
    data: Tensor


def _everything(name: str) -> bool:
    return True


def export_replicated(
    model: nn.Module,
    optimizer: Optimizer | None,
    scaler_state: dict[str, Any] | None,
    rank: int,
    size: int,
    *,
    pieces: Pieces | None = None,
    parts: Parts | None = None,
    held: Callable[[str], bool] = _everything,
    copies: Copies | None = None,
    leads: Callable[[str], bool] | None = None,
) -> BackendState:
    """The share of one of `size` ranks that hold the same, cloned to the CPU.

    Parameters and optimizer tensors are flattened and cut into `size` slices; of a DTensor, a
    rank gives what it holds, or a slice of that if others hold the same. Buffers go whole with
    rank 0. Frozen parameters are included, tied ones once. Without collectives.

    Args:
        model: with all its names, also of what this rank does not hold.
        optimizer: over the model's parameters, or over `pieces` of them.
        scaler_state: of the gradient scaler.
        rank: index of this rank among those that hold the same.
        size: number of those.
        pieces: what the optimizer holds instead of a parameter: a flat piece of it ->
            (the parameter's canonical name, the piece's first element).
        parts: parameters of which each rank holds a range of its own -> that range.
        held: whether this rank holds the tensor or module of that canonical name; ranks that
            share a model between them (pipeline stages) each hold a part.
        copies: name, tensor -> index of this rank among those that hold the same elements of it, and their
            number. None: as the tensor's own mesh states; `rank` and `size` if it is not sharded.
        leads: whether this rank, of those that hold the tensor or module of a name, gives what is not cut:
            buffers, extra state, numbers of the optimizer. None: rank 0.

    Raises:
        UserError: the optimizer holds a parameter that is not the model's.
    """
    tensors, aliases = named_tensors(model)
    state = BackendState(aliases=aliases, scaler=copy.deepcopy(scaler_state))
    parts = parts or {}

    def cut(name: str, key: str, tensor: Tensor, at_once: bool = False) -> list[Chunk]:
        if at_once and not is_sharded(tensor):
            return _cut(name, key, tensor, 0, 1) if first(name) else []
        if copies is not None:
            return _cut(name, key, tensor, *copies(name, tensor))
        return _cut(name, key, tensor, *(own_copies(tensor) if is_sharded(tensor) else (rank, size)))

    first = leads or (lambda _: rank == 0)

    for name, tensor in tensors.items():
        if not held(name):
            continue
        if tensor in parts:
            state.chunks += _range(name, MODEL, parts[tensor])
        else:
            state.chunks += cut(name, MODEL, tensor, at_once=not isinstance(tensor, nn.Parameter))
    for name, packed in packed_extra_states(model):
        if held(name):
            state.chunks += cut(name, EXTRA_STATE, packed, at_once=True)
    if optimizer is not None:
        names, starts = _optimizer_names(tensors, pieces or {})
        state.groups = export_groups(optimizer, names)
        for name, slot, tensor in parameter_slots(optimizer, names, state.scalars):
            key = f"optimizer.{slot}"
            if not held(name):
                continue
            if name in starts:
                shape = _shape(tensors[name], parts)
                state.chunks += _range(name, key, Part(shape, starts[name], tensor))
            else:
                state.chunks += cut(name, key, tensor)
        state.scalars = {name: s for name, s in state.scalars.items() if held(name) and first(name)}
    return state


def import_replicated(
    reader: StateReader,
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    pieces: Pieces | None = None,
    parts: Parts | None = None,
    held: Callable[[str], bool] = _everything,
) -> None:
    """Fill `model` and `optimizer` in place from what any backend saved.

    Nothing is changed before all names and shapes were found to match. Parameters that the checkpoint leaves
    out stay as they are. Floating-point tensors
    are cast to the model's dtype; with equal dtypes the bits are the same. Implementation flags
    of the optimizer (``fused``, ``foreach``...) stay as they are.

    Args:
        model: filled whole, except for what `held` leaves out.
        optimizer: filled likewise; None fills the model alone.
        pieces: as in `export_replicated`; only these ranges of optimizer state are read.
        parts: as in `export_replicated`; of these parameters the ranges are filled, nothing else.
        held: as in `export_replicated`.

    Raises:
        UserError: names, shapes or groups differ (the message lists them), or stored bytes are damaged.
    """
    tensors, aliases = named_tensors(model)
    saved = {name: tensor for name, tensor in tensors.items() if name not in reader.omitted}
    stored = stored_names(reader, saved, aliases)
    here = {name: tensor for name, tensor in saved.items() if held(name)}
    parts = parts or {}
    check_shapes(reader, saved, stored, here, parts)
    if optimizer is not None:
        stored |= {name: name for name in tensors.keys() - saved.keys()}
        names, starts = _optimizer_names(tensors, pieces or {})
        names = {number: stored[name] for number, name in names.items()}
        if not pieces:
            add_groups(reader, optimizer, names, {stored[name]: tensors[name] for name in tensors})
        pairs = check_groups(reader, optimizer, names)
        dtypes = fill_model(reader, model, here, stored, held, parts)
        import_optimizer(reader, optimizer, names, pairs, dtypes, {stored[n]: s for n, s in starts.items()})
    else:
        fill_model(reader, model, here, stored, held, parts)


def load_full_model(reader: StateReader, model: nn.Module) -> None:
    """Put the saved model, not the optimizer, into `model`, in place.

    Raises:
        UserError: names, shapes or what the checkpoint leaves out differ, or stored bytes are damaged.
    """
    kept = {name: tensor for name, tensor in named_tensors(model)[0].items() if name in reader.omitted}
    check_omitted(reader.omitted, add_digests([weight_digests(kept, 0, 1)]))
    import_replicated(reader, model, None)


def _all_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def packed_extra_states(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, bytes) of what modules return as `get_extra_state`."""
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            name = canonical_name(prefix)
            yield name, _packed(name, module.get_extra_state())


def _packed(name: str, extra: Any) -> Tensor:
    text = json.dumps(encode(extra, f"{name}.get_extra_state()"), allow_nan=False)
    return torch.frombuffer(bytearray(text.encode("ascii")), dtype=torch.uint8)


def _cut(name: str, key: str, tensor: Tensor, copy: int, copies: int) -> list[Chunk]:
    """Slice `copy` of `copies` of what this rank holds, or nothing when the slice is empty and another rank
    has one."""
    if copy >= copies:
        return []
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UserError(
            f"'{name}' ({key}) cannot be saved: it is a {tensor.layout} tensor of dtype"
            f" {tensor.dtype} on {tensor.device}",
            allowed="dense tensors that hold data",
        )
    shape = tuple(tensor.shape)
    return [
        Chunk(name, key, shape, share.start, to_host(share.data), share.offsets, share.lengths)
        for share in own_shares(tensor, copy, copies)
        if len(share.data) or (copy == 0 and not tensor.numel())
    ]


def _range(name: str, key: str, part: Part) -> list[Chunk]:
    count = math.prod(part.shape)
    if part.data.dim() != 1 or part.start + len(part.data) > count:
        raise UserError(
            f"'{name}' ({key}) of shape {tuple(part.data.shape)} is not elementwise state, so it"
            " cannot be sharded like its parameter",
            field="optimizer",
            allowed="optimizers that treat every element by itself, such as SGD, Adam and AdamW",
        )
    data = to_host(part.data.detach())
    return [Chunk(name, key, part.shape, part.start, data)] if len(data) or not count else []


def _shape(tensor: Tensor, parts: Parts) -> tuple[int, ...]:
    # Other frameworks' variables have a shape and no hash.
    return parts[tensor].shape if parts and tensor in parts else tuple(tensor.shape)


def _optimizer_names(tensors: Mapping[str, Tensor], pieces: Pieces) -> tuple[dict[int, str], dict[str, int]]:
    """(id of what the optimizer may hold -> name, name -> first element of this rank's piece)."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    names |= {id(piece): name for piece, (name, _) in pieces.items()}
    return names, dict(pieces.values())


def stored_names(
    reader: StateReader, tensors: Mapping[str, Any], aliases: Mapping[str, str]
) -> dict[str, str]:
    """The model's names -> the names under which the checkpoint holds them.

    Of a tied tensor's names, the one that saved it may have chosen another than this model.
    """
    stored = same_tensors(reader, tensors, aliases)
    missing = sorted(set(tensors) - set(stored))
    saved = {name for key, name in reader.tensors() if key == MODEL}
    unexpected = sorted(saved - set(stored.values()))
    if missing or unexpected:
        raise UserError(
            "the checkpoint is of another model."
            f" The model has, and the checkpoint lacks: {few(missing)}."
            f" The checkpoint has, and the model lacks: {few(unexpected)}",
            remedy="Build the model that was trained, or resume from another checkpoint",
        )
    return stored


def same_tensors(
    reader: StateReader, tensors: Mapping[str, Any], aliases: Mapping[str, str]
) -> dict[str, str]:
    """`stored_names` of those tensors that the checkpoint has."""
    saved = {name for key, name in reader.tensors() if key == MODEL}
    also = {owner: [alias for alias, o in aliases.items() if o == owner] for owner in aliases.values()}
    stored = {}
    for name in tensors:
        choices = [name, *also.get(name, [])]
        found = [n for n in (reader.aliases.get(c, c) for c in choices) if n in saved]
        if found:
            stored[name] = found[0]
    return stored


def report_differences(reader: StateReader, model: nn.Module, parts: Parts) -> None:
    """Warn of parameters that were one in the checkpoint, and of values that loading rounds.

    Args:
        parts: as in `export_replicated`.
    """
    tensors, aliases = named_tensors(model)
    untied = [name for name in tensors if reader.aliases.get(name, name) in tensors.keys() - {name}]
    if untied:
        logger.warning(
            "weights that were tied in the checkpoint are not in this model: %s and '%s' start with the same"
            " values and state",
            *(few(untied), reader.aliases[untied[0]]),
        )
    other: dict[tuple[str, str], list[str]] = {}
    for name, saved in same_tensors(reader, tensors, aliases).items():
        tensor = parts[tensors[name]].data if parts and tensors[name] in parts else tensors[name]
        dtypes = reader.dtype(MODEL, saved), str(tensor.dtype).removeprefix("torch.")
        if tensor.is_floating_point() and dtypes[0] != dtypes[1]:
            other.setdefault(dtypes, []).append(name)
    for (before, now), names in other.items():
        logger.warning(
            "the model has another dtype than the checkpoint: %s in the checkpoint and %s in this model,"
            " which trains on in its own (%s)",
            *(before, now, few(names)),
        )


def few(names: list[str]) -> str:
    """The first three of `names` in words."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(f"'{name}'" for name in names[:3]) + more) or "nothing"


def check_shapes(
    reader: StateReader,
    tensors: Mapping[str, Any],
    stored: Mapping[str, str],
    here: Mapping[str, Tensor],
    parts: Parts | None = None,
) -> None:
    """Raise a UserError when a saved shape is not the model's, or a tensor `here` holds no data."""
    shapes, parts = reader.tensors(), parts or {}
    wrong = [
        f"'{name}' has shape {_shape(tensor, parts)} in the model"
        f" and {shapes[MODEL, stored[name]]} in the checkpoint"
        for name, tensor in tensors.items()
        if _shape(tensor, parts) != shapes[MODEL, stored[name]]
    ]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(
            f"the checkpoint is of a model of another size: {'; '.join(wrong[:3])}{more}",
            remedy="Build the model with the sizes it was trained with",
        )
    unreal = [name for name, tensor in here.items() if tensor.is_meta]
    if unreal:
        raise UserError(
            f"the model holds no data yet: {few(unreal)} are on the meta device",
            remedy="Call model.to_empty(device=...) before loading",
        )


@torch.no_grad()
def fill_model(
    reader: StateReader,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    stored: Mapping[str, str],
    held: Callable[[str], bool] = _everything,
    parts: Parts | None = None,
) -> dict[str, torch.dtype]:
    """Copy tensors and extra state; returns the saved dtypes by stored name."""
    dtypes, parts = {}, parts or {}
    for name, tensor in tensors.items():
        part = parts.get(tensor)
        if part is None:
            value = read_part(reader, MODEL, stored[name], tensor)
        else:
            value = reader.read(MODEL, stored[name], part.start, len(part.data))
        if value.is_floating_point() != tensor.is_floating_point():
            raise UserError(
                f"'{name}' is {tensor.dtype} in the model and {value.dtype} in the checkpoint",
                remedy="Build the model with the dtypes it was trained with",
            )
        dtypes[stored[name]] = value.dtype
        assign_values(local_part(tensor) if part is None else part.data, value)
    modules = {
        canonical_name(prefix): module
        for prefix, module in model.named_modules()
        if type(module).set_extra_state is not nn.Module.set_extra_state and held(canonical_name(prefix))
    }
    for key, name in reader.tensors():
        if key == EXTRA_STATE and name in modules:
            modules[name].set_extra_state(_unpacked(name, reader.read(key, name)))
    return dtypes


def _unpacked(name: str, packed: Tensor) -> Any:
    try:
        return decode_json(packed.view(torch.uint8).numpy().tobytes())
    except ValueError as error:
        raise UserError(
            f"the checkpoint is damaged: {EXTRA_STATE} '{name}': {error}", remedy="Load an older checkpoint"
        ) from None
