"""A checkpoint is committed whole or not at all, reads back exactly, and others make room as stated."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import stat
import tempfile
import zlib
from pathlib import Path
from typing import Any

import fsspec
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.chunk_index import ChunkEntry, tiling_problems
from distributed.checkpoint.file_names import FORMAT, VERSION, rank_file
from distributed.checkpoint.filesystem import FileLayer, seal
from distributed.checkpoint.object_store import located
from distributed.checkpoint.reader import PortableReader, verify
from distributed.checkpoint.writer import manifest_of
from distributed.errors import UserError
from distributed.interfaces.state import BackendState, Chunk
from distributed.testing.faults import FaultyLayer, FaultyObjects
from tests.campaigns.corruptions import flip
from tests.campaigns.thread_ranks import COUNT, Meeting, SliceRank, holds_step, latest, save, tensor_of


class Gap(SliceRank):
    """Its second rank forgets an element."""

    def export_state(self) -> BackendState:
        state = super().export_state()
        if self.world.rank == 1:
            old = state.chunks[0]
            state.chunks[0] = Chunk(old.name, old.key, old.shape, old.start + 1, old.data[1:])
        return state


class Broken(SliceRank):
    """Its second rank cannot export."""

    def export_state(self) -> BackendState:
        if self.world.rank == 1:
            raise KeyError("exp_avg")
        return super().export_state()


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
        own = {"format": FORMAT, "version": VERSION, "rank": rank, "world_size": len(boxes)}
        index.write_bytes(seal({**own, "chunks": [entry.to_json()], "rank_extra": {}}))
        facts[index.name] = {"size": index.stat().st_size, "sha256": FileLayer().sha256(str(index))}
    manifest = manifest_of(1, BackendState(), {"progress": {"step": 1}}, facts, entries, len(boxes))
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
    assert holds_step(path, 5)
    assert os.listdir(tmp_path) == ["step_00000005"]


class Later(SliceRank):
    """The same step in another state."""

    def export_state(self) -> BackendState:
        self.step = 99
        return super().export_state()


def save_end(place: str, size: int = 1, **options: Any) -> list[Any]:
    """Save step 5 once more, at the end of its epoch."""
    return save(place, 5, size, kind=Later, progress={"step": 5, "epoch": 1}, **options)


@pytest.mark.parametrize("kind", ["disk", "store"])
def test_a_step_in_another_state_replaces_it_at_once_wherever_it_is_interrupted(
    kind: str, tmp_path: Path
) -> None:
    for number in itertools.count():
        layer: Any = FaultyLayer(number, lasting=True)
        place = str(tmp_path / f"{number}")
        if kind == "store":
            layer = FaultyObjects(number, fsspec.filesystem("memory"), lasting=True)
            place = f"memory://replaced/{number}"
        path = save(place, 5, 2)[0]
        (outcome,) = save_end(place, layers={0: layer})
        assert holds_step(path, 99) or (holds_step(path, 5) and outcome != path), layer.failed
        assert save_end(place, 2) == [path, path]
        assert holds_step(path, 99)
        assert PortableReader(path).extra["progress"] == {"step": 5, "epoch": 1}
        files = located(place)[0]
        assert files.names(place) == ["step_00000005"]
        assert len(files.names(path)) == 2, files.names(path)  # the manifest and the folder that it names
        if not layer.failed:
            break
    assert number > 4
    before = files.names(path)
    assert save_end(place) == [path]
    assert files.names(path) == before


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
    assert holds_step(store.best(), 2)
    store.mark_best(store.path_of(5))
    save(tmp_path, 6, keep_last=2)
    assert kept(tmp_path) == [6, 5]
    assert store.best() == store.path_of(5)
    assert stat.S_IMODE((tmp_path / "best.json").stat().st_mode) == 0o600


def test_retention_keeps_every_nth_step_too(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(tmp_path, step, keep_last=1, keep_every=3)
    assert kept(tmp_path) == [7, 6, 3]
    store = PortableCheckpointer(str(tmp_path), keep_last=None)
    store.mark_best(store.path_of(3))
    save(tmp_path, 8, keep_last=1, keep_every=4)
    assert kept(tmp_path) == [8, 3]


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


FOREIGN = ["step_000000006", "step_\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0666", "step_6"]


def test_names_that_are_no_checkpoints_of_ours_are_left_alone_and_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nine digits with a zero in front, digits of another script, too few digits."""
    save(tmp_path, 5, lineage="mine")
    for name in FOREIGN:
        shutil.copytree(tmp_path / "step_00000005", tmp_path / name)
    store = PortableCheckpointer(str(tmp_path), keep_last=1)
    store.prepare(SliceRank(0, Meeting(1), 0))
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert all(name in warning for name in FOREIGN)
    assert (store.steps(), latest(tmp_path)) == ([5], str(tmp_path / "step_00000005"))
    assert store.set_aside("mine", 9) is None
    for step in (6, 100_000_007):
        assert holds_step(save(tmp_path, step, keep_last=1)[0], step)
    assert set(os.listdir(tmp_path)) == {*FOREIGN, "step_100000007"}
    assert len([r for r in caplog.records if "step_6" in r.getMessage()]) == 1


