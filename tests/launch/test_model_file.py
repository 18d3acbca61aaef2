"""async_checkpoint: the values at the call, as a whole file, and errors that are not lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distributed import UserError, async_checkpoint, cleanup_distributed, setup_distributed
from distributed.launch import model_file


def test_the_values_at_the_call_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed, save = threading.Event(), torch.save

    def save_later(*args: Any) -> None:
        assert changed.wait(60)
        save(*args)

    monkeypatch.setattr(model_file.torch, "save", save_later)
    model, path = nn.BatchNorm1d(3), tmp_path / "model.pt"
    path.write_text("the file before")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    thread = async_checkpoint(model, path)
    with torch.no_grad():
        for value in model.state_dict().values():
            value += 1
    assert path.read_text() == "the file before"
    changed.set()
    thread.join()
    written = torch.load(path, weights_only=True)
    assert written.keys() == before.keys()
    assert all(torch.equal(written[name], before[name]) for name in before)
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


class Counts(nn.Linear):
    """A layer with state that is no tensor."""

    def get_extra_state(self) -> Any:
        return [1, 2]

    def set_extra_state(self, state: Any) -> None:
        assert state == [1, 2]


def test_state_that_is_no_tensor_is_written(tmp_path: Path) -> None:
    async_checkpoint(Counts(2, 2), tmp_path / "model.pt").join()
    assert torch.load(tmp_path / "model.pt", weights_only=True)["_extra_state"] == [1, 2]


def test_join_raises_the_error_of_the_write(tmp_path: Path) -> None:
    (tmp_path / "model.pt").mkdir()  # which no file can replace
    thread = async_checkpoint(nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(IsADirectoryError):
        thread.join()
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"path: the folder does not exist\. Got '.*/none'"):
        async_checkpoint(nn.Linear(2, 2), tmp_path / "none" / "model.pt")


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    async_checkpoint(nn.Linear(2, 2), tmp_path / "model.pt").join()
    assert list(tmp_path.iterdir()) == []


def test_a_sharded_model_is_refused(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    setup_distributed(0, 1, backend="gloo")
    try:
        model = nn.Linear(2, 2)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh))
        with pytest.raises(UserError, match=r"model: 'weight' is sharded.*Got '1 sharded tensors'"):
            async_checkpoint(model, tmp_path / "model.pt")
    finally:
        cleanup_distributed()
    assert list(tmp_path.iterdir()) == []
