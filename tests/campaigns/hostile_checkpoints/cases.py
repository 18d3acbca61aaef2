"""Changes of a checkpoint, and the verdict on each."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import shutil
import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import torch

from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.reader import verify
from distributed.errors import UserError
from tests.campaigns.forked_cases import Outcome, run_cases
from tests.campaigns.hostile_checkpoints.oracle import Wrong, compare, read_through
from tests.campaigns.hostile_checkpoints.training import Trained, resume
from tests.campaigns.hostile_values import RAW, dump, mutate

__all__ = ["BAD", "outcomes_of"]

BAD = ("crashed", "raised", "wrong")
"""Verdicts that must not occur; ``refused`` and ``restored`` are the others."""
_OLD, _NEW = "step_00000001", "step_00000002"


def _sealed(text: str) -> bytes:
    body = text.encode("ascii", "backslashreplace")[1:]
    return b'{"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'",' + body


def _opened(raw: bytes) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(raw)
    del content["sha256"]
    return content


Files = dict[str, bytes]


def _change_manifest(files: Files, rng: random.Random) -> str:
    tree, what = mutate(_opened(files["manifest.json"]), rng)
    files["manifest.json"] = _sealed(dump(tree))
    return f"manifest: {what}"


def _change_index(files: Files, rng: random.Random) -> str:
    name = rng.choice([name for name in files if "rank_" in name])
    tree, what = mutate(_opened(files[name]), rng)
    files[name] = _sealed(dump(tree))
    _seal_again(files)
    return f"{name}: {what}"


def _change_pieces(files: Files, rng: random.Random) -> str:
    """Of tensors, equally in manifest and index."""
    manifest = _opened(files["manifest.json"])
    victim = rng.choice(manifest["tensors"])
    key, name = victim["key"], victim["name"]
    changed, what = mutate({"shape": victim["shape"], "dtype": victim["dtype"], "name": name}, rng)
    victim |= changed
    for file in [file for file in files if "rank_" in file]:
        index = _opened(files[file])
        for chunk in index["chunks"]:
            if (chunk["key"], chunk["name"]) == (key, name):
                chunk |= changed
                if rng.random() < 0.3:
                    tree, more = mutate(chunk, rng)
                    chunk.clear()
                    chunk |= tree
                    what += f", {more}"
        files[file] = _sealed(dump(index))
    files["manifest.json"] = _sealed(dump(manifest))
    _seal_again(files)
    return f"pieces of {name}: {what}"


def _change_data(files: Files, rng: random.Random) -> str:
    name = rng.choice([name for name in files if name.endswith(".bin")])
    raw = bytearray(files[name])
    place = rng.randrange(len(raw))
    raw[place] ^= 1 << rng.randrange(8)
    files[name] = bytes(raw)
    for file in [file for file in files if "rank_" in file]:
        index = _opened(files[file])
        for chunk in index["chunks"]:
            if name.endswith(chunk["file"]):
                chunk["crc32"] = zlib.crc32(raw[chunk["offset"] : chunk["offset"] + chunk["nbytes"]])
        if name.endswith(next((chunk["file"] for chunk in index["chunks"]), "?")):
            index["shard"] = {"size": len(raw), "crc32": zlib.crc32(raw)}
        files[file] = _sealed(dump(index))
    _seal_again(files)
    return f"byte {place} of {name}, with its checksums"


def _pad(files: Files, rng: random.Random) -> str:
    name = rng.choice([name for name in files if name.endswith(".json")])
    tree, size = _opened(files[name]), rng.choice((10**3, 10**6))
    item = rng.choice(("[],", "{},", "1000,", '"abc",', '{"a":[1]},'))
    if rng.random() < 0.5:
        tree["padding"] = f"{RAW}[{item * size}0]"
    else:
        tree["padding"] = RAW + "[" * size + "]" * size
    files[name] = _sealed(dump(tree))
    if "rank_" in name:
        _seal_again(files)
    return f"{name}: padded with {size} of {item}"


def _seal_again(files: Files) -> None:
    """Give the manifest the hashes and sizes that the other files have."""
    try:
        manifest = _opened(files["manifest.json"])
        folder = f"{manifest['folder']}/" if manifest.get("folder") else ""
        for name, facts in manifest["files"].items():
            raw = files[folder + name]
            facts["size"] = len(raw)
            facts |= (
                {"sha256": hashlib.sha256(raw).hexdigest()}
                if "sha256" in facts
                else {"crc32": zlib.crc32(raw)}
            )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return  # A manifest that is changed as well.
    files["manifest.json"] = _sealed(dump(manifest))


def _no_change(files: Files, rng: random.Random) -> str:
    return "nothing changed"


_CHANGES: list[Callable[[Files, random.Random], str]] = [
    *[_change_manifest, _change_index] * 8,
    *[_change_pieces] * 5,
    *[_change_data, _pad, _no_change],
]


def _special(path: Path, rng: random.Random) -> str:
    """Put something that is no regular file, or endless, at `path`."""
    kind = rng.choice(
        ("fifo", "zero", "urandom", "itself", "directory", "nowhere", "tty", "socket", "sparse", "pickle")
    )
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # A socket's address has few characters.
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
        os.chdir(here)
    elif kind == "sparse":
        with path.open("wb") as file:
            file.write(rng.choice((b"", b'{"sha256":"' + b"0" * 64)))
            file.truncate(rng.choice((2**20, 2**29, 2**31, 2**40)))
    elif kind == "pickle":
        path.write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR." * 100)
    else:
        targets = {"zero": "/dev/zero", "urandom": "/dev/urandom", "itself": path.name, "nowhere": "gone"}
        path.symlink_to(targets.get(kind, "/dev/tty"))
    return f"{kind} as {path.name}"


def _change_mark(path: Path, rng: random.Random) -> str:
    if rng.random() < 0.4:
        return _special(path, rng)
    tree, what = mutate(_opened(path.read_bytes()), rng)
    path.write_bytes(_sealed(dump(tree)))
    return f"best.json: {what}"


class Case:
    """Makes and judges cases.

    Args:
        folder: where they are made.
        seed: of all cases.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        torch.set_num_threads(1)  # Threads do not survive a fork.
        self.stores = {size: f"memory://hostile-{os.getpid()}-{size}" for size in (1, 2)}
        for size, store in self.stores.items():
            for step in (1, 2):
                Trained(step).save(str(folder / f"pristine-{size}"), size)
                Trained(step).save(store, size)

    def __call__(self, number: int) -> tuple[str, str]:
        rng = random.Random(f"{self.seed}:{number}")
        size, kind = rng.choice((1, 2)), rng.random()
        if kind < 0.15:
            return self._in_store(size, rng)
        home = self.folder / f"case-{number}"
        shutil.copytree(self.folder / f"pristine-{size}", home)
        try:
            victim = home / _NEW
            if kind < 0.25:
                what = _special(rng.choice(sorted(victim.iterdir())), rng)
            elif kind < 0.33:
                what = _change_mark(home / "best.json", rng)
            else:
                files = {path.name: path.read_bytes() for path in victim.iterdir()}
                what = rng.choice(_CHANGES)(files, rng)
                for name, raw in files.items():
                    (victim / name).write_bytes(raw)
            return _judge(str(home), what)
        finally:
            shutil.rmtree(home)

    def _in_store(self, size: int, rng: random.Random) -> tuple[str, str]:
        store, pristine = fsspec.filesystem("memory"), self.stores[size]
        victim = f"{store._strip_protocol(pristine)}/{_NEW}/"
        before = {path.removeprefix(victim): store.cat_file(path) for path in store.find(victim)}
        files = dict(before)
        what = rng.choice(_CHANGES)(files, rng)
        try:
            for name, raw in files.items():
                store.pipe_file(victim + name, raw)
            return _judge(pristine, f"object store, {what}")
        finally:
            for name, raw in before.items():
                store.pipe_file(victim + name, raw)