def test_a_step_of_another_run_does_not_count_as_saved_and_is_never_replaced(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 5, lineage="other")
    (error,) = save(tmp_path, 5, lineage="mine")
    assert isinstance(error, FileExistsError)
    assert "another run" in str(error)
    assert path in str(error)
    assert PortableReader(path).extra["lineage"] == "other"
    assert save(tmp_path, 5, lineage="other") == [path]


class Late(FileLayer):
    """Before the manifest is written, or before the checkpoint is renamed, another process commits the step.

    Args:
        other: its checkpoint.
        moment: ``write_file`` or ``rename``.
    """

    def __init__(self, other: str, moment: str) -> None:
        self.other, self.moment = other, moment

    def write_file(self, path: str, data: bytes) -> None:
        if self.moment == "write_file" and os.path.basename(path) == "manifest.json":
            self._commit(os.path.dirname(os.path.dirname(path)))
        super().write_file(path, data)

    def rename(self, source: str, target: str) -> None:
        if self.moment == "rename" and os.path.basename(target) == "step_00000005":
            self._commit(os.path.dirname(target))
        super().rename(source, target)

    def _commit(self, directory: str) -> None:
        shutil.copytree(self.other, os.path.join(directory, "step_00000005"))


@pytest.mark.parametrize("moment", ["write_file", "rename"])
def test_a_good_checkpoint_of_another_process_is_never_dropped_as_damaged(
    moment: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (other,) = save(tmp_path / "other", 5, note="first")
    home = tmp_path / "home"
    (error,) = save(home, 5, layers={0: Late(other, moment)}, note="second")
    assert isinstance(error, OSError)
    assert holds_step(str(home / "step_00000005"), 5)
    assert PortableReader(str(home / "step_00000005")).extra["note"] == "first"
    assert "damaged" not in caplog.text
    assert os.listdir(home) == ["step_00000005"]


def test_keep_last_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"checkpoint\.keep_last.*0"):
        PortableCheckpointer(str(tmp_path), keep_last=0)


def test_a_vanished_directory_is_made_again_and_one_below_a_file_is_refused(tmp_path: Path) -> None:
    home = tmp_path / "home"
    save(home, 1)
    shutil.rmtree(home)
    assert holds_step(save(home, 2, 3)[0], 2)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    (tmp_path / "file").write_text("x")
    outcomes = save(tmp_path / "file" / "below", 2, 3)
    assert [type(outcome) for outcome in outcomes] == [NotADirectoryError] * 3
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert latest(tmp_path / "file" / "below") is None


def test_a_large_tensor_is_stored_in_pieces_of_their_own_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributed.checkpoint.writer._PIECE", 1000)
    reader = PortableReader(save(tmp_path, 1, 2)[0])
    assert [entry.count for entry in reader.entries()] == [250] * 12
    assert torch.equal(reader.read("model", "w", 1400, 300), tensor_of(1)[1400:1700])
    shard = tmp_path / "step_00000001" / "shard_00001_of_00002.bin"
    flip(shard, 5999)
    assert torch.equal(reader.read("model", "w", 0, 2750), tensor_of(1)[:2750])
    with pytest.raises(UserError, match="checksum of 'w'"):
        reader.read("model", "w", 2750)


def test_checkpoints_of_another_run_are_set_aside(tmp_path: Path) -> None:
    for step, lineage in ((1, "mine"), (2, "other"), (3, "mine"), (9, "mine")):
        save(tmp_path, step, lineage=lineage)
    store = PortableCheckpointer(str(tmp_path), keep_last=None)
    store.mark_best(store.path_of(9))
    aside = store.set_aside("mine", 3)
    assert aside is not None
    assert set(os.listdir(aside)) == {"step_00000002", "step_00000009", "best.json"}
    assert holds_step(os.path.join(aside, "step_00000009"), 9)
    assert store.steps() == [3, 1]
    assert store.best() is None
    assert store.set_aside("mine", 3) is None
