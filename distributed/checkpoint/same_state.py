"""Whether a checkpoint on disk holds a state, so that it need not be written once more."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from distributed.checkpoint.codec import encode
from distributed.checkpoint.file_names import shard_file
from distributed.checkpoint.reader import PortableReader
from distributed.checkpoint.writer import entries_of
from distributed.errors import UserError
from distributed.interfaces.state import BackendState

__all__ = ["holds_state"]

_SHARED = ("progress", "order", "scheduler", "lineage", "frozen", "callbacks", "omitted")


def holds_state(
    path: str,
    rank: int,
    size: int,
    state: BackendState,
    extra: Mapping[str, Any],
    rank_extra: Mapping[str, Any],
) -> bool:
    """Whether the checkpoint at `path` is what `PortableCheckpointer.save` would write on this rank: the same
    bytes of model and optimizer by their checksums, and the same values beside them. False of a damaged one.
    """
    try:
        reader = PortableReader(path)
        if reader.world_size != size:
            return False
        shard = shard_file(rank, size)
        saved = [entry for entry in reader.entries() if entry.file == shard]
        pairs: list[tuple[Any, Any]] = [(reader.rank_extra(rank), rank_extra)]
    except (UserError, OSError):
        return False
    pairs += [(reader.extra.get(key), extra.get(key)) for key in _SHARED]
    if rank == 0:
        pairs.append((_plain(reader.groups), _plain(state.groups)))
    if any(_canonical(one) != _canonical(other) for one, other in pairs):
        return False
    return saved == entries_of(state.chunks, shard)


def _plain(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Hyperparameters alone: what ranks add of their scalars is complete in the checkpoint only."""
    return [{key: value for key, value in group.items() if key != "scalar_dtypes"} for group in groups]


def _canonical(value: Any) -> str:
    return json.dumps(encode(value, "state"), sort_keys=True)
