"""Checkpoints in an object store: a real S3 server on this host, and fsspec's memory for the rest."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file

from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.filesystem import FileLayer
from distributed.checkpoint.object_store import ObjectLayer, located
from distributed.checkpoint.reader import PortableReader, verify
from distributed.cli import main
from distributed.errors import UserError
from distributed.testing.reference_problem import distance, problem, small_model
from tests.campaigns.thread_ranks import ThreadRank, holds_step, latest, on_ranks, save, tensor_of
from tests.support.training import make_trainer


def names(url: str) -> set[str]:
    """What lies below, without the random names of attempts."""
    store, root = fsspec.url_to_fs(url, use_listings_cache=False)
    found = [name.removeprefix(f"{root}/") for name in store.find(root)]
    return {
        "/".join("*" if part.startswith("attempt-") else part for part in name.split("/")) for name in found
    }


def trained(backend: str, ranks: int, steps: int, **given: Any) -> tuple[Any, Any]:
    model = small_model()
    trainer = make_trainer(model, ranks, backend=backend, global_batch_size=8, learning_rate=0.1, **given)
    return model, trainer.fit(problem(64), max_steps=steps)


@pytest.mark.starts_processes
def test_a_run_saves_to_a_store_and_another_backend_goes_on_from_it(bucket: str) -> None:
    url = f"{bucket}/runs/a"
    given = {"checkpoint_dir": url, "checkpoint": {"every_n_steps": 2, "keep_last": 2, "keep_best": False}}
    _, first = trained("pytorch-ddp", 2, 6, **given)
    assert first.checkpoint == f"{url}/step_00000006"
    assert {name.split("/")[0] for name in names(url)} == {"step_00000004", "step_00000006"}
    files = {"rank_00000.json", "rank_00001.json", "shard_00000_of_00002.bin", "shard_00001_of_00002.bin"}
    assert names(first.checkpoint) == {"manifest.json", *(f"*/{name}" for name in files)}
    assert verify(first.checkpoint) == []
    model, second = trained("fsdp", 2, 10, resume_from_checkpoint=True, **given)
    assert second.steps["step"] == [7, 8, 9, 10]
    whole, _ = trained("serial", 1, 10)
    assert distance(model, whole) < 1e-9
    assert PortableCheckpointer(url, keep_last=None).steps() == [10, 8]


@pytest.mark.slow
def test_the_command_reads_a_store(bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"{bucket}/runs/command"
    model, _ = trained("serial", 1, 6, checkpoint_dir=url, checkpoint={"every_n_steps": 2, "keep_last": None})

    capsys.readouterr()

    def said(*words: object) -> str:
        assert main(["checkpoint", *map(str, words)]) == 0
        return capsys.readouterr().out

    rows = json.loads(said("ls", url, "--json"))
    assert [(row["step"], row["path"], row["state"]) for row in rows] == [
        (step, f"{url}/step_{step:08d}", "complete") for step in (6, 4, 2)
    ]
    assert json.loads(said("show", url, "--json"))["path"] == f"{url}/step_00000006"
    assert said("verify", url).count(": good") == 3
    said("export", url, "--output", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["0.weight"].equal(model[0].weight)
    assert said("prune", url, "--keep-last", 1, "--keep-every", 4).count("removed") == 1
    assert {name.split("/")[0] for name in names(url)} == {"step_00000004", "step_00000006"}
    assert main(["checkpoint", "export", url, "--output", f"{bucket}/out"]) == 2
    assert "written to a disk" in capsys.readouterr().err


def test_only_a_manifest_makes_a_checkpoint_and_the_owner_sweeps_the_rest(bucket: str) -> None:
    url = f"{bucket}/runs/leftovers"
    save(url, 1, 2)
    store = fsspec.filesystem("s3", use_listings_cache=False)
    store.pipe_file(f"{url}/step_00000002/attempt-0123456789abcdef/shard_00000_of_00001.bin", b"torn")
    store.pipe_file(f"{url}/step_00000001/attempt-0123456789abcdef/rank_00000.json", b"torn")
    store.pipe_file(f"{url}/notes/mine.txt", b"kept")
    assert latest(url) == f"{url}/step_00000001"
    assert PortableCheckpointer(url, keep_last=None).steps() == [1]
    assert holds_step(latest(url), 1)
    save(url, 3)
    assert {name for name in names(url) if name.startswith("step_00000002")} == set()
    assert len(store.ls(f"{url}/step_00000001")) == 2  # its manifest and the folder that this names
    assert "notes/mine.txt" in names(url)
    assert holds_step(f"{url}/step_00000001", 1)


def test_the_store_itself_decides_between_two_writers(bucket: str) -> None:
    files, url = located(f"{bucket}/runs/race/manifest.json")
    assert isinstance(files, ObjectLayer)
    files.put(url, b"first", True)
    with pytest.raises(FileExistsError):
        files.put(url, b"second", True)
    assert files.read(url) == b"first"


class Late(ObjectLayer):
    """Before its manifest arrives, another process commits the step."""

    def put(self, path: str, data: bytes, exclusive: bool = False) -> None:
        if exclusive:
            save(os.path.dirname(os.path.dirname(path)), 5)
        super().put(path, data, exclusive)


class Echo(ObjectLayer):
    """The answer to a put is lost, so that it is sent again."""

    def put(self, path: str, data: bytes, exclusive: bool = False) -> None:
        super().put(path, data, exclusive)
        if exclusive:
            super().put(path, data, exclusive)


def test_a_good_checkpoint_of_another_process_is_never_replaced() -> None:
    store = fsspec.filesystem("memory")
    (error,) = save("memory://late", 5, layers={0: Late(store)})
    assert isinstance(error, FileExistsError)
    assert "another process has committed" in str(error)
    assert holds_step(latest("memory://late"), 5)
    assert save("memory://echo", 5, layers={0: Echo(store)}) == ["memory://echo/step_00000005"]


def test_a_damaged_step_is_replaced_and_a_good_one_left() -> None:
    url, store = "memory://again", fsspec.filesystem("memory")
    (path,) = save(url, 5)
    before = names(url)
    assert save(url, 5, 2) == [path, path]
    assert names(url) == before
    shard = next(name for name in store.find(url) if "shard" in name)
    store.pipe_file(shard, bytes(store.size(shard)))
    assert verify(path)
    assert save(url, 5) == [path]
    assert holds_step(path, 5)
    assert names(url) == before


def test_best_and_lineage_work_without_renames() -> None:
    url = "memory://lineage"
    for step, lineage in ((1, "mine"), (2, "other"), (9, "mine")):
        save(url, step, 2, lineage=lineage)
    store = PortableCheckpointer(url, keep_last=None)
    store.mark_best(store.path_of(2))
    store.mark_best(store.path_of(9))
    assert store.best() == f"{url}/step_00000009"
    aside = store.set_aside("mine", 3)
    assert aside is not None
    assert store.steps() == [1]
    assert store.best() is None
    moved = PortableCheckpointer(aside, keep_last=None)
    assert moved.steps() == [9, 2]
    assert moved.best() == f"{aside}/step_00000009"
    assert holds_step(moved.best(), 9)


def test_a_rank_reads_only_the_pieces_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed.checkpoint.writer._PIECE", 1000)
    reader = PortableReader(save("memory://pieces", 1, 2)[0])
    reader.entries()
    asked, original = [], MemoryFileSystem.cat_file

    def noting(self: Any, path: str, start: int | None = None, end: int | None = None, **given: Any) -> Any:
        data = original(self, path, start, end, **given)
        asked.append((os.path.basename(path), len(data)))
        return data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", noting)
    assert reader.read("model", "w", 1400, 300).equal(tensor_of(1)[1400:1700])
    assert asked == [("shard_00000_of_00002.bin", 1000), ("shard_00001_of_00002.bin", 1000)]


def test_a_store_that_does_not_answer_is_not_taken_for_an_empty_one(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither as a place without checkpoints nor as one with damaged ones: both would start anew."""
    import s3fs

    path = save(f"{bucket}/runs/silent", 1)[0]
    assert verify(path) == []
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    for action in (lambda: verify(path), lambda: latest(os.path.dirname(path)), lambda: PortableReader(path)):
        with pytest.raises(ConnectionError, match="EndpointConnectionError"):
            action()
    (error,) = save(os.path.dirname(path), 2)
    assert isinstance(error, OSError)  # what a run counts as a failed save, and goes on
    s3fs.S3FileSystem.clear_instance_cache()


