"""A checkpoint is committed whole or not at all, and a damaged one is never accepted."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import pickle
import random
import shutil
import stat
import tempfile
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed.checkpoint.agreement import Ranks
from distributed.checkpoint.chunks import ChunkEntry, tiling_problems
from distributed.checkpoint.files import FileLayer, seal, sha256_of, unseal
from distributed.checkpoint.layout import PortableCheckpointer
from distributed.checkpoint.reader import PortableReader, verify
from distributed.checkpoint.store import manifest_of, rank_file
from distributed.errors import UserError
from distributed.interfaces.backend import World
from distributed.interfaces.state import BackendState, Chunk

COUNT = 3000  # elements: a shard spans more than one page


class Meeting:
    """Where the threads of one world hand values to each other, pickled as processes would."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.slots: list[bytes] = [b""] * size


class ThreadRank(Ranks):
    """One rank, a thread, with its slice of one tensor whose content tells the step."""

    def __init__(self, rank: int, meeting: Meeting, step: int) -> None:
        self.world = World(rank=rank, size=len(meeting.slots))
        self.meeting, self.step = meeting, step

    def gather_objects(self, value: Any) -> list[Any]:
        self.meeting.slots[self.world.rank] = pickle.dumps(value)
        self.meeting.barrier.wait()
        values = [pickle.loads(slot) for slot in self.meeting.slots]
        self.meeting.barrier.wait()
        return values

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return self.gather_objects(value)[root]

    def barrier(self) -> None:
        self.gather_objects(None)

    def export_state(self) -> BackendState:
        rank, size = self.world.rank, self.world.size
        start, end = COUNT * rank // size, COUNT * (rank + 1) // size
        return BackendState([Chunk("w", "model", (COUNT,), start, tensor_of(self.step)[start:end].clone())])


class Gap(ThreadRank):
    """Its second rank forgets an element."""

    def export_state(self) -> BackendState:
        state = super().export_state()
        if self.world.rank == 1:
            old = state.chunks[0]
            state.chunks[0] = Chunk(old.name, old.key, old.shape, old.start + 1, old.data[1:])
        return state


class Broken(ThreadRank):
    """Its second rank cannot export."""

    def export_state(self) -> BackendState:
        if self.world.rank == 1:
            raise KeyError("exp_avg")
        return super().export_state()


def tensor_of(step: int) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(step))


def on_ranks(size: int, action: Callable[[int], Any]) -> list[Any]:
    """What `action` returned or raised on each of `size` concurrent ranks."""
    outcomes: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            outcomes[rank] = action(rank)
        except Exception as error:  # noqa: BLE001 - compared by the caller
            outcomes[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def save(
    directory: Path | str,
    step: int,
    size: int = 1,
    *,
    keep_last: int | None = None,
    layers: dict[int, FileLayer] | None = None,
    kind: type[ThreadRank] = ThreadRank,
    **extra: Any,
) -> list[Any]:
    meeting = Meeting(size)

    def work(rank: int) -> str:
        store = PortableCheckpointer(str(directory), keep_last=keep_last, files=(layers or {}).get(rank))
        backend: Any = kind(rank, meeting, step)
        return store.save(backend, {"progress": {"step": step}, **extra}, {"rank": rank})

    return on_ranks(size, work)


def latest(directory: Path) -> str | None:
    return PortableCheckpointer(str(directory), keep_last=None).latest()


def is_step(path: str | None, step: int) -> bool:
    """Whether `path` holds, whole and readable, what was saved at `step`."""
    return (
        path is not None
        and not verify(path)
        and torch.equal(PortableReader(path).read("model", "w"), tensor_of(step))
    )


def test_layout_modes_and_content(tmp_path: Path) -> None:
    paths = save(tmp_path, 120, 2, scheduler={"last_lr": (0.1, float("inf"))})
    assert paths == [str(tmp_path / "step_00000120")] * 2
    root = Path(paths[0])
    names = {"manifest.json", "rank_00000.json", "rank_00001.json"}
    names |= {"shard_00000_of_00002.bin", "shard_00001_of_00002.bin"}
    assert {path.name for path in root.iterdir()} == names
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in root.iterdir()} == {0o600}
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000120"]
    manifest = json.loads((root / "manifest.json").read_bytes())
    assert (manifest["version"], manifest["step"], manifest["world_size"]) == (1, 120, 2)
    assert manifest["files"].keys() == names - {"manifest.json"}
    assert manifest["versions"]["torch"] == torch.__version__
    raw = tensor_of(120).numpy().astype("<f4").tobytes()
    half = COUNT // 2 * 4
    assert (root / "shard_00000_of_00002.bin").read_bytes() == raw[:half]
    assert (root / "shard_00001_of_00002.bin").read_bytes() == raw[half:]
    reader = PortableReader(paths[0])
    assert reader.extra == {"progress": {"step": 120}, "scheduler": {"last_lr": (0.1, float("inf"))}}
    assert reader.rank_extra(1) == {"rank": 1}
    assert reader.step == 120


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_range_reads_as_the_original(data: Any) -> None:
    size = data.draw(st.integers(1, 4))
    with tempfile.TemporaryDirectory() as directory:
        reader = PortableReader(save(directory, 1, size)[0])
        whole = tensor_of(1)
        for _ in range(10):
            start = data.draw(st.integers(0, COUNT))
            length = data.draw(st.integers(0, COUNT - start))
            assert torch.equal(reader.read("model", "w", start, length), whole[start : start + length])
        with pytest.raises(ValueError, match="not in 'w'"):
            reader.read("model", "w", start, COUNT - start + 1)


