"""A checkpoint of many ranks has their indexes in one file: a rank that resumes opens one and not all."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import UserError
from distributed.checkpoint.file_names import FORMAT, MANIFEST, MERGED
from distributed.checkpoint.filesystem import FileLayer, seal, unseal
from distributed.checkpoint.reader import PortableReader, verify
from tests.campaigns.thread_ranks import holds_step, save, tensor_of

MANY = 70


class CountedFiles(FileLayer):
    """A file layer that notes what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def read(self, path: str) -> bytes:
        self.names.append(Path(path).name)
        return super().read(path)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (path,) = set(save(tmp_path_factory.mktemp("saved"), 1, MANY))
    return Path(path)


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    """A checkpoint of `MANY` ranks of its own."""
    return Path(shutil.copytree(original, tmp_path / original.name))


def reseal(path: Path, merged: dict[str, Any] | None = None, changes: dict[str, Any] | None = None) -> None:
    """Change the manifest, and the merged index if it is given, and correct the hashes."""
    manifest = unseal((path / MANIFEST).read_bytes()) | (changes or {})
    if merged is not None:
        raw = seal(merged)
        (path / MERGED).write_bytes(raw)
        manifest["files"][MERGED] = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (path / MANIFEST).write_bytes(seal(manifest))


def names_read(path: Path) -> list[str]:
    reader = PortableReader(str(path))
    layer = reader._files = CountedFiles()
    assert torch.equal(reader.read("model", "w"), tensor_of(1))
    reader.rank_extra(1)
    return layer.names


def test_the_indexes_of_many_ranks_are_one_file(path: Path) -> None:
    assert names_read(path) == [MERGED, "rank_00001.json"]
    assert holds_step(str(path), 1)
    assert all(not verify(str(path), part, 3) for part in range(3))
    assert PortableReader(str(path)).rank_extra(MANY - 1) == {"rank": MANY - 1}


def test_few_ranks_have_no_merged_index(tmp_path: Path) -> None:
    path = Path(save(tmp_path, 1, 3)[0])
    assert not (path / MERGED).exists()
    assert "index" not in json.loads((path / "manifest.json").read_text())
    assert names_read(path) == [f"rank_0000{rank}.json" for rank in (0, 1, 2, 1)]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_merged_index_is_refused(path: Path, damage: str) -> None:
    file = path / MERGED
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(raw if damage == "flip" else raw[:-1])
    (problem,) = verify(str(path))
    assert MERGED in problem
    with pytest.raises(UserError, match=MERGED):
        PortableReader(str(path)).read("model", "w")


def test_a_damaged_index_of_one_rank_is_still_found(path: Path) -> None:
    file = path / "rank_00042.json"
    raw = bytearray(file.read_bytes())
    raw[-10] ^= 1
    file.write_bytes(raw)
    (problem,) = verify(str(path))
    assert file.name in problem


@pytest.mark.parametrize("ranks", [None, {}, [], [None] * MANY, [{}] * MANY])
def test_a_forged_merged_index_is_refused(path: Path, ranks: Any) -> None:
    reseal(path, {"format": FORMAT, "version": 1, "ranks": ranks})
    (problem,) = verify(str(path))
    assert f"{MERGED}: malformed" in problem


@pytest.mark.parametrize("name", ["rank_00000.json", "other.json", 7, None])
def test_a_manifest_names_no_other_file_as_index(path: Path, name: Any) -> None:
    reseal(path, changes={"index": name})
    (problem,) = verify(str(path))
    assert "malformed: index is" in problem


def test_large_indexes_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed.checkpoint.writer._LARGEST_MERGED", 1000)
    path = Path(save(tmp_path, 1, MANY)[0])
    assert not (path / MERGED).exists()
    assert holds_step(str(path), 1)
