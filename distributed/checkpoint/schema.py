"""What a manifest and an index may hold: everything that a reader relies on, checked once when they are read.

A hash shows that a file is what was written. It does not show that a version of this program wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from distributed.checkpoint.chunk_index import ITEM_SIZES, LARGEST, ChunkEntry, is_count, is_shape
from distributed.checkpoint.codec import decode
from distributed.checkpoint.file_names import FORMAT, MANIFEST, MERGED, VERSION, rank_file
from distributed.system.strict_json import shown

__all__ = ["EXTRA_STATE", "Manifest", "parse_entries", "parse_manifest", "parse_rank_extra", "record_steps"]

EXTRA_STATE = "extra_state"
"""Key of the tensors that hold what modules return from ``get_extra_state``, as JSON."""

_FILE = re.compile(r"[A-Za-z0-9_.-]{1,255}")
_LONGEST_NAME = 10_000
_COUNTERS = ("epoch", "samples", "step", "total_samples")
_NUMBERS = (int, float)


@dataclass(frozen=True)
class Manifest:
    """A manifest, checked and decoded.

    Attributes:
        tensors: ``(key, name) -> (shape, dtype)``.
        files: name -> its size in bytes and its ``sha256`` (an index) or ``crc32`` (a shard).
        folder: directory of the files below the checkpoint; empty when it is the checkpoint's.
        index: name of the file with the indexes of all ranks; empty when there is none.
    """

    step: int
    world_size: int
    versions: dict[str, str]
    tensors: dict[tuple[str, str], tuple[tuple[int, ...], str]]
    files: dict[str, dict[str, Any]]
    folder: str
    index: str
    groups: list[dict[str, Any]]
    scalars: dict[str, dict[str, Any]]
    aliases: dict[str, str]
    scaler: dict[str, Any] | None
    extra: dict[str, Any]


def parse_manifest(content: Mapping[str, Any]) -> Manifest:
    """Check a manifest of this format and version.

    Raises:
        ValueError: what is wrong with it.
    """
    step, size = _count(content, "step"), _count(content, "world_size")
    files = _files(_dict(content, "files"))
    if content.get("indexes") != [rank_file(rank) for rank in range(min(size, len(files) + 1))]:
        raise ValueError(f"indexes is {shown(content.get('indexes'))}, not one file for each of {size} ranks")
    if not size or any("sha256" not in files.get(name, {}) for name in content["indexes"]):
        raise ValueError(f"files has no index of one of {size} ranks")
    tensors = _tensors(_list(content, "tensors"))
    stored = sum(facts["size"] for facts in files.values() if "crc32" in facts)
    needed = sum(prod(shape) * ITEM_SIZES[dtype] for shape, dtype in tensors.values())
    if stored != needed:
        raise ValueError(f"the tensors have {needed} bytes, and the shards {stored}")
    folder = content.get("folder", "")
    manifest = Manifest(
        step,
        size,
        _texts(content, "versions"),
        tensors,
        files,
        _plain(folder) if folder != "" else "",
        _merged(content, files),
        _decoded(content, "groups", list),
        _decoded(content, "scalars", dict),
        _texts(content, "aliases"),
        None if content.get("scaler") is None else _decoded(content, "scaler", dict),
        {name: _decode(value, f"extra.{name}") for name, value in _dict(content, "extra").items()},
    )
    _check_optimizer(manifest.groups, manifest.scalars)
    _check_extra(manifest.extra, step)
    return manifest


def parse_entries(index: Mapping[str, Any], manifest: Manifest, rank: int) -> list[ChunkEntry]:
    """The pieces in the index of one rank.

    Raises:
        ValueError: what is wrong with it.
    """
    own = {"format": FORMAT, "version": VERSION, "rank": rank, "world_size": manifest.world_size}
    for name, value in own.items():
        if index.get(name) != value:
            raise ValueError(f"{name} is {shown(index.get(name))}, not {value!r}")
    entries = [ChunkEntry.from_json(_is_dict(data, "a chunk")) for data in _list(index, "chunks")]
    for entry in entries:
        if (entry.shape, entry.dtype) != manifest.tensors.get((entry.key, entry.name)):
            raise ValueError(f"{shown(entry.name)} is not the tensor that the manifest describes")
        facts = manifest.files.get(entry.file, {})
        if "crc32" not in facts:
            raise ValueError(f"{shown(entry.file)} is no shard of this checkpoint")
        if entry.offset + entry.nbytes > facts["size"]:
            raise ValueError(f"a chunk of {shown(entry.name)} reaches beyond {entry.file}")
    return entries


def parse_rank_extra(index: Mapping[str, Any]) -> dict[str, Any]:
    """What one rank saved for itself: ``rng``, ``records`` and ``stream``, each may be missing.

    Raises:
        ValueError: what is wrong with it.
    """
    extra: dict[str, Any] = _decoded(index, "rank_extra", dict)
    if extra.get("rng") is not None:
        from distributed.checkpoint.random_state import check_rng

        check_rng(extra["rng"])
    if extra.get("records") is not None:
        records = _is_dict(extra["records"], "rank_extra.records")
        steps = records.get("steps")
        rows: list[Any] = [records.get("sums"), *steps] if isinstance(steps, list) else [None]
        if not all(isinstance(row, list | tuple) and all(map(_is_number, row)) for row in rows):
            raise ValueError("rank_extra.records is not of numbers")
        if len(rows[0]) != 2 or any(len(row) != 3 for row in rows[1:]):
            raise ValueError("rank_extra.records has other numbers than a step's loss, count and rate")
    return extra


def record_steps(index: Mapping[str, Any]) -> int | None:
    """Steps of the open epoch that a checked index has records of; None without records."""
    extra = index.get("rank_extra")
    records = extra.get("records") if isinstance(extra, dict) else None
    steps = records.get("steps") if isinstance(records, dict) else None
    return len(steps) if isinstance(steps, list) else None


def _merged(content: Mapping[str, Any], files: Mapping[str, Any]) -> str:
    name = content.get("index", "")
    if name != "" and (name != MERGED or "sha256" not in files.get(name, {})):
        raise ValueError(f"index is {shown(name)}, not a file of this checkpoint")
    return str(name)


# -- parts of a manifest -----------------------------------------------------------------------


def _files(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    for name, facts in found.items():
        if _plain(name) == MANIFEST:
            raise ValueError(f"files names {MANIFEST}")
        _count(_is_dict(facts, f"files.{name}"), "size")
        hashed = re.fullmatch("[0-9a-f]{64}", str(facts.get("sha256")))
        summed = is_count(facts.get("crc32")) and facts["crc32"] < 2**32
        if bool(hashed) == summed or ("sha256" in facts) == ("crc32" in facts):
            raise ValueError(f"files.{name} has no sha256 or crc32")
    if sum(facts["size"] for facts in found.values()) > LARGEST:
        raise ValueError("files has more bytes than any disk")
    return found


def _tensors(found: list[Any]) -> dict[tuple[str, str], tuple[tuple[int, ...], str]]:
    tensors = {}
    for item in found:
        key, name = (
            _name(_is_dict(item, "a tensor").get(part), f"a tensor's {part}") for part in ("key", "name")
        )
        shape, dtype = item.get("shape"), item.get("dtype")
        if not is_shape(shape):
            raise ValueError(f"the shape of {key} {name!r} is {shown(shape)}")
        if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
            raise ValueError(f"unknown dtype {shown(dtype)} of {key} {name!r}")
        tensors[key, name] = (tuple(shape), dtype)
    if len(tensors) != len(found):
        raise ValueError("a tensor is listed twice")
    return tensors


def _check_optimizer(groups: list[Any], scalars: dict[Any, Any]) -> None:
    for name, slots in scalars.items():
        if not isinstance(name, str) or not _has_names(slots):
            raise ValueError(f"scalars of {shown(name)} is {shown(slots)}")
    for group in groups:
        if not _has_names(group) or not _is_names(group.get("names")):
            raise ValueError(f"a group is {shown(group)}, not hyperparameters with names of parameters")
        dtypes = group.get("scalar_dtypes", {})
        if not _has_names(dtypes) or not all(isinstance(d, str) and d in ITEM_SIZES for d in dtypes.values()):
            raise ValueError(f"unknown dtype in the scalar_dtypes {shown(dtypes)} of a group")
        for name in group["names"]:
            slots = scalars.get(name, {})
            wrong = [slot for slot in dtypes if not isinstance(slots.get(slot, 0), int | float)]
            if wrong:
                raise ValueError(f"{shown(wrong[0])} of {shown(name)} is not a number")


def _check_extra(extra: dict[str, Any], step: int) -> None:
    progress = _is_dict(extra.get("progress"), "extra.progress")
    for name in _COUNTERS:
        if name in progress:
            _count(progress, name)
    if progress.get("step") != step:
        raise ValueError(f"extra.progress.step is {shown(progress.get('step'))}, not {step}")
    for name in ("best_metric", "best_accuracy"):
        if progress.get(name) is not None and not _is_number(progress[name]):
            raise ValueError(f"extra.progress.{name} is {shown(progress[name])}, not a number")
    for name in ("config", "model_files", "omitted", "frozen"):
        if extra.get(name) is not None and not _has_names(extra[name]):
            raise ValueError(f"extra.{name} is {shown(extra[name])}")
    order = extra.get("order")
    if order is not None and not (_has_names(order) and isinstance(order.get("name"), str)):
        raise ValueError(f"extra.order is {shown(order)}, not the name of an order")
    for name in ("omitted", "frozen"):
        if extra.get(name) is not None and not _is_names(extra[name].values()):
            raise ValueError(f"extra.{name} is {shown(extra[name])}, not digests")
    for name in ("files", "names"):
        texts = (extra.get("model_files") or {}).get(name, {})
        if not _has_names(texts) or not _is_names(texts.values()):
            raise ValueError(f"extra.model_files.{name} is {shown(texts)}")
    for name in ("lineage", "model_axes"):
        if extra.get(name) is not None:
            _name(extra[name], f"extra.{name}")
    if type(extra.get("best", False)) is not bool:
        raise ValueError(f"extra.best is {shown(extra['best'])}")
    callbacks = extra.get("callbacks")
    if callbacks is not None and not (isinstance(callbacks, list) and all(map(_is_callback, callbacks))):
        raise ValueError(f"extra.callbacks is {shown(callbacks)}")
    held = extra.get("held", {})
    if not isinstance(held, dict) or not all(map(_is_held, held.values())):
        raise ValueError(f"extra.held is {shown(held)}")


def _is_callback(entry: Any) -> bool:
    return isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[0], str)


def _is_held(entries: Any) -> bool:
    """True for the entries of `training.callback_state.save_attributes`."""
    keys = {"kind", "on_device", "value"}
    return isinstance(entries, dict) and all(
        isinstance(entry, dict) and entry.keys() == keys for entry in entries.values()
    )


# -- values ------------------------------------------------------------------------------------


def _is_dict(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {shown(value)}, not a mapping")
    return value


def _dict(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    return _is_dict(data.get(name), name)


def _list(data: Mapping[str, Any], name: str) -> list[Any]:
    value = data.get(name)
    if not isinstance(value, list):
        raise ValueError(f"{name} is {shown(value)}, not a list")
    return value


def _count(data: Mapping[str, Any], name: str) -> int:
    value = data.get(name)
    if not is_count(value):
        raise ValueError(f"{name} is {shown(value)}, not an integer of 0 to 2**63 - 1")
    return int(value)  # type: ignore[arg-type]


def _texts(data: Mapping[str, Any], name: str) -> dict[str, str]:
    found = _dict(data, name)
    for key, value in found.items():
        _name(key, f"a name in {name}")
        _name(value, f"{name}.{key}")
    return found


def _name(value: Any, what: str) -> str:
    # Messages and tables print names; a lone surrogate cannot be printed, and an escape moves the cursor.
    if not isinstance(value, str) or not value.isprintable() or len(value) > _LONGEST_NAME:
        raise ValueError(f"{what} is {shown(value)}, not a name")
    return value


def _plain(name: Any) -> str:
    if not isinstance(name, str) or not _FILE.fullmatch(name) or name in (".", ".."):
        raise ValueError(f"{shown(name)} is not a plain file name")
    return name


def _is_number(value: Any) -> bool:
    return type(value) in _NUMBERS


def _has_names(value: Any) -> bool:
    return isinstance(value, dict) and _is_names(value)


def _is_names(values: Any) -> bool:
    return (
        isinstance(values, Iterable)
        and not isinstance(values, str)
        and all(isinstance(v, str) for v in values)
    )


def _decode(value: Any, what: str) -> Any:
    try:
        return decode(value)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _decoded(data: Mapping[str, Any], name: str, kind: type) -> Any:
    value = _decode(data.get(name), name)
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {shown(value)}, not a {kind.__name__}")
    return value
