"""A `UserError` that leaves the library shows the user's lines, and none of ours above its paragraph."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distributed import (
    Callback,
    DistributedConfig,
    HorovodTrainer,
    RayTrainer,
    Trainer,
    UserError,
    WorkerError,
)
from distributed.config import load
from distributed.errors import hide_own_frames
from distributed.interfaces.plan import RunPlan
from distributed.registry.catalog import get_catalog
from distributed.registry.hookspecs import hookimpl

POINTS = (torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))
HERE = Path(__file__)


def trainer(**fields: Any) -> Trainer:
    return Trainer(torch.nn.Linear(4, 2), device="cpu", num_processes=1, batch_size=4, **fields)


def frames(error: BaseException) -> list[tuple[str, str]]:
    """(file, function) of each entry of the traceback."""
    return [(Path(entry.filename).name, entry.name) for entry in traceback.extract_tb(error.__traceback__)]


MISTAKES: dict[str, Callable[[], Any]] = {
    "Trainer": lambda: Trainer(torch.nn.Linear(4, 2), epochs=-1),
    "HorovodTrainer": lambda: HorovodTrainer(torch.nn.Linear(4, 2), lr=1),
    "RayTrainer": lambda: RayTrainer(torch.nn.Linear(4, 2), {"lr": 1, "learning_rate": 1}),
    "DistributedConfig": lambda: DistributedConfig(lr=1),
    "load": lambda: load("/nowhere/run.yaml"),
    "fit, of its data": lambda: trainer().fit(object()),
    "fit, of its plan": lambda: trainer(gradient_accumulation_steps=3, global_batch_size=4).fit(POINTS),
    "fit, of its argument": lambda: trainer().fit(POINTS, epochs=-1),
    "train_step": lambda: Trainer(torch.nn.Linear(4, 2), device="cpu", num_processes=3).train_step(*POINTS),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_traceback_is_the_users(name: str) -> None:
    with pytest.raises(UserError) as caught:
        MISTAKES[name]()
    assert frames(caught.value) == [
        (HERE.name, "test_the_traceback_is_the_users"),
        (HERE.name, "<lambda>"),
    ]


def test_an_error_of_a_hook_is_without_the_frames_of_pluggy() -> None:
    class Refusal:
        @hookimpl
        def check_plan(self, plan: RunPlan) -> None:
            raise UserError("no", field="x")

    catalog, plugin = get_catalog(), Refusal()
    catalog.manager.register(plugin)
    try:
        with pytest.raises(UserError) as caught:
            trainer().fit(POINTS)
    finally:
        catalog.manager.unregister(plugin)
    files = [file for file, _ in frames(caught.value)]
    assert set(files) == {HERE.name}


class Raises(Callback):
    """A user's code that runs inside of `fit`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def on_run_start(self, context: Any) -> None:
        if self.error is not None:
            raise self.error
        trainer(epochs=-1)


@pytest.mark.parametrize("error", [None, UserError("mine", field="x")])
def test_the_users_lines_inside_of_fit_stay(error: UserError | None) -> None:
    with pytest.raises(UserError) as caught:
        trainer(callbacks=[Raises(error)]).fit(POINTS)
    found = [entry for entry in frames(caught.value) if entry[0] != HERE.name]
    assert found == []
    assert (HERE.name, "on_run_start") in frames(caught.value)


def test_a_cause_keeps_its_own_traceback() -> None:
    @hide_own_frames
    def read() -> None:
        try:
            int("x")
        except ValueError as error:
            raise UserError("not a number", field="x") from error

    with pytest.raises(UserError) as caught:
        read()
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError)
    assert frames(cause)[-1] == (HERE.name, "read")
    text = "".join(traceback.format_exception(caught.value))
    assert "direct cause" in text
    assert "errors.py" not in text


@pytest.mark.parametrize(
    "error", [WorkerError("rank 1 failed", rank=1, host="h", exc_type="E"), ZeroDivisionError("x")]
)
def test_other_exceptions_keep_their_frames(error: Exception) -> None:
    @hide_own_frames
    def inner() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        inner()
    assert caught.value is error
    assert [name for _, name in frames(error)] == ["test_other_exceptions_keep_their_frames", "inner"]


def test_the_development_mode_of_python_shows_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed.errors.sys", SimpleNamespace(flags=SimpleNamespace(dev_mode=True)))
    with pytest.raises(UserError) as caught:
        DistributedConfig(lr=1)
    assert ("schema.py", "__init__") in frames(caught.value)


def test_the_signature_is_the_functions_own() -> None:
    import inspect

    assert "train_loader" in inspect.signature(Trainer.fit).parameters
    assert (Trainer.fit.__doc__ or "").startswith("Train")


@pytest.mark.starts_processes
def test_an_uncaught_mistake_prints_two_lines_of_the_script(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\nfrom distributed import Trainer\n\nTrainer(torch.nn.Linear(4, 2), lr=0.1)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 1
    assert done.stderr == (
        "Traceback (most recent call last):\n"
        f'  File "{path}", line 4, in <module>\n'
        "    Trainer(torch.nn.Linear(4, 2), lr=0.1)\n"
        "distributed.errors.UserError: unknown configuration field 'lr'. Did you mean 'learning_rate'?"
        " `python -m distributed.cli config fields` lists every field.\n"
    )
