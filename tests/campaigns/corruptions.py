"""Damages checkpoints in every way that disks and people do, and counts what is accepted.

``python -m tests.campaigns.corruptions --number 1000 --seed 0`` prints the tables of the guide:
random damage, and saves that are cut at every operation.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import secrets
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import fsspec

from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.filesystem import FileLayer
from distributed.checkpoint.reader import PortableReader, verify
from distributed.errors import UserError
from distributed.testing.faults import CountedLayer, FaultyLayer, FaultyObjects, UnsyncedLayer, end_process
from tests.campaigns.thread_ranks import holds_step, latest, save

__all__ = [
    "KINDS",
    "corrupt",
    "flip",
    "main",
    "newest_good",
    "random_damage",
    "read_everything",
    "torn_saves",
]

RANKS = 2
_PAGE = 4096


def flip(path: Path, offset: int) -> None:
    """Turn over one bit of the byte at `offset`."""
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1 << (offset % 8)
    path.write_bytes(raw)


def _flip(path: Path, other: Path, rng: random.Random) -> None:
    flip(path, rng.randrange(path.stat().st_size))


def _truncate(path: Path, other: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def _delete(path: Path, other: Path, rng: random.Random) -> None:
    path.unlink()


def _zero_page(path: Path, other: Path, rng: random.Random) -> None:
    raw = path.read_bytes()
    start = rng.randrange(len(raw)) // _PAGE * _PAGE
    path.write_bytes(raw[:start] + bytes(len(raw[start : start + _PAGE])) + raw[start + _PAGE :])


def _swap_words(path: Path, other: Path, rng: random.Random) -> None:
    raw, start = path.read_bytes(), rng.randrange(path.stat().st_size - 8)
    path.write_bytes(raw[:start] + raw[start + 4 : start + 8] + raw[start : start + 4] + raw[start + 8 :])


def _swap_shards(path: Path, other: Path, rng: random.Random) -> None:
    kind = rng.choice(["shard_*", "rank_*"])
    one, two = rng.sample(sorted(path.parent.glob(kind)), 2)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def _other_checkpoint(path: Path, other: Path, rng: random.Random) -> None:
    shutil.copy(other / path.name, path)


KINDS: dict[str, Callable[[Path, Path, random.Random], None]] = {
    "a bit flipped": _flip,
    "a file truncated": _truncate,
    "a file deleted": _delete,
    "a page of zeros": _zero_page,
    "two words swapped": _swap_words,
    "two ranks' files swapped": _swap_shards,
    "a file of another checkpoint": _other_checkpoint,
}
"""Kind of damage -> ``(a file, another checkpoint, random numbers)`` does it; it may change nothing."""


def corrupt(path: Path, other: Path, kind: str, rng: random.Random) -> bool:
    """Damage the checkpoint at `path`; whether any byte differs.

    Args:
        path: its directory.
        other: another checkpoint of the same run.
        kind: one of `KINDS`.
        rng: where in which file.
    """
    before = _content(path)
    KINDS[kind](path / rng.choice(sorted(os.listdir(path))), other, rng)
    return _content(path) != before


def _content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def read_everything(path: str) -> None:
    """Read every tensor and every rank's extra state.

    Raises:
        UserError: something is damaged.
    """
    reader = PortableReader(path)
    for key, name in reader.tensors():
        reader.read(key, name)
    for rank in range(reader.world_size):
        reader.rank_extra(rank)


def newest_good(directory: str) -> str | None:
    """What a resume takes: the newest checkpoint that is whole, read through."""
    store = PortableCheckpointer(directory, keep_last=None)
    return next((path for path in store.candidates() if not verify(path)), None)


def random_damage(folder: Path, number: int, seed: int) -> list[tuple[str, int, int, int]]:
    """Damage the newer of two checkpoints `number` times, each time a fresh copy.

    Returns:
        (kind, times tried, times refused by `verify` and by reading, times the older was loaded).
    """
    rng = random.Random(seed)
    pristine = folder / "pristine"
    for step in (1, 2):
        save(pristine, step, RANKS)
    tried, refused, fallen_back = Counter[str](), Counter[str](), Counter[str]()
    while sum(tried.values()) < number:
        kind, home = rng.choice(list(KINDS)), folder / "case"
        shutil.copytree(pristine, home)
        victim, other = home / "step_00000002", home / "step_00000001"
        if corrupt(victim, other, kind, rng):
            tried[kind] += 1
            refused[kind] += bool(verify(str(victim))) and _is_refused(str(victim))
            loaded = newest_good(str(home))
            fallen_back[kind] += loaded == str(other) and holds_step(loaded, 1)
        shutil.rmtree(home)
    return [(kind, tried[kind], refused[kind], fallen_back[kind]) for kind in KINDS]


def _is_refused(path: str) -> bool:
    try:
        read_everything(path)
    except UserError:
        return True
    return False


def torn_saves(folder: Path) -> list[tuple[str, str, int, int, int, int]]:
    """Cut the save of step 3 at each of its operations, steps 1 and 2 being there.

    On a disk the process ends there, as by ``kill -9``, or power is lost and with it half of what was
    not synced; of a store, here fsspec's in memory, every further operation fails. A write ends when
    half of its bytes are written.

    Returns:
        (where, operation, times cut, loaded next: the previous one, the new one, anything else).
    """
    store = fsspec.filesystem("memory")
    home = str(folder / "torn")
    places: list[tuple[str, str, CountedLayer, Callable[[str, int], None]]] = [
        ("disk, `kill -9`", f"{home}-killed", FaultyLayer(_NEVER), partial(_die, end_process)),
        ("disk, power lost", f"{home}-dark", FaultyLayer(_NEVER), partial(_die, None)),
        ("object store", f"memory://torn-{secrets.token_hex(8)}", FaultyObjects(_NEVER, store), _fall_silent),
    ]
    rows = []
    for where, place, counting, cut in places:
        _prepared(f"{place}-counting", counting)
        outcomes = Counter[tuple[str, str]]()
        for fail_at, name in enumerate(counting.done):
            directory = f"{place}-{fail_at}"
            _prepared(directory, None)
            cut(directory, fail_at)
            outcomes[name, _loaded(directory)] += 1
        for name in dict.fromkeys(counting.done):
            found = [outcomes[name, loaded] for loaded in ("previous", "new", "other")]
            rows.append((where, name, sum(found), *found))
    return rows  # type: ignore[return-value]


_NEVER = 1_000_000


def _prepared(directory: str, counting: FileLayer | None) -> None:
    """Steps 1 and 2, and step 3 where its operations are counted."""
    for step in (1, 2):
        save(directory, step)
    if counting is not None:
        save(directory, 3, keep_last=2, layers={0: counting})


def _loaded(directory: str) -> str:
    """What a resume after the cut would load, after which the next save has to succeed."""
    newest = newest_good(directory)
    found = {step: holds_step(newest, step) for step in (2, 3)}
    again = save(directory, 4, keep_last=2)[0]
    if not isinstance(again, str) or latest(directory) != again or not holds_step(again, 4):
        return "other"
    return "previous" if found[2] else "new" if found[3] else "other"


def _die(fault: Callable[[str], None] | None, directory: str, fail_at: int) -> None:
    """Save step 3 in a process that ends at operation `fail_at`."""
    child = os.fork()
    if child == 0:
        layer = FaultyLayer(fail_at, fault=fault) if fault else UnsyncedLayer(fail_at)
        save(directory, 3, keep_last=2, layers={0: layer})
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 9:
        raise RuntimeError(f"the save in {directory} was not cut")


def _fall_silent(directory: str, fail_at: int) -> None:
    """Save step 3 in a store that fails from operation `fail_at` on."""
    layer = FaultyObjects(fail_at, fsspec.filesystem("memory"), lasting=True)
    save(directory, 3, keep_last=2, layers={0: layer})
    if not layer.failed:
        raise RuntimeError(f"the save in {directory} was not cut")


def main(words: list[str] | None = None) -> int:
    """Print both tables; exit code 1 when anything damaged was accepted."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.corruptions", description=__doc__)
    parser.add_argument("--number", type=int, default=1000, help="Random corruptions.")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="distributed-") as folder:
        damage = random_damage(Path(folder), args.number, args.seed)
        torn = torn_saves(Path(folder))
    tried, refused, loaded = (sum(int(row[column]) for row in damage) for column in (1, 2, 3))
    total = ("**all**", tried, refused, loaded)
    _table(("damage", "tried", "rejected", "previous intact one loaded"), [*damage, total])
    print()
    _table(
        (
            "storage and interruption",
            "interrupted operation",
            "number of interruptions",
            "previous checkpoint loaded",
            "new checkpoint loaded",
            "anything else loaded",
        ),
        torn,
    )
    accepted = not tried == refused == loaded or any(row[5] for row in torn)
    return 1 if accepted else 0


def _table(head: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> None:
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(f'{value:,}' if isinstance(value, int) else str(value) for value in row)} |")


if __name__ == "__main__":
    sys.exit(main())
