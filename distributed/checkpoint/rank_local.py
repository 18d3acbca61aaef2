"""Tensors that differ between replicas of a parameter, such as the residual of a gradient codec.

Everything else in a checkpoint is the same on all ranks that hold a parameter. Such a tensor has the shape of
its parameter, and is saved once for each replica, under a key with the replica's index and their number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from distributed.checkpoint.dtensor import is_sharded, own_shares, read_part, wrap_like
from distributed.checkpoint.staging_buffers import to_host
from distributed.errors import UserError
from distributed.interfaces.state import Chunk, StateReader

__all__ = ["Replica", "export_rank_local", "read_rank_local", "saved_kinds"]

_KEY = re.compile(r"replica\.(\d{1,6})\.of\.(\d{1,6})\.(.+)")


@dataclass(frozen=True)
class Replica:
    """Position of this rank among the ranks that hold elements of one parameter.

    Attributes:
        index: which replica of the parameter this rank holds a part of.
        number: of replicas.
        copy: index of this rank among those that hold the same elements of the same replica.
        copies: number of those.
    """

    index: int = 0
    number: int = 1
    copy: int = 0
    copies: int = 1

    def key(self, kind: str) -> str:
        """The key under which this replica's tensor is saved."""
        return f"replica.{self.index}.of.{self.number}.{kind}"


def export_rank_local(
    kind: str,
    tensors: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    replicas: Mapping[str, Replica],
) -> Iterator[Chunk]:
    """The pieces of this rank's tensors, cloned to the CPU. Without collectives.

    Args:
        kind: what the tensors are, such as ``compression.residual``.
        tensors: by name of their parameter; each of the shape of what this rank holds of it.
        parameters: by name, as this rank holds them.
        replicas: by name, the position of this rank.
    """
    for name, tensor in tensors.items():
        parameter, replica = parameters[name], replicas[name]
        whole: Any = wrap_like(parameter, tensor) if is_sharded(parameter) else tensor.detach()
        for share in own_shares(whole, replica.copy, replica.copies):
            if len(share.data) or (replica.copy == 0 and not whole.numel()):
                data = to_host(share.data)
                shape = tuple(whole.shape)
                yield Chunk(name, replica.key(kind), shape, share.start, data, share.offsets, share.lengths)


def read_rank_local(
    kind: str,
    reader: StateReader,
    parameters: Mapping[str, Tensor],
    replicas: Mapping[str, Replica],
    *,
    keep: Literal["sum", "mean"],
) -> tuple[dict[str, Tensor], bool]:
    """What this rank holds of the saved tensors.

    As many replicas as were saved get their own, bit by bit. Another number of replicas gets equal tensors.

    Args:
        kind, parameters, replicas: as in `export_rank_local`; of the run that reads.
        keep: what another number of replicas keeps: the sum of all tensors, or their mean.

    Returns:
        (tensors by name on the CPU, of the shape of what this rank holds; whether each is the replica's own).
        Parameters of which nothing was saved are left out.

    Raises:
        UserError: a replica is missing in the saved state.
    """
    found: dict[str, Tensor] = {}
    exact = True
    saved = _saved(kind, reader)
    for name, parameter in parameters.items():
        keys = saved.get(name, [])
        if not keys:
            continue
        replica = replicas[name]
        if len(keys) == replica.number:
            found[name] = read_part(reader, keys[replica.index], name, parameter)
            continue
        exact = False
        first, *others = (read_part(reader, key, name, parameter) for key in keys)
        total = sum((part.double() for part in others), start=first.double())
        found[name] = (total / (replica.number if keep == "sum" else len(keys))).to(first.dtype)
    return found, exact


def saved_kinds(reader: StateReader) -> set[str]:
    """Kinds of rank-local tensors in a saved state."""
    return {match[3] for key, _ in reader.tensors() if (match := _KEY.fullmatch(key)) is not None}


def _saved(kind: str, reader: StateReader) -> dict[str, list[str]]:
    """Name of a parameter -> keys of its tensors, in the order of the replicas."""
    found: dict[str, dict[int, str]] = {}
    numbers: dict[str, int] = {}
    for key, name in reader.tensors():
        match = _KEY.fullmatch(key)
        if match is not None and match[3] == kind:
            found.setdefault(name, {})[int(match[1])] = key
            numbers[name] = int(match[2])
    for name, keys in found.items():
        if sorted(keys) != list(range(numbers[name])):
            raise UserError(
                f"the checkpoint has '{kind}' of '{name}' of only some of the replicas that saved it",
                got=f"{len(keys)} of {numbers[name]}",
                remedy="Resume from another checkpoint",
            )
    return {name: [keys[index] for index in sorted(keys)] for name, keys in found.items()}
