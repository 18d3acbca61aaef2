"""State of low-communication training in checkpoints: what each replica saves, and how a run resumes from it.

Under the keys of every checkpoint are the anchors, as the model, and the optimizer state of rank 0: a whole
state that any other run can read where all ranks have the same weights. Beside it, each replica has:

==================================  =====================================================================
``low_communication.parameter``     its own parameters, and ``.buffer`` its buffers, where they are apart
``low_communication.optimizer.*``   its own optimizer state
``low_communication.counters``      steps and samples since the last exchanges, and the optimizer's numbers
==================================  =====================================================================

and all of them together ``.velocity``, the outer momentum, and ``.delta``, what an exchange under way brings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distributed.checkpoint.codec import decode_json, encode
from distributed.checkpoint.optimizer_state import export_groups, parameter_slots
from distributed.checkpoint.rank_local import Replica, export_rank_local, read_rank_local, saved_kinds
from distributed.checkpoint.staging_buffers import to_host
from distributed.checkpoint.torch_state import import_replicated, named_tensors
from distributed.interfaces.state import BackendState, Chunk, StateReader
from distributed.system.tensors import assign_values
from distributed.training.low_communication.merging import Merging
from distributed.training.low_communication.outer_step import divide, share_of, take_outer_step, wide

__all__ = ["add_own_state", "is_apart", "restore_own_state"]

_PREFIX = "low_communication."
PARAMETER, _BUFFER = f"{_PREFIX}parameter", f"{_PREFIX}buffer"
_VELOCITY, _DELTA = f"{_PREFIX}velocity", f"{_PREFIX}delta"
_OPTIMIZER, _COUNTERS, _RANK = f"{_PREFIX}optimizer.", f"{_PREFIX}counters", "rank"
_COUNTERS_KEY = re.compile(r"replica\.(\d{1,6})\.of\.(\d{1,6})\." + re.escape(_COUNTERS))


# -- saving ------------------------------------------------------------------------------


def add_own_state(
    state: BackendState, merging: Merging, module: nn.Module, optimizer: torch.optim.Optimizer, place: Replica
) -> None:
    """Add this replica's part to `state`, which holds the anchors as the model. Ends exchanges under way,
    whose result is kept until it is due: collective in that case.

    Args:
        place: index and number of the replica.
    """
    scalars = _add_optimizer(state, module, optimizer, place)
    for fragment in merging.fragments:
        fragment.wait()
    own = Replica(place.index, place.number)
    shared = Replica(0, 1, place.index, place.number)
    apart = {n: merging.parameters[n] for f in merging.fragments if f.apart for n in f.names}
    under_way = {n: d for f in merging.fragments for n, d in f.deltas.items()}
    buffers = _buffers(module) if merging.step else {}
    for kind, tensors, replica in (
        (PARAMETER, apart, own),
        (_BUFFER, buffers, own),
        (_VELOCITY, merging.velocities, shared),
        (_DELTA, under_way, shared),
    ):
        state.chunks += export_rank_local(kind, tensors, tensors, dict.fromkeys(tensors, replica))
    text = json.dumps(encode(_counters(merging) | {"scalars": scalars}, _COUNTERS), allow_nan=False)
    data = torch.frombuffer(bytearray(text.encode("ascii")), dtype=torch.uint8)
    state.chunks.append(Chunk(_RANK, own.key(_COUNTERS), (len(data),), 0, data))


def _add_optimizer(
    state: BackendState, module: nn.Module, optimizer: torch.optim.Optimizer, place: Replica
) -> dict[str, Any]:
    """Add the optimizer state: as this replica's, and of replica 0 as the run's. Returns its numbers."""
    names = {id(tensor): name for name, tensor in named_tensors(module)[0].items()}
    state.groups = export_groups(optimizer, names)
    scalars: dict[str, dict[str, Any]] = {}
    for name, slot, tensor in parameter_slots(optimizer, names, scalars):
        shape, data = tuple(tensor.shape), to_host(tensor.detach().reshape(-1))
        keys = [Replica(place.index, place.number).key(_OPTIMIZER + slot)]
        keys += [f"optimizer.{slot}"] if place.index == 0 else []
        state.chunks += [Chunk(name, key, shape, 0, data) for key in keys]
    state.scalars = scalars if place.index == 0 else {}
    return scalars


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """Persistent buffers by canonical name."""
    return {n: t for n, t in named_tensors(module)[0].items() if not isinstance(t, nn.Parameter)}


def _counters(merging: Merging) -> dict[str, Any]:
    rule = merging.rule
    return {
        "layout": [rule.fragments, rule.overlap],
        "step": merging.step,
        "weight": float(merging.weight),
        "fragments": [
            {"weight": float(f.weight), "apart": f.apart, "begun": f.begun} for f in merging.fragments
        ],
    }


# -- loading -----------------------------------------------------------------------------


def restore_own_state(
    reader: StateReader,
    merging: Merging,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    place: Replica,
) -> None:
    """Load a state that low-communication training, or any other run, has saved.

    As many replicas resume with the same bits, if the model is divided into the same fragments. Otherwise all
    ranks are made equal, as by `Merging.merge` on the ranks that saved: each begins with their parameters
    after one more outer step, the mean of their optimizer states, and the numbers of the first one's.

    Args:
        place: index and number of the replica.
    """
    saved = _read_counters(reader)
    layout = [merging.rule.fragments, merging.rule.overlap]
    exact = len(saved) == place.number and saved[0]["layout"] == layout
    replicas = range(len(saved))
    view = _OwnOptimizer(reader, [place.index] if exact else replicas, saved) if saved else reader
    import_replicated(view, module, optimizer)
    merging.restart()
    _read_shared(reader, merging)
    if exact:
        _resume(reader, merging, module, place, saved[place.index])
    elif saved:
        _merge_saved(reader, merging, module, saved)


def _read_counters(reader: StateReader) -> list[dict[str, Any]]:
    """The counters of each replica; empty if the state is not of low-communication training."""
    keys = [key for key, name in reader.tensors() if name == _RANK and _COUNTERS_KEY.fullmatch(key)]
    packed = (reader.read(key, _RANK).view(torch.uint8) for key in sorted(keys, key=_index))
    return [decode_json(data.numpy().tobytes()) for data in packed]


def _index(key: str) -> int:
    match = _COUNTERS_KEY.fullmatch(key)
    assert match is not None
    return int(match[1])


def _read_shared(reader: StateReader, merging: Merging) -> None:
    found = _tensors(_VELOCITY, reader, merging.parameters, Replica())
    for name, velocity in merging.velocities.items():
        if name in found:
            velocity.copy_(found[name])


def _tensors(
    kind: str, reader: StateReader, like: Mapping[str, Tensor], replica: Replica
) -> dict[str, Tensor]:
    return read_rank_local(kind, reader, like, dict.fromkeys(like, replica), keep="mean")[0]


@torch.no_grad()
def _resume(
    reader: StateReader, merging: Merging, module: nn.Module, place: Replica, saved: Mapping[str, Any]
) -> None:
    buffers = _buffers(module)
    for name, value in _tensors(PARAMETER, reader, merging.parameters, place).items():
        assign_values(merging.parameters[name], value)
    for name, value in _tensors(_BUFFER, reader, buffers, place).items():
        assign_values(buffers[name], value)
    deltas = _tensors(_DELTA, reader, merging.parameters, Replica())
    merging.step, merging.weight = saved["step"], saved["weight"]
    for fragment, counted in zip(merging.fragments, saved["fragments"], strict=True):
        fragment.weight, fragment.apart, fragment.begun = (
            counted["weight"],
            counted["apart"],
            counted["begun"],
        )
        own = [name for name in fragment.names if name in deltas]
        fragment.deltas = {name: deltas[name].to(merging.parameters[name].device) for name in own}


@torch.no_grad()
def _merge_saved(
    reader: StateReader, merging: Merging, module: nn.Module, saved: Sequence[Mapping[str, Any]]
) -> None:
    """Do for the ranks that saved what `Merging.merge` does."""
    number = len(saved)
    sizes = {name: p.numel() for name, p in merging.parameters.items()}
    parts = divide(sizes, saved[0]["layout"][0])
    deltas = _tensors(_DELTA, reader, merging.parameters, Replica())
    for part, names in enumerate(parts):
        shares = _shares([one["fragments"][part]["weight"] for one in saved])
        apart = saved[0]["fragments"][part]["apart"]
        for name in names:
            own = [_of_replica(PARAMETER, reader, merging.parameters, name, i, number) for i in range(number)]
            _merge_one(merging, name, deltas.get(name), own if apart else [], shares)
    shares = _shares([one["weight"] for one in saved])
    for name, buffer in _buffers(module).items():
        values = [_of_replica(_BUFFER, reader, {name: buffer}, name, i, number) for i in range(number)]
        known = [value for value in values if value is not None]
        if known and buffer.is_floating_point():
            mean = sum(v.double() * share for v, share in zip(known, shares, strict=True))
            assign_values(buffer, torch.as_tensor(mean).to(buffer))
    merging.restart()


def _merge_one(
    merging: Merging, name: str, arrived: Tensor | None, own: list[Tensor | None], shares: Sequence[float]
) -> None:
    anchor, velocity, rule = merging.anchors[name], merging.velocities.get(name), merging.rule
    values = [value.to(anchor.device) for value in own if value is not None]
    if arrived is not None:
        take_outer_step(anchor, arrived.to(anchor.device), velocity, rule)
        # Without mixing, all ranks take what has arrived.
        mixed = [rule.mixing * value + (1.0 - rule.mixing) * anchor for value in values]
        values = mixed if rule.mixing else []
    if values:
        dtype = wide(anchor.dtype)
        deltas = ((anchor.to(dtype) - v.to(dtype)) * share for v, share in zip(values, shares, strict=True))
        take_outer_step(anchor, sum(deltas, start=torch.zeros_like(anchor, dtype=dtype)), velocity, rule)
    assign_values(merging.parameters[name], anchor)


def _of_replica(
    kind: str, reader: StateReader, like: Mapping[str, Tensor], name: str, index: int, number: int
) -> Tensor | None:
    return _tensors(kind, reader, {name: like[name]}, Replica(index, number)).get(name)


def _shares(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [share_of(weight, total, len(weights)) for weight in weights]


class _OwnOptimizer(StateReader):
    """A saved state whose optimizer state is that of one replica, or the mean of those of several.

    Args:
        replicas: which.
        counters: of all replicas.
    """

    def __init__(
        self, reader: StateReader, replicas: Sequence[int], counters: Sequence[Mapping[str, Any]]
    ) -> None:
        self._reader = reader
        self.omitted, self.groups, self.aliases = reader.omitted, reader.groups, reader.aliases
        self.scaler = reader.scaler
        self._sources: dict[tuple[str, str], list[str]] = {}
        self._shapes = {
            (key, name): shape
            for (key, name), shape in reader.tensors().items()
            if not key.startswith("optimizer.")
        }
        self.scalars = {}
        for index in replicas:
            prefix = Replica(index, len(counters)).key(_OPTIMIZER)
            for (key, name), shape in reader.tensors().items():
                if key.startswith(prefix):
                    own = "optimizer." + key.removeprefix(prefix), name
                    self._shapes[own] = shape
                    self._sources.setdefault(own, []).append(key)
            self.scalars = {**counters[index]["scalars"], **self.scalars}

    def tensors(self) -> Mapping[tuple[str, str], tuple[int, ...]]:
        return self._shapes

    def read(self, key: str, name: str, start: int = 0, length: int | None = None) -> Any:
        sources = self._sources.get((key, name))
        if sources is None:
            return self._reader.read(key, name, start, length)
        first, *others = (self._reader.read(source, name, start, length) for source in sources)
        if not others:
            return first
        total = sum((part.double() for part in others), start=first.double())
        return (total / len(sources)).to(first.dtype)


def is_apart(reader: StateReader) -> bool:
    """Whether parameters differed between the ranks that saved a state."""
    return PARAMETER in saved_kinds(reader)
