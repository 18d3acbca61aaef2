"""The task file: one graph, mapped tensors, private, whole or absent."""

from __future__ import annotations

import os
import pickle
import threading
import warnings
from pathlib import Path
from stat import S_IMODE
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from distributed.communication.task_file import load_task, save_task
from distributed.system.private_files import write_private


def there_and_back(task: Any, path: Path) -> Any:
    save_task(task, path)
    return load_task(path)


def test_model_optimizer_and_scheduler_stay_one_graph(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = there_and_back((model, optimizer, scheduler), tmp_path / "task")
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert scheduler.optimizer is optimizer


def test_hooks_of_parameters_and_optimizers_travel(tmp_path: Path) -> None:
    """Also those that refer to the model which holds them."""
    model = nn.Linear(2, 2)
    vars(model.bias)["factor"] = 3.0
    model.weight.register_hook(lambda gradient: gradient * model.bias.factor)
    model.bias.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(2.0), None)[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: (model.weight.data.fill_(1.0), None)[1])
    optimizer.register_step_post_hook(lambda *_: (model.bias.data.fill_(2.0), None)[1])
    moved, stepper = there_and_back((model, optimizer), tmp_path / "task")
    moved(torch.ones(1, 2)).sum().backward()
    assert moved.weight.grad.tolist() == [[3.0, 3.0]] * 2
    assert moved.bias.grad.tolist() == [2.0, 2.0]
    stepper.step()
    assert moved.weight.tolist() == [[1.0, 1.0]] * 2
    assert moved.bias.tolist() == [2.0, 2.0]
    assert model.bias.tolist() != [2.0, 2.0]


def test_the_default_dtype_travels(tmp_path: Path) -> None:
    """A function that builds a model then builds the same one in the ranks."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        save_task(lambda: nn.Linear(2, 2), tmp_path / "task")
        torch.set_default_dtype(torch.float32)
        build = load_task(tmp_path / "task")
        assert build().weight.dtype == torch.float64
    finally:
        torch.set_default_dtype(before)


def test_lambdas_closures_and_local_classes_travel(tmp_path: Path) -> None:
    factor = 3

    class Local:
        def __init__(self) -> None:
            self.shift = 1

    call, local = there_and_back((lambda x: x * factor, Local()), tmp_path / "task")
    assert call(2) == 6
    assert local.shift == 1


def test_tensors_are_mapped_and_writing_stays_private(tmp_path: Path) -> None:
    large = torch.arange(300_000, dtype=torch.float64)
    save_task({"tensor": large, "array": large.numpy(), "view": large[5:10]}, tmp_path / "task")
    first, second = load_task(tmp_path / "task"), load_task(tmp_path / "task")
    assert _mapped(first["tensor"].data_ptr(), tmp_path / "task")
    assert _mapped(first["array"].ctypes.data, tmp_path / "task")
    first["tensor"][7] = -1.0
    assert second["tensor"][7] == 7.0
    assert first["view"][2] == -1.0  # still a view of the same storage
    assert torch.equal(second["tensor"], large)


def _mapped(address: int, path: Path) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= address < high:
            return line.endswith(str(path))
    return False


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a" * 40] * 3000),
        np.zeros((0, 4)),
        np.arange(40_000, dtype=np.uint16),
        np.arange(90_000).reshape(300, 300).T,
        np.array([{"k": 1}] * 20_000, dtype=object),
        np.full(70_000, 1j),
    ],
)
def test_every_kind_of_array_arrives(array: np.ndarray[Any, Any], tmp_path: Path) -> None:
    found = there_and_back(array, tmp_path / "task")
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


def test_an_array_made_read_only_arrives(tmp_path: Path) -> None:
    array = np.arange(90_000)
    array.setflags(write=False)
    with warnings.catch_warnings(action="error"):
        assert np.array_equal(there_and_back(array, tmp_path / "task"), array)


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        save_task({"secret": 1}, tmp_path / "task")
        write_private(tmp_path / "plain", b"1")
    finally:
        os.umask(before)
    assert {S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "task"]


def test_a_task_file_is_never_overwritten(tmp_path: Path) -> None:
    save_task(1, tmp_path / "task")
    with pytest.raises(FileExistsError):
        save_task(2, tmp_path / "task")


def test_what_cannot_travel_says_so(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="lock"):
        save_task({"lock": threading.Lock()}, tmp_path / "a")
    with open(tmp_path / "file", "w") as file, pytest.raises(pickle.PicklingError, match="not opened"):
        save_task(file, tmp_path / "b")
