"""What the files of a checkpoint hold, read without the reader, and a comparison with what was restored."""

from __future__ import annotations

import base64
import json
from typing import Any

import fsspec
import torch

from distributed.checkpoint.codec import encode
from distributed.checkpoint.reader import PortableReader
from distributed.system.garbage_collection import paused
from tests.campaigns.hostile_checkpoints.training import Trained

__all__ = ["Wrong", "compare", "read_through"]


class Wrong(Exception):
    """Something other than what the files hold was restored."""


def _stored(path: str) -> tuple[dict[str, Any], dict[tuple[str, str], bytes], list[dict[str, Any]]]:
    """(manifest, bytes of every tensor, indexes)"""
    files, home = fsspec.core.url_to_fs(path)

    def content(name: str) -> bytes:
        return bytes(files.cat_file(f"{home}/{name}"))

    with paused():  # The limit of processor time is meant for the reader.
        manifest = json.loads(content("manifest.json"))
        folder = f"{manifest['folder']}/" if manifest.get("folder") else ""
        indexes = [json.loads(content(folder + name)) for name in manifest["indexes"]]
    tensors: dict[tuple[str, str], list[tuple[int, bytes]]] = {}
    for index in indexes:
        for chunk in index["chunks"]:
            raw = content(folder + chunk["file"])[chunk["offset"] : chunk["offset"] + chunk["nbytes"]]
            tensors.setdefault((chunk["key"], chunk["name"]), []).append((chunk["start"], raw))
    return manifest, {name: b"".join(raw for _, raw in sorted(p)) for name, p in tensors.items()}, indexes


def compare(path: str, trained: Trained) -> None:
    """Raise `Wrong` unless `trained` is in the state that the files at `path` hold."""
    manifest, tensors, _ = _stored(path)
    _same("step", trained.state.progress.step, manifest["step"])
    for name, tensor in trained.model.state_dict().items():
        _same(name, tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), tensors["model", name])
    names = {id(p): name for name, p in trained.model.named_parameters()}
    for p, slots in trained.optimizer.state.items():
        for slot in ("exp_avg", "exp_avg_sq"):
            held = tensors.get((f"optimizer.{slot}", names[id(p)]))
            if held is not None:
                _same(
                    f"{slot} of {names[id(p)]}",
                    slots[slot].view(-1).view(torch.uint8).numpy().tobytes(),
                    held,
                )
    extra = manifest["extra"]
    if "lineage" in extra:
        _same("lineage", trained.state.lineage, extra["lineage"])
    # Of the states in the checkpoint, a run takes the first of each class that it has callbacks of.
    states = [entry["v"] if isinstance(entry, dict) else entry for entry in extra.get("callbacks") or ()]
    own = [state for name, state in states if name == "Counting"]
    _same("state of the callback", encode(trained.callback.state), own[0] if own else {})


def read_through(path: str) -> None:
    """Read everything that `verify` accepted, and compare it with the files."""
    manifest, tensors, indexes = _stored(path)
    reader = PortableReader(path)
    for key, name in reader.tensors():
        value = reader.read(key, name).view(torch.uint8).numpy().tobytes()
        _same(f"{key} {name}", value, tensors.get((key, name), b""))
    for part in ("groups", "scalars", "extra"):
        _same(part, encode(getattr(reader, part)), manifest[part])
    _same("scaler", encode(reader.scaler), manifest.get("scaler"))
    for rank, index in enumerate(indexes):
        _same("rank_extra", encode(reader.rank_extra(rank)), index["rank_extra"])


def _same(what: str, found: Any, wanted: Any) -> None:
    if isinstance(found, bytes):
        equal = found == wanted
    else:
        found, wanted = json.dumps(_spelled(found)), json.dumps(_spelled(wanted))
        equal = found == wanted
    if not equal:
        raise Wrong(f"{what}: {_difference(str(found), str(wanted))}")


def _spelled(value: Any) -> Any:
    """An encoded value in the one spelling that its meaning has here; a key without meaning is kept.

    A mapping may be an object or a list of pairs, an integer decimal or hexadecimal, and base64 ends in bits
    that nothing reads. The writer uses one spelling, and the reader accepts all of them.
    """
    if isinstance(value, list):
        return [_spelled(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind, content = value.get("$"), value.get("v")
    if kind is None:
        return {"dict": sorted(([key, _spelled(item)] for key, item in value.items()), key=repr)}
    if kind == "int":
        content = int(content, 16)
        return content if value.keys() == {"$", "v"} else {**value, "v": content}
    if kind in ("bytes", "tensor", "ndarray", "scalar"):
        return sorted({**value, "v": base64.b64decode(content).hex()}.items())
    if kind in ("dict", "set", "frozenset", "Counter"):
        content = sorted((_spelled(item) for item in content), key=repr)
        return {kind: content, **{key: item for key, item in value.items() if key not in ("$", "v")}}
    return sorted({**value, "v": _spelled(content)}.items(), key=repr)


def _difference(found: str, wanted: str) -> str:
    place = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), 0)
    start = max(place - 60, 0)
    return f"{found[start : place + 100]} instead of {wanted[start : place + 100]}"
