"""Checkpoints that a hostile hand has written, with their hashes: refused or restored exactly.

``python -m tests.campaigns.hostile_checkpoints --count 10000 --seed 0`` changes manifests, indexes, marks and
shards of the newer of two checkpoints and resumes. Exit code 1 when any case crashed, raised anything but a
UserError, exceeded 5 s of processor time or 200 MB, restored other values than the files hold, or kept a
resume from the older checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import shutil
import socket
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import torch
from torch import nn

from distributed import Callback, DistributedConfig
from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.codec import encode
from distributed.checkpoint.reader import PortableReader, verify
from distributed.checkpoint.torch_state import export_replicated, import_replicated
from distributed.errors import UserError
from distributed.interfaces.history import History
from distributed.interfaces.state import BackendState
from distributed.interfaces.task import Progress
from distributed.training.callback_runner import CallbackRunner
from distributed.training.resuming import Resumer
from distributed.training.saving import Saver
from distributed.training.schedule import Schedule
from distributed.training.state import TrainState
from tests.campaigns.forked_cases import Outcome, run_cases
from tests.campaigns.hostile_values import RAW, dump, mutate
from tests.campaigns.thread_ranks import Meeting, ThreadRank, on_ranks

__all__ = ["BAD", "main", "outcomes_of"]

BAD = ("crashed", "raised", "wrong")
"""Verdicts that must not occur; ``refused`` and ``restored`` are the others."""
_OLD, _NEW = "step_00000001", "step_00000002"


# -- a small training ------------------------------------------------------------------------------


class Counting(Callback):
    """A callback with a state."""

    all_ranks = True

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Trained:
    """Model, optimizer and everything else that a checkpoint of `step` holds."""

    def __init__(self, step: int, config: DistributedConfig | None = None) -> None:
        generator = torch.Generator().manual_seed(step)
        self.model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1 / max(step, 1))
        schedule = Schedule()
        schedule.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        for p in self.model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        for _ in range(step):
            self.optimizer.step()
            schedule.after_step()
        self.callback = Counting()
        self.callback.state = {"seen": step, "best": torch.ones(3), 7: (1, {2})} if step else {}
        callbacks = CallbackRunner(None, [], None)  # type: ignore[arg-type]
        callbacks.active = [self.callback]
        progress = Progress(0, 4 * step, step, 4 * step, 0.5, None)
        self.state = TrainState(progress, schedule, callbacks, None)
        self.state.lineage = "ab" * 16
        self.state.open_epoch.steps = [(1.5, 4, 0.1)] * step

    def save(self, directory: str, size: int) -> None:
        """Save from `size` ranks."""
        saved = self.state.capture()
        extra = {
            **saved.common,
            "config": {"backend": "serial"},
            "best": False,
            "omitted": {},
            "model_files": {},
        }

        def work(rank: int, meeting: Meeting) -> str:
            store = PortableCheckpointer(directory, keep_last=None)
            ranks = _Exporting(rank, meeting, self, size)
            path = store.save(ranks, extra, saved.rank)  # type: ignore[arg-type]
            if rank == 0:
                store.mark_best(path)
            return path

        outcomes = on_ranks(size, work)
        if not all(isinstance(outcome, str) for outcome in outcomes):
            raise RuntimeError(f"not saved: {outcomes}")


class _Exporting(ThreadRank):
    def __init__(self, rank: int, meeting: Meeting, trained: Trained, size: int) -> None:
        super().__init__(rank, meeting)
        self.trained, self.size = trained, size

    def export_state(self) -> BackendState:
        return export_replicated(
            self.trained.model, self.trained.optimizer, {"scale": 8.0}, self.world.rank, self.size
        )


class _Importing(ThreadRank):
    """One rank that loads."""

    def __init__(self, trained: Trained) -> None:
        super().__init__(0, Meeting(1))
        self.trained, self.module = trained, trained.model

    def import_state(self, reader: PortableReader) -> None:
        import_replicated(reader, self.trained.model, self.trained.optimizer)


def resume(home: str) -> str | None:
    """Resume from `home` as a run does; the path of the checkpoint that it took."""
    trained, history = Trained(0), History(backend="serial", world_size=1, batch={})
    config = DistributedConfig(checkpoint_dir=home, resume_from_checkpoint=True, device="cpu")
    saver = Saver(config, _Importing(trained), trained.state, history)  # type: ignore[arg-type]
    saver.checkpointer = PortableCheckpointer(home, keep_last=None)
    if not Resumer(saver).resume():
        return None
    path = str(history.checkpoint)
    _compare(path, trained)
    return path


# -- the oracle: what the files hold, read without the reader --------------------------------------


class Wrong(Exception):
    """Something other than what the files hold was restored."""


def _stored(path: str) -> tuple[dict[str, Any], dict[tuple[str, str], bytes], list[dict[str, Any]]]:
    """(manifest, bytes of every tensor, indexes)"""
    files, home = fsspec.core.url_to_fs(path)

    def content(name: str) -> bytes:
        return bytes(files.cat_file(f"{home}/{name}"))

    manifest = json.loads(content("manifest.json"))
    folder = f"{manifest['folder']}/" if manifest.get("folder") else ""
    indexes = [json.loads(content(folder + name)) for name in manifest["indexes"]]
    tensors: dict[tuple[str, str], list[tuple[int, bytes]]] = {}
    for index in indexes:
        for chunk in index["chunks"]:
            raw = content(folder + chunk["file"])[chunk["offset"] : chunk["offset"] + chunk["nbytes"]]
            tensors.setdefault((chunk["key"], chunk["name"]), []).append((chunk["start"], raw))
    return manifest, {name: b"".join(raw for _, raw in sorted(p)) for name, p in tensors.items()}, indexes


def _compare(path: str, trained: Trained) -> None:
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
    for name in ("lineage", "callbacks"):
        if name in manifest["extra"]:
            kept = trained.state.lineage if name == "lineage" else trained.state.callbacks.states()
            if name == "lineage" or trained.callback.state:
                _same(name, _plain(kept), manifest["extra"][name])


def _read_through(path: str) -> None:
    """Read everything that `verify` accepted, and compare it with the files."""
    manifest, tensors, indexes = _stored(path)
    reader = PortableReader(path)
    for key, name in reader.tensors():
        value = reader.read(key, name).view(torch.uint8).numpy().tobytes()
        _same(f"{key} {name}", value, tensors.get((key, name), b""))
    for part in ("groups", "scalars", "scaler", "extra"):
        _same(part, _plain(getattr(reader, part)), manifest[part])
    for rank, index in enumerate(indexes):
        _same("rank_extra", _plain(reader.rank_extra(rank)), index["rank_extra"])


def _plain(value: Any) -> Any:
    return encode(value)


def _same(what: str, found: Any, wanted: Any) -> None:
    if isinstance(found, bytes):
        equal = found == wanted
    else:
        equal = json.dumps(found, sort_keys=True) == json.dumps(wanted, sort_keys=True)
    if not equal:
        raise Wrong(f"{what}: {str(found)[:200]} instead of {str(wanted)[:200]}")


# -- cases -----------------------------------------------------------------------------------------


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
            _read_through(path)
        taken = resume(home)
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


def main(words: list[str] | None = None) -> int:
    """Print counts, and every case that is neither refused nor restored exactly."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.hostile_checkpoints", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument("--count", type=int, default=10_000, help="Number of cases.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="Number of the first case.")
    parser.add_argument("--verbose", action="store_true", help="Print every case.")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="distributed-", dir=_fast()) as folder:
        outcomes = outcomes_of(Path(folder), range(args.first, args.first + args.count), args.seed)
    bad = [outcome for outcome in outcomes if outcome.verdict in BAD]
    for outcome in outcomes if args.verbose else bad:
        print(f"case {outcome.number}: {outcome.verdict}: {outcome.detail}")
    counts = Counter(outcome.verdict for outcome in outcomes)
    slowest = max((outcome.seconds for outcome in outcomes), default=0.0)
    shown = ", ".join(f"{count:,} {verdict}" for verdict, count in counts.most_common())
    total = f"{len(outcomes):,} cases with seed {args.seed}"
    print(f"{total}: {shown}; the slowest took {slowest:.2f} s of processor time")
    return 1 if bad else 0


def _fast() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


if __name__ == "__main__":
    sys.exit(main())