class Elsewhere(MemoryFileSystem):
    """A memory that no other process sees."""

    store: dict[str, Any] = {}  # noqa: RUF012 - of all instances, as in the original
    cachable = False


def test_a_place_that_the_ranks_do_not_share_is_refused_at_start() -> None:
    def prepare(rank: int, meeting: Any) -> None:
        files = ObjectLayer(Elsewhere()) if rank else None
        store = PortableCheckpointer("memory://unshared", keep_last=None, files=files)
        store.prepare(ThreadRank(rank, meeting))

    errors = on_ranks(3, prepare)
    assert [type(error) for error in errors] == [FileNotFoundError] * 3
    assert "2 of 3 ranks" in str(errors[1])


@pytest.mark.parametrize(("url", "words"), [
    ("nowhere://x/y", "Protocol not known: nowhere"),
    ("s3:/bucket/run", "collapses"),
])  # fmt: skip
def test_what_nothing_opens_is_a_users_mistake(url: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        PortableCheckpointer(url, keep_last=None)


def test_file_urls_are_paths_and_rename(tmp_path: Path) -> None:
    files, path = located(f"file://{tmp_path}/run/")
    assert type(files) is FileLayer
    assert path == str(tmp_path / "run")
    assert save(f"file://{tmp_path}/run", 1) == [str(tmp_path / "run" / "step_00000001")]


def test_a_retry_leaves_the_random_numbers_of_training_alone(bucket: str) -> None:
    """A client pauses for a random time before it retries, in a thread of its own."""
    located(f"{bucket}/run")
    from botocore.retryhandler import delay_exponential

    before = random.getstate()
    assert delay_exponential("rand", 2, 1) != delay_exponential("rand", 2, 1)
    assert random.getstate() == before
