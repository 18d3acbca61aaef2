"""Weights of a checkpoint as safetensors, in the layout that the loaders of transformers and PEFT read."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from math import inf, prod
from typing import Any

from distributed.checkpoint.chunk_index import ITEM_SIZES
from distributed.checkpoint.filesystem import FileLayer
from distributed.checkpoint.object_store import ObjectLayer, located
from distributed.checkpoint.reader import PortableReader
from distributed.errors import UserError
from distributed.system.private_folders import add_owner, sweep

__all__ = ["DTYPES", "bytes_of", "export_safetensors"]

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Names of what weights may be converted to -> torch's."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def bytes_of(text: str) -> int:
    """``5GB``, ``500MB``, ``2GiB`` or a plain number, in bytes.

    Raises:
        UserError: none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?)?B?", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 1:
        raise UserError("not a size", field="--max-shard-size", got=text, allowed="such as 5GB, 500MB, 2GiB")
    return size


def export_safetensors(
    path: str, output: str, *, dtype: str | None = None, max_shard_size: int = 5 * 10**9
) -> list[str]:
    """Write the weights of the checkpoint at `path` into the directory `output`.

    One file ``model.safetensors``, or several with ``model.safetensors.index.json`` where they
    are larger. Tied tensors are stored once; the files' metadata name the others, as
    ``safetensors.torch.load_model`` reads them. Every byte read is checked. Of a model of transformers the
    directory also gets ``config.json``, of adapters of PEFT ``adapter_model.safetensors`` and
    ``adapter_config.json`` alone: ``from_pretrained`` reads it.

    Args:
        path: a committed checkpoint.
        output: a directory, made when missing.
        dtype: ``fp32``, ``bf16`` or ``fp16`` for floating-point weights; None keeps theirs.
        max_shard_size: bytes per file; a larger tensor has a file of its own.

    Returns:
        The paths written.

    Raises:
        UserError: the checkpoint is damaged or leaves parameters out that are no part of an adapter, or
            `output` holds such files already.
        OSError: a file cannot be written; none of the new names exists then.
    """
    files, output = located(output)
    if isinstance(files, ObjectLayer):
        raise UserError(
            "weights are written to a disk", field="--output", got=output, remedy="Copy them from there"
        )
    reader = PortableReader(path)
    texts, exported = _described(reader, dtype)
    shards = list(_shards(reader, exported, dtype, inf if "adapter_config.json" in texts else max_shard_size))
    stem = "adapter_model" if "adapter_config.json" in texts else "model"
    names = _names(stem, len(shards))
    files.make_directories(output)
    taken = [n for n in [*names, *texts, _INDEX] if os.path.exists(os.path.join(output, n))]
    if taken:
        raise UserError(
            "it holds exported weights already",
            field="--output",
            got=os.path.join(output, taken[0]),
            remedy="Choose another directory, or remove them",
        )
    sweep(output, _STAGING)
    staging = os.path.join(output, f"{_STAGING}{secrets.token_hex(8)}")
    files.make_directory(staging)
    try:
        add_owner(staging)
        for name, tensors in zip(names, shards, strict=True):
            _write(files, reader, os.path.join(staging, name), {t: exported[t] for t in tensors}, dtype)
        if len(shards) > 1:
            texts[_INDEX] = _index(reader, names, shards, dtype)
        for name, text in texts.items():
            files.write_file(os.path.join(staging, name), text.encode())
        names += texts
        for name in names:
            files.rename(os.path.join(staging, name), os.path.join(output, name))
        files.fsync_directory(output)
    finally:
        files.remove(staging)
        reader.close()
    return [os.path.join(output, name) for name in names]


_STAGING = ".tmp-export-"
_INDEX = "model.safetensors.index.json"
_TEXTS = ("config.json", "generation_config.json", "adapter_config.json")
"""Files that a checkpoint may bring; names are read from the checkpoint, and others might lead elsewhere."""


def _described(reader: PortableReader, dtype: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """(files beside the weights: name -> text, tensors to write: name -> name in the file)."""
    about: dict[str, Any] = reader.extra.get("model_files", {})
    texts = {name: str(text) for name, text in about.get("files", {}).items() if name in _TEXTS}
    own = about.get("names")
    exported = {name: name for key, name in reader.tensors() if key == "model"}
    if own is not None:
        exported = {name: own[name] for name in exported if name in own}
    elif reader.omitted:
        raise UserError(
            f"the checkpoint leaves out {len(reader.omitted)} frozen parameters, such as"
            f" '{next(iter(reader.omitted))}', so its weights are not a whole model",
            field="PATH",
            got=reader.path,
            allowed="a complete checkpoint, or one of adapters of PEFT",
            remedy="Save complete checkpoints with checkpoint.trainable_only=false, or load it into a model"
            " with load_full_model and save that",
        )
    if dtype and "config.json" in texts:
        config = json.loads(texts["config.json"])
        texts["config.json"] = json.dumps({**config, "dtype": DTYPES[dtype]}, indent=2)
    return texts, exported


def _names(stem: str, count: int) -> list[str]:
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _shards(
    reader: PortableReader, names: Iterable[str], dtype: str | None, limit: float
) -> Iterator[list[str]]:
    shard: list[str] = []
    size = 0
    for name in names:
        added = _size(reader, name, dtype)
        if shard and size + added > limit:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += added
    yield shard


def _target(reader: PortableReader, name: str, dtype: str | None) -> str:
    """Torch's name of the dtype in which a weight is written."""
    saved = reader.dtype("model", name)
    return DTYPES[dtype] if dtype and saved in (*DTYPES.values(), "float64") else saved


def _size(reader: PortableReader, name: str, dtype: str | None) -> int:
    return prod(reader.tensors()["model", name]) * ITEM_SIZES[_target(reader, name, dtype)]


def _write(
    files: FileLayer, reader: PortableReader, path: str, names: Mapping[str, str], dtype: str | None
) -> None:
    """Write tensors, each under its name in the file."""
    import torch
    from safetensors.torch import save_file

    tensors: dict[str, Any] = {}
    for name, exported in names.items():
        values = reader.read("model", name).reshape(reader.tensors()["model", name])
        tensors[exported] = values.to(getattr(torch, _target(reader, name, dtype)))
    tied = {alias: owner for alias, owner in reader.aliases.items() if owner in tensors}
    with files.open(path):
        pass  # Made first, so that it is its owner's alone from the beginning.
    save_file(tensors, path, metadata={**tied, "format": "pt"})
    with open(path, "rb+") as file:
        files.fsync(file)


def _index(reader: PortableReader, names: list[str], shards: list[list[str]], dtype: str | None) -> str:
    weights = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
    total = sum(_size(reader, tensor, dtype) for tensor in weights)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=2)
