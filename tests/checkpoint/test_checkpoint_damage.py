"""Damage is never accepted, and a fault at any moment leaves the last good checkpoint."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest

from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.filesystem import seal, unseal
from distributed.checkpoint.reader import PortableReader, verify
from distributed.errors import UserError
from distributed.testing.faults import FaultyLayer, FaultyObjects
from tests.campaigns.corruptions import corrupt, flip, random_damage, read_everything, torn_saves
from tests.campaigns.thread_ranks import holds_step, latest, save


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
                assert holds_step(newest, 3 if newest and newest.endswith("3") else 2)
                assert holds_step(str(directory / "step_00000001"), 1)
            else:
                assert holds_step(newest, 3)
            # The next run clears the remains, saves, and that is what it finds.
            assert save(directory, 4, size)[0] == latest(directory)
            assert not [name for name in os.listdir(directory) if name.startswith(".")]
        else:
            pytest.fail("the fault points never ended")
    assert {name for rank, name in seen if rank == 0} == set(FaultyLayer.OPERATIONS)
    assert {name for rank, name in seen if rank == 1} == {"open", "write", "fsync", "rename"}


def test_a_store_that_fails_at_any_operation_keeps_a_good_checkpoint() -> None:
    """Steps 1 and 2 exist, keep_last is 2; every operation of either rank fails, once or from then on."""
    store, seen = fsspec.filesystem("memory"), set()
    for faulty, lasting in itertools.product((0, 1), (False, True)):
        for fail_at in range(100):
            directory = f"memory://faults-{faulty}-{lasting}-{fail_at}"
            for step in (1, 2):
                save(directory, step, 2)
            layer = FaultyObjects(fail_at, store, lasting=lasting)
            outcomes = save(directory, 3, 2, keep_last=2, layers={faulty: layer})
            if not layer.failed:
                break
            seen.add((faulty, layer.failed))
            assert len({(type(outcome), str(outcome)) for outcome in outcomes}) == 1, outcomes
            committed = isinstance(outcomes[0], str)
            assert holds_step(latest(directory), 3 if committed else 2)
            if not committed:
                assert isinstance(outcomes[0], OSError)
                assert f"rank {faulty}" in str(outcomes[0])
            again = save(directory, 4, 2, keep_last=2)[0]
            assert holds_step(again, 4)
            found = [name for name in store.find(directory) if "attempt-" in name]
            steps = {name.split("/")[-3] for name in found}
            assert steps == {"step_00000004", "step_00000003" if committed else "step_00000002"}
        else:
            pytest.fail("the fault points never ended")
    assert seen == {(0, name) for name in ("open", "write", "put", "remove")} | {
        (1, name) for name in ("open", "write", "put")
    }


@pytest.mark.slow
def test_a_cut_at_any_operation_loses_nothing_committed(tmp_path: Path) -> None:
    """``kill -9`` and lost power on a disk, silence of a store; the next save finds its way."""
    rows = torn_saves(tmp_path)
    assert [row for row in rows if row[5] or row[2] != row[3] + row[4]] == []
    for where in {row[0] for row in rows}:
        operations = {row[1] for row in rows if row[0] == where}
        assert operations == set((FaultyLayer if "disk" in where else FaultyObjects).OPERATIONS) - {"copy"}
        assert sum(row[3] for row in rows if row[0] == where) > 3
        assert sum(row[4] for row in rows if row[0] == where) > 1


def test_no_corruption_is_accepted(tmp_path: Path) -> None:
    rows = random_damage(tmp_path, 200, seed=7)
    assert sum(tried for _, tried, _, _ in rows) == 200
    assert [row for row in rows if not row[1] == row[2] == row[3] > 5] == []


@pytest.mark.parametrize("kind", ["a bit flipped", "a file truncated", "a file deleted"])
def test_the_damaged_file_is_named_whichever_rank_reads_it(kind: str, tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / "good", step, 2)
    rng = random.Random(1)
    for case in range(15):
        home = tmp_path / str(case)
        shutil.copytree(tmp_path / "good", home)
        path, other = home / "step_00000002", home / "step_00000001"
        assert corrupt(path, other, kind, rng)
        kept = {file.name: file.read_bytes() for file in path.iterdir()}
        pristine = {file.name: file.read_bytes() for file in (tmp_path / "good" / path.name).iterdir()}
        (victim,) = [name for name in pristine if kept.get(name) != pristine[name]]
        assert any(victim in problem for problem in verify(str(path)))
        assert any(victim in problem for part in range(3) for problem in verify(str(path), part, 3))
        with pytest.raises(UserError, match=victim.replace(".", r"\.")):
            read_everything(str(path))


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


def test_latest_passes_over_the_damaged_and_names_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    flip(tmp_path / "step_00000003" / "manifest.json", 200)
    os.unlink(tmp_path / "step_00000002" / "shard_00000_of_00001.bin")
    with caplog.at_level(logging.WARNING, "distributed"):
        assert holds_step(latest(tmp_path), 1)
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
        for guess in ("optimizer.pt", "model.safetensors", "best.json"):
            Path(target, guess).write_bytes(bomb)
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