def write_boxes(directory: Path, whole: numpy.ndarray[Any, Any], boxes: list[Any]) -> None:
    """A checkpoint by hand in the view that tensor parallelism needs: one box per rank."""
    directory.mkdir()
    facts: dict[str, dict[str, Any]] = {}
    entries = []
    for rank, (offsets, lengths) in enumerate(boxes):
        place = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
        raw, shard = whole[place].tobytes(), f"shard_{rank:05d}_of_{len(boxes):05d}.bin"
        (directory / shard).write_bytes(raw)
        facts[shard] = {"size": len(raw), "crc32": zlib.crc32(raw)}
        entry = ChunkEntry(
            "model", "w", whole.shape, "int64", offsets, lengths, "nd", shard, 0, zlib.crc32(raw)
        )
        entries.append(entry)
        index = directory / rank_file(rank)
        index.write_bytes(seal({"chunks": [entry.to_json()], "rank_extra": {}}))
        facts[index.name] = {"size": index.stat().st_size, "sha256": sha256_of(str(index))}
    manifest = manifest_of(1, BackendState(), {}, facts, entries, len(boxes))
    (directory / "manifest.json").write_bytes(seal(manifest))


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Any]]:
    """A shape and the boxes of a grid over it, in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    boxes: list[Any] = [((), ())]
    for extent in shape:
        cuts = sorted({0, extent, *draw(st.lists(st.integers(0, extent), max_size=2))})
        spans = list(itertools.pairwise(cuts))
        boxes = [((*o, a), (*n, b - a)) for o, n in boxes for a, b in spans]
    return shape, draw(st.permutations(boxes))


@given(grids(), st.data())
@settings(max_examples=80, deadline=None)
def test_boxes_of_any_grid_read_as_the_original(grid: Any, data: Any) -> None:
    shape, boxes = grid
    whole = numpy.arange(numpy.prod(shape, dtype=int), dtype="<i8").reshape(shape)
    with tempfile.TemporaryDirectory() as directory:
        write_boxes(Path(directory, "step_00000001"), whole, boxes)
        path = os.path.join(directory, "step_00000001")
        assert verify(path) == []
        reader = PortableReader(path)
        start = data.draw(st.integers(0, whole.size))
        length = data.draw(st.integers(0, whole.size - start))
        assert (
            reader.read("model", "w", start, length).tolist()
            == whole.reshape(-1)[start : start + length].tolist()
        )


def entry(start: int, length: int, shape: tuple[int, ...] = (10,), dtype: str = "int64") -> ChunkEntry:
    return ChunkEntry("model", "w", shape, dtype, (start,), (length,), "flat", "f", 0, 0)


@pytest.mark.parametrize(("entries", "words"), [
    ([entry(0, 4), entry(4, 6)], None),
    ([entry(4, 6), entry(0, 4), entry(2, 0)], None),
    ([entry(0, 0, (0,))], None),
    ([entry(0, 4), entry(5, 5)], "4 to 5 are missing"),
    ([entry(0, 4), entry(3, 7)], "3 to 4 are written twice"),
    ([entry(0, 9)], "9 to 10 are missing"),
    ([entry(1, 9)], "0 to 1 are missing"),
    ([entry(0, 10), entry(0, 10)], "written twice"),
    ([entry(0, 4), entry(4, 6, (5, 2))], "disagree"),
    ([entry(0, 4), entry(4, 6, dtype="int32")], "disagree"),
])  # fmt: skip
def test_tiling(entries: list[ChunkEntry], words: str | None) -> None:
    problems = tiling_problems(entries)
    assert (words is None and not problems) or (words is not None and words in problems[0])


def test_a_gap_between_ranks_is_never_committed(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    errors = save(tmp_path, 2, 2, kind=Gap)
    assert [type(error) for error in errors] == [RuntimeError] * 2
    assert "1500 to 1501 are missing" in str(errors[1])
    assert os.listdir(tmp_path) == ["step_00000001"]


def test_one_rank_that_cannot_export_stops_all_with_its_error(tmp_path: Path) -> None:
    errors = save(tmp_path, 2, 3, kind=Broken)
    assert {str(error) for error in errors} == {"rank 1 on localhost: KeyError: 'exp_avg'"}
    assert os.listdir(tmp_path) == []


def test_state_that_is_no_data_stops_all_with_its_path(tmp_path: Path) -> None:
    errors = save(tmp_path, 2, 2, scheduler={"anneal_func": len})
    assert [type(error) for error in errors] == [UserError] * 2
    assert all("'scheduler.anneal_func'" in str(error) for error in errors)
    assert os.listdir(tmp_path) == []


def test_saving_a_good_step_again_changes_nothing(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 5, note="first")
    before = {name: Path(path, name).read_bytes() for name in os.listdir(path)}
    assert save(tmp_path, 5, 2, note="second") == [path, path]
    assert {name: Path(path, name).read_bytes() for name in os.listdir(path)} == before


def test_saving_a_damaged_step_again_replaces_it(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 5)
    flip(Path(path, "shard_00000_of_00001.bin"), 100)
    save(tmp_path, 5)
    assert is_step(path, 5)
    assert os.listdir(tmp_path) == ["step_00000005"]


class FaultyLayer(FileLayer):
    """Real operations; the one numbered `fail_at` raises instead, or after half its work."""

    OPERATIONS = ("make_directory", "open", "write", "fsync", "fsync_directory", "rename", "remove")

    def __init__(self, fail_at: int, number: int = errno.ENOSPC) -> None:
        self.fail_at, self.number, self.count, self.failed = fail_at, number, 0, ""

    def __getattribute__(self, name: str) -> Any:
        operation = super().__getattribute__(name)
        if name not in FaultyLayer.OPERATIONS:
            return operation

        def counted(*args: Any) -> Any:
            self.count += 1
            if self.count - 1 == self.fail_at:
                self.failed = name
                if name == "write":
                    operation(args[0], bytes(args[1])[: len(args[1]) // 2])
                raise OSError(self.number, os.strerror(self.number), str(args[0]))
            return operation(*args)

        return counted


def test_a_fault_at_any_file_operation_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    """Steps 1 and 2 exist, keep_last is 2: step 3 writes, commits, and collects step 1."""
    size, seen = 2, set()
    for faulty in range(size):
        for fail_at in range(100):
            directory = tmp_path / f"{faulty}_{fail_at}"
            directory.mkdir()
            for step in (1, 2):
                save(directory, step, size)
            layer = FaultyLayer(fail_at)
            outcomes = save(directory, 3, size, keep_last=2, layers={faulty: layer})
            if not layer.failed:
                break
            seen.add((faulty, layer.failed))
            assert len({(type(outcome), str(outcome)) for outcome in outcomes}) == 1, outcomes
            newest = latest(directory)
            if isinstance(outcomes[0], OSError):
                assert outcomes[0].errno == errno.ENOSPC
                assert f"rank {faulty}" in str(outcomes[0])
                # Only when the last fsync failed may the new one already be there; then it is whole.
                assert is_step(newest, 3 if newest and newest.endswith("3") else 2)
                assert is_step(str(directory / "step_00000001"), 1)
            else:
                assert is_step(newest, 3)
            # The next run clears the remains, saves, and that is what it finds.
            assert save(directory, 4, size)[0] == latest(directory)
            assert not [name for name in os.listdir(directory) if name.startswith(".")]
        else:
            pytest.fail("the fault points never ended")
    assert {name for rank, name in seen if rank == 0} == set(FaultyLayer.OPERATIONS)
    assert {name for rank, name in seen if rank == 1} == {"open", "write", "fsync", "rename"}


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1 << (offset % 8)
    path.write_bytes(raw)


def corrupt(path: Path, rng: random.Random) -> str:
    """Damage one file so that its bytes differ; returns how."""
    raw = path.read_bytes()
    kind = rng.choice(["flip", "truncate", "delete", "zero page", "swap"])
    if kind == "flip":
        flip(path, rng.randrange(len(raw)))
    elif kind == "truncate":
        path.write_bytes(raw[: rng.randrange(len(raw))])
    elif kind == "delete":
        path.unlink()
    elif kind == "zero page":
        start = rng.randrange(len(raw)) // 4096 * 4096
        path.write_bytes(raw[:start] + bytes(len(raw[start : start + 4096])) + raw[start + 4096 :])
    else:
        start, length = rng.randrange(len(raw) - 8), 4
        path.write_bytes(raw[:start] + raw[start + length : start + 2 * length]
                         + raw[start : start + length] + raw[start + 2 * length :])  # fmt: skip
    return kind if not path.exists() or path.read_bytes() != raw else "nothing"


def test_no_corruption_is_accepted(tmp_path: Path) -> None:
    good = Path(save(tmp_path, 2, 2)[0])
    rng, done = random.Random(7), 0
    while done < 200:
        path = tmp_path / f"case_{done}" / "step_00000002"
        shutil.copytree(good, path)
        victim = path / rng.choice(sorted(os.listdir(path)))
        how = corrupt(victim, rng)
        if how == "nothing":
            shutil.rmtree(path.parent)
            continue
        done += 1
        problems = verify(str(path))
        assert problems, (how, victim.name)
        assert any(victim.name in problem for problem in problems), (how, victim.name, problems)
        parts = [verify(str(path), part, 3) for part in range(3)]
        assert any(parts), (how, victim.name)
        with pytest.raises(UserError, match=victim.name.replace(".", r"\.")):
            read_everything(str(path))
        shutil.rmtree(path.parent)


def read_everything(path: str) -> None:
    reader = PortableReader(path)
    for key, name in reader.tensors():
        reader.read(key, name)
    for rank in range(reader.world_size):
        reader.rank_extra(rank)


@pytest.mark.parametrize("name", ["shard_00000_of_00002.bin", "rank_00000.json", "manifest.json"])
def test_files_of_two_checkpoints_do_not_mix(name: str, tmp_path: Path) -> None:
    first, second = Path(save(tmp_path, 1, 2)[0]), Path(save(tmp_path, 2, 2)[0])
    shutil.copy(first / name, second / name)
    assert verify(str(second))
    with pytest.raises(UserError, match="damaged"):
        read_everything(str(second))


def test_an_index_that_the_manifest_does_not_know_is_refused(tmp_path: Path) -> None:
    """Sealed and of the right size, and still not what was committed."""
    (path,) = save(tmp_path, 1)
    index = Path(path, "rank_00000.json")
    content = unseal(index.read_bytes())
    content["rank_extra"]["rank"] = 9
    size = index.stat().st_size
    index.write_bytes(seal(content))
    assert index.stat().st_size == size
    with pytest.raises(UserError, match="another checkpoint"):
        PortableReader(path).read("model", "w")


class KillingLayer(FaultyLayer):
    """The operation numbered `fail_at` ends the process, as ``kill -9`` would."""

    def __getattribute__(self, name: str) -> Any:
        if name in FaultyLayer.OPERATIONS and super().__getattribute__("count") == super().__getattribute__(
            "fail_at"
        ):
            os._exit(9)
        return super().__getattribute__(name)


def test_a_kill_at_any_file_operation_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    for fail_at in range(100):
        directory = tmp_path / str(fail_at)
        directory.mkdir()
        for step in (1, 2):
            save(directory, step)
        child = os.fork()
        if child == 0:
            backend: Any = ThreadRank(0, Meeting(1), 3)
            store = PortableCheckpointer(str(directory), keep_last=2, files=KillingLayer(fail_at))
            store.save(backend, {"progress": {"step": 3}}, {})
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        newest = latest(directory)
        assert is_step(newest, 3 if newest and newest.endswith("3") else 2)
        save(directory, 4, keep_last=2)
        assert kept(directory) == [4, 3 if newest and newest.endswith("3") else 2]
        assert not [name for name in os.listdir(directory) if name.startswith(".")]
        if not killed:
            break
    assert fail_at > len(FaultyLayer.OPERATIONS)


def test_latest_passes_over_the_damaged_and_names_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    flip(tmp_path / "step_00000003" / "manifest.json", 200)
    os.unlink(tmp_path / "step_00000002" / "shard_00000_of_00001.bin")
    with caplog.at_level(logging.WARNING, "distributed"):
        assert is_step(latest(tmp_path), 1)
    assert os.path.join("step_00000003", "manifest.json") in caplog.text
    assert os.path.join("step_00000002", "shard_00000_of_00001.bin") in caplog.text


def test_a_reader_names_another_version(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 1)
    manifest = Path(path, "manifest.json")
    manifest.write_bytes(seal({**unseal(manifest.read_bytes()), "sha256": 0, "version": 2}))
    with pytest.raises(UserError, match=r"version 2.*version 1"):
        PortableReader(path)


def test_no_path_leads_out_of_the_directory(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 1)
    manifest = Path(path, "manifest.json")
    content = unseal(manifest.read_bytes())
    content["files"]["../secret"] = {"size": 0, "crc32": 0}
    manifest.write_bytes(seal(content))
    with pytest.raises(UserError, match="not a plain file name"):
        PortableReader(path)


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["BOMB"],)


def test_a_pickle_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crater = tmp_path / "crater"
    monkeypatch.setenv("BOMB", str(crater))
    bomb = pickle.dumps(Bomb())
    home = tmp_path / "home"
    home.mkdir()
    good = Path(save(home, 1)[0])
    for name in os.listdir(good):
        target = home / "step_00000002"
        shutil.copytree(good, target)
        Path(target, name).write_bytes(bomb)
        Path(target, "optimizer.pt").write_bytes(bomb)
        Path(home, "best.json").write_bytes(bomb)
        store = PortableCheckpointer(str(home), keep_last=None)
        assert verify(str(target))
        assert store.latest() == str(good)
        assert store.best() is None
        with pytest.raises(UserError):
            read_everything(str(target))
        shutil.rmtree(target)
    assert not crater.exists()
    pickle.loads(bomb)
    assert crater.exists()


def kept(directory: Path) -> list[int]:
    return PortableCheckpointer(str(directory), keep_last=None).steps()


def test_retention_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    store = PortableCheckpointer(str(tmp_path), keep_last=2)
    save(tmp_path, 1, keep_last=2)
    assert store.best() is None
    store.mark_best(save(tmp_path, 2, keep_last=2)[0])
    for step in (3, 4, 5):
        save(tmp_path, step, 2, keep_last=2)
    assert kept(tmp_path) == [5, 4, 2]
    assert is_step(store.best(), 2)
    store.mark_best(store.path_of(5))
    save(tmp_path, 6, keep_last=2)
    assert kept(tmp_path) == [6, 5]
    assert store.best() == store.path_of(5)
    assert stat.S_IMODE((tmp_path / "best.json").stat().st_mode) == 0o600


def test_damaged_checkpoints_do_not_push_out_good_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    for step in (2, 3):
        os.unlink(tmp_path / f"step_{step:08d}" / "manifest.json")
    save(tmp_path, 4, keep_last=2)
    assert kept(tmp_path) == [4, 3, 2, 1]
    save(tmp_path, 5, keep_last=2)
    assert kept(tmp_path) == [5, 4]


def test_an_unreadable_mark_of_the_best_removes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    PortableCheckpointer(str(tmp_path), keep_last=None).mark_best(str(tmp_path / "step_00000001"))
    flip(tmp_path / "best.json", 90)
    save(tmp_path, 2, keep_last=1)
    assert kept(tmp_path) == [2, 1]


def test_only_our_own_leftovers_are_swept(tmp_path: Path) -> None:
    ours = [".tmp-step_00000003-0123456789abcdef", ".gc-step_00000001-0123456789abcdef"]
    theirs = [
        ".tmp-step_3",
        ".tmp-notes",
        "step_old",
        ".gc-step_00000001",
        "tmp-step_00000003-0123456789abcdef",
    ]
    for name in ours + theirs:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    save(tmp_path, 5)
    assert set(os.listdir(tmp_path)) == {*theirs, "step_00000005"}


def test_keep_last_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"checkpoint\.keep_last.*0"):
        PortableCheckpointer(str(tmp_path), keep_last=0)


def test_a_vanished_directory_and_one_below_a_file(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    save(home, 1)
    shutil.rmtree(home)
    (tmp_path / "file").write_text("x")
    for directory, kind in ((home, FileNotFoundError), (tmp_path / "file" / "below", NotADirectoryError)):
        outcomes = save(directory, 2, 3)
        assert [type(outcome) for outcome in outcomes] == [kind] * 3
        assert len({str(outcome) for outcome in outcomes}) == 1
        assert latest(directory) is None


def test_checkpoints_of_another_run_are_set_aside(tmp_path: Path) -> None:
    for step, lineage in ((1, "mine"), (2, "other"), (3, "mine"), (9, "mine")):
        save(tmp_path, step, lineage=lineage)
    store = PortableCheckpointer(str(tmp_path), keep_last=None)
    store.mark_best(store.path_of(9))
    aside = store.set_aside("mine", 3)
    assert aside is not None
    assert set(os.listdir(aside)) == {"step_00000002", "step_00000009", "best.json"}
    assert is_step(os.path.join(aside, "step_00000009"), 9)
    assert store.steps() == [3, 1]
    assert store.best() is None
    assert store.set_aside("mine", 3) is None