def _judge(home: str, what: str) -> tuple[str, str]:
    """(verdict, what was changed and what came of it)"""
    path, old = f"{home}/{_NEW}", f"{home}/{_OLD}"
    problems = verify(path)
    if any(not text or "\n" in text or home not in text for text in problems):
        return "wrong", f"{what}: a problem does not name the file: {problems}"
    PortableCheckpointer(home, keep_last=None).best()
    try:
        if not problems:
            read_through(path)
        taken, trained = resume(home)
        if taken is not None:
            compare(taken, trained)
    except UserError as error:
        # The state is as it was saved, and is not of this model, optimizer or scheduler.
        named = path in str(error) and not problems
        return ("refused" if named else "wrong"), f"{what}: {error}"
    except Wrong as error:
        return "wrong", f"{what}: {error}"
    if taken != (old if problems else path):
        return "wrong", f"{what}: resumed from {taken}; problems: {problems}"
    return ("refused", f"{what}: {problems[0]}") if problems else ("restored", what)


def outcomes_of(folder: Path, numbers: range, seed: int) -> list[Outcome]:
    """Run cases and return what became of each."""
    logger = logging.getLogger("distributed")
    before, logger.disabled = logger.disabled, True
    try:
        return run_cases(Case(folder, seed), numbers)
    finally:
        logger.disabled = before
