"""Detect replicas whose parameters differ: a checksum per rank, then the ranks and the parameter."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distributed.communication.equal_values import digest_of
from distributed.errors import WorkerError
from distributed.interfaces.backend import Backend
from distributed.resilience.hang_diagnosis import name_ranks

_ROUNDING = 1e-6
"""Relative difference of a parameter's sum that rounding alone explains: hosts with other processors
compute other last bits. A replica that took a different step differs by more than this."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = 0x9E3779B97F4A7C15
_EXACT = (1 << 52) - 1


class _Print(NamedTuple):
    """Sums over one parameter: of its bits, its values and their absolute values."""

    bits: int
    total: float
    size: float


def trained(module: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters of `module` by name, detached."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def checksum(parameters: Mapping[str, Tensor]) -> float:
    """An integer checksum below 2**52, which a float64 holds exactly.

    Reads every parameter once; synchronises with the device once.
    """
    if not parameters:
        return 0.0
    sums = torch.stack([sum_of_bits(tensor) for tensor in parameters.values()]).tolist()
    total = 0
    for value in sums:
        total = (total * 31 + (value & 0xFFFFFFFFFFFFFFFF)) * _MIX & 0xFFFFFFFFFFFFFFFF
    return float((total >> 12 & _EXACT) or 1)


@torch.no_grad()
def sum_of_bits(tensor: Tensor) -> Tensor:
    """A whole number that differs when a value does; of a tensor that ranks divide, of this rank's part."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
    if local.is_meta or local.layout != torch.strided:
        return torch.zeros((), dtype=torch.int64)
    local = torch.view_as_real(local) if local.is_complex() else local
    return local.view(_BITS[local.element_size()]).sum(dtype=torch.int64)


def explain_divergence(backend: Backend, step: int) -> WorkerError | str:
    """Find out which replicas differ after a checksum mismatch. Collective.

    Args:
        backend: backend whose `replicated` is not None.
        step: number of the last optimizer step.

    Returns:
        The same on every rank: an error to raise, which names the ranks that differ from most and the
        first differing parameter; or a remark if it may be rounding alone.
    """
    world, own = backend.world, _prints(backend.replicated() or {})
    # The sums of all parameters of all ranks would not fit into the memory of one.
    digest, own_set = digest_of([part.bits for part in own.values()]), backend.replica_set[0]
    found = backend.gather_objects((world.host, os.getpid(), digest, own_set))
    sets = [part[3] for part in found]
    chosen = next(s for s in sets if len({part[2] for part in found if part[3] == s}) > 1)
    keys = [part[2] if part[3] == chosen else None for part in found]
    number = Counter(key for key in keys if key is not None)
    # On a tie the lowest rank's, because its parameters are the ones that are saved.
    usual = max(number, key=lambda key: (number[key], key == next(k for k in keys if k is not None)))
    reference = backend.broadcast_object(own, keys.index(usual))
    odd = [rank for rank, key in enumerate(keys) if key not in (usual, None)]
    rank = odd[0]
    first = backend.broadcast_object(own, rank)
    names = [name for name in reference if first[name].bits != reference[name].bits]
    off = max(backend.gather_objects(_distance(own, reference) if own_set == chosen else 0.0))
    what = (
        f"{name_ranks(odd)} ({found[rank][0]}, pid {found[rank][1]})"
        f" {'differ' if len(odd) > 1 else 'differs'} from the other ranks: after step {step},"
        f" {len(names)} of {len(reference)} parameters {'differ' if len(names) > 1 else 'differs'};"
        f" the first parameter that differs is '{names[0]}'"
    )
    if off <= _ROUNDING:
        return f"{what}; the relative difference is {off:.0e}: rounding, if the hosts' processors differ"
    tie = (
        " With two copies it is impossible to determine which one is correct."
        if len(number) == sum(number.values()) == 2
        else ""
    )
    return WorkerError(
        f"{what}.{tie} Try: change parameters in a callback, a hook or a custom optimizer in the same way on"
        " all ranks, draw no random numbers in an update, and check the memory of that host; or set"
        " divergence_check_steps=None",
        rank=rank,
        host=found[rank][0],
        exc_type="Divergence",
        phase="record",
        step=step,
    )


def _prints(parameters: Mapping[str, Any]) -> dict[str, _Print]:
    return {
        name: _Print(int(sum_of_bits(p)), float(p.double().sum()), float(p.double().abs().sum()))
        for name, p in parameters.items()
    }


def _distance(prints: Mapping[str, _Print], reference: Mapping[str, _Print]) -> float:
    """Largest relative difference of the sums; infinite for NaN."""
    shares: Sequence[float] = [
        max(abs(one.total - other.total), abs(one.size - other.size)) / max(other.size, 1e-30)
        for one, other in ((prints[name], reference[name]) for name in reference)
    ]
    return max(share if share == share else float("inf") for share in shares)
