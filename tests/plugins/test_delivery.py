"""A tracker never delays or loses a training, and gets each of its steps once, whatever ends when."""

from __future__ import annotations

import logging
import random
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import mlflow
import pytest
import torch
from distributed_plugins.mlflow import MLflowTracker, register_trackers
from distributed_plugins.tensorboard import TensorBoardTracker
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from distributed import UserError, WorkerError
from distributed.cli import main
from distributed.config import DistributedConfig
from distributed.interfaces.callback import Context
from distributed.interfaces.tracker import Tracker
from distributed.tracking.delivery import Delivery, Outbox
from tests.support.tracking_servers import mlflow_server, proxied
from tests.support.training import Die, OnStep, make_trainer

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
DATA = (X, X[:, :2].argmax(dim=1))
STEPS = list(range(1, 13))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("TRACKING_URI", "EXPERIMENT_ID", "EXPERIMENT_NAME", "RUN_ID"):
        monkeypatch.delenv(f"MLFLOW_{name}", raising=False)
    yield
    mlflow.set_tracking_uri(None)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An empty store: creating its tables takes MLflow a second."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_runs(["0"])
    return path.read_bytes()


@pytest.fixture
def store(tmp_path: Path, template: bytes) -> str:
    (tmp_path / "mlflow.db").write_bytes(template)
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def trainer(model: nn.Module, folder: Path, uri: str, ranks: int = 1, **given: Any) -> Any:
    fields = {
        "folder": folder,
        "global_batch_size": 4,
        "mlflow_tracking": True,
        "tracking": {"progress": "off", "mlflow_tracking_uri": uri},
        "checkpoint": {"every_n_steps": 4, "asynchronous": False},
        "backend": "serial" if ranks == 1 else "pytorch-ddp",
    }
    return make_trainer(model, ranks, **{**fields, **given})


def runs(uri: str) -> list[Any]:
    return list(MlflowClient(uri).search_runs(["0"], order_by=["attributes.start_time"]))


def steps(uri: str, run: Any, name: str = "loss") -> list[int]:
    return sorted(m.step for m in MlflowClient(uri).get_metric_history(run.info.run_id, name))


def check_one_run(uri: str, expected: list[int], status: str = "FINISHED") -> Any:
    """The store holds one run, with each of the steps once."""
    (run,) = runs(uri)
    assert steps(uri, run) == expected
    assert run.info.status == status
    return run


def sync(folder: Path, *more: str) -> int:
    return main(["track", "sync", str(folder), *more])


def weights_without(ranks: int = 1, **given: Any) -> list[torch.Tensor]:
    model = new_model()
    make_trainer(model, ranks, global_batch_size=4, **given).fit(DATA)
    return list(model.parameters())


def wait_for(path: Path, context: Context) -> None:
    while not path.exists():
        time.sleep(0.01)


# -- servers that do not answer ----------------------------------------------------------


def accept_only() -> socket.socket:
    """A server whose connections are accepted, by the kernel, and never answered."""
    return socket.create_server(("127.0.0.1", 0), backlog=64)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """File of the warnings of this process and of ranks."""
    path, logger = tmp_path / "log.txt", logging.getLogger("distributed")
    handler = logging.FileHandler(path)
    logger.addHandler(handler)
    yield path
    logger.removeHandler(handler)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.starts_processes)])
def test_a_server_that_never_answers(
    tmp_path: Path, store: str, ranks: int, monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    if ranks == 1:
        monkeypatch.setattr(Tracker, "limit", 0.2)
    model, folder = new_model(), tmp_path / "run"
    with closing(accept_only()) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        history = trainer(model, folder, uri, ranks).fit(DATA)
    assert all(map(torch.equal, model.parameters(), weights_without(ranks)))
    assert [record["step"] for record in history.logs] == STEPS
    lines = log.read_text().splitlines()
    (said,) = [line for line in lines if line.startswith("tracker ")] or lines
    assert said.startswith(f"tracker 'mlflow' ({uri}) has not answered in start"), lines
    (command,) = re.findall(r"`python -m distributed\.cli (track sync .*?)`", said)
    # The remedy, to another store; repeated, it delivers nothing more.
    for _ in range(2):
        assert main([*command.split(), "--set", f"tracking.mlflow_tracking_uri={store}"]) == 0
        check_one_run(store, STEPS)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.starts_processes)])
def test_a_server_that_falls_silent(
    tmp_path: Path, store: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ranks == 1:
        monkeypatch.setattr(Tracker, "limit", 0.2)
    model, folder = new_model(), tmp_path / "run"

    def until(request: bytes) -> bool:
        for step in (1, 4):
            if b'"step": %d' % step in request:
                (tmp_path / f"seen{step}").touch()
        return b'"step": 4' in request

    with mlflow_server(store) as port, proxied(port, until) as proxy:
        # Records are delivered by time, while a step takes as long as it likes.
        waits = [OnStep(partial(wait_for, tmp_path / f"seen{step}"), step + 1, rank=0) for step in (1, 4)]
        trainer(model, folder, proxy.uri, ranks, callbacks=waits).fit(DATA)
        assert proxy.silent.is_set()
        assert all(map(torch.equal, model.parameters(), weights_without(ranks)))
        check_one_run(store, STEPS[:4], "RUNNING")
        proxy.silent.clear()
        assert sync(folder) == 0
    check_one_run(store, STEPS)


def test_a_silent_server_is_said_while_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Tracker, "limit", 0.2)
    monkeypatch.setattr("distributed.tracking.delivery._SILENCE", 0.0)
    found = []
    look = OnStep(lambda context: found.append("has not answered in start" in caplog.text), step=5)
    with closing(accept_only()) as server, caplog.at_level(logging.WARNING, logger="distributed"):
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        trainer(new_model(), tmp_path, uri, callbacks=[look]).fit(DATA)
    assert found == [True]
    assert caplog.text.count("tracker 'mlflow'") == 1


def test_an_event_file_that_starts_late_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer starts only while the run waits for its end, as on a busy machine after a short run."""
    ends, (start, end) = Event(), (TensorBoardTracker.start, Delivery.end)

    def start_late(self: TensorBoardTracker, params: Any) -> None:
        assert ends.wait(60)
        start(self, params)

    def end_noted(self: Delivery) -> None:
        ends.set()
        end(self)

    monkeypatch.setattr(Tracker, "limit", 0.0)
    monkeypatch.setattr(TensorBoardTracker, "start", start_late)
    monkeypatch.setattr(Delivery, "end", end_noted)
    board = {"tensorboard_dir": tmp_path / "board", "tensorboard": True, "mlflow_tracking": False}
    trainer(new_model(), tmp_path / "run", "", **board).fit(DATA)
    (folder,) = (tmp_path / "board").iterdir()
    assert board_steps(folder) == STEPS


# -- ranks that are killed ---------------------------------------------------------------


@pytest.mark.starts_processes
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_rank_loses_no_step(tmp_path: Path, store: str, ranks: int) -> None:
    fields = {"backend": "pytorch-ddp", "launch": "spawn"}
    killed = trainer(new_model(), tmp_path / "run", store, ranks, callbacks=[Die(8, 0)], **fields)
    with pytest.raises(WorkerError):
        killed.fit(DATA)
    assert sync(tmp_path / "run") == 0
    check_one_run(store, STEPS[:7], "FAILED")
    # Step 8 is trained again, and those of the checkpoint's age are not.
    model = new_model()
    trainer(model, tmp_path / "run", store, ranks, resume_from_checkpoint=True, **fields).fit(DATA)
    check_one_run(store, STEPS)
    assert all(map(torch.equal, model.parameters(), weights_without(ranks, **fields)))


class DieOnce(Die):
    """Kill the rank in its first attempt."""

    def on_step_end(self, context: Context) -> None:
        mark = Path(context.config.checkpoint_dir or "", "died")
        if context.progress.step == self.step and not mark.exists():
            mark.touch()
            super().on_step_end(context)


@pytest.mark.starts_processes
def test_a_restart_inside_fit_continues_the_run(tmp_path: Path, store: str) -> None:
    for step in (2, 7):  # before and after the first checkpoint
        folder = tmp_path / f"run{step}"
        elastic = {"max_restarts": 1}
        trainer(new_model(), folder, store, 2, callbacks=[DieOnce(step, 0)], elastic=elastic).fit(DATA)
        assert len(list(folder.glob("tracking-*.jsonl"))) == 1
    assert [steps(store, run) for run in runs(store)] == [STEPS, STEPS]


def test_an_interrupted_sync_is_repeated(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends between the delivery and its note."""
    monkeypatch.setattr(Delivery, "begin", lambda self: None)
    monkeypatch.setattr(Delivery, "end", lambda self: None)
    given = {"tensorboard_dir": tmp_path / "board", "tensorboard": True}
    trainer(new_model(), tmp_path / "run", store, **given).fit(DATA)
    assert runs(store) == []

    class Interrupt(BaseException):
        pass

    save = Delivery._save

    def interrupted(self: Delivery, **values: Any) -> None:
        if "offset" in values:
            raise Interrupt
        save(self, **values)

    for name in ("mlflow", "tensorboard"):
        with monkeypatch.context() as patch:
            patch.setattr(Delivery, "_save", interrupted)
            patch.setattr(Delivery, "run", only(name, Delivery.run))
            with pytest.raises(Interrupt):
                sync(tmp_path / "run")
    for _ in range(2):
        assert sync(tmp_path / "run") == 0
    check_one_run(store, STEPS)
    (folder,) = (tmp_path / "board").iterdir()
    assert board_steps(folder) == STEPS


def only(name: str, run: Any) -> Any:
    """`Delivery.run` of one tracker, and nothing for the others."""
    return lambda self: run(self) if self.spec.name == name else None


def board_steps(folder: Path) -> list[int]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [event.step for event in events.Scalars("train/loss")]


def test_a_file_that_is_being_delivered_is_refused(
    tmp_path: Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def while_training(context: Context) -> None:
        while not any(path.stat().st_size for path in tmp_path.glob("run/tracking-*.mlflow")):
            time.sleep(0.01)  # until it has begun
        assert sync(tmp_path / "run") == 2
        assert "another process delivers the records of this run" in capsys.readouterr().err

    trainer(new_model(), tmp_path / "run", store, callbacks=[OnStep(while_training, step=5)]).fit(DATA)
    check_one_run(store, STEPS)


# -- one training is one run -------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.starts_processes)])
@pytest.mark.parametrize("has_folder", [True, False])
def test_a_second_fit_continues_the_run(
    tmp_path: Path, store: str, ranks: int, has_folder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    board = {"tensorboard_dir": tmp_path / "board", "tensorboard": True}
    made = trainer(new_model(), tmp_path / "run" if has_folder else None, store, ranks, **board)
    made.fit(DATA, max_steps=5)
    made.fit(DATA, max_steps=7)
    check_one_run(store, STEPS)
    (folder,) = (tmp_path / "board").iterdir()
    assert board_steps(folder) == STEPS


def test_a_resume_into_another_folder_continues_the_run(tmp_path: Path, store: str) -> None:
    trainer(new_model(), tmp_path / "one", store).fit(DATA, max_steps=6)
    first = str(tmp_path / "one" / "step_00000004")
    trainer(new_model(), tmp_path / "two", store, resume_from_checkpoint=first).fit(DATA)
    check_one_run(store, STEPS)


def test_two_trainings_in_one_folder_and_of_one_name_are_two_runs(tmp_path: Path, store: str) -> None:
    for length in (4, 8):
        tracking = {"progress": "off", "mlflow_tracking_uri": store, "run_name": "same"}
        board = {"tensorboard_dir": tmp_path / "board", "tracking": tracking}
        trainer(new_model(), tmp_path / "run", store, **board).fit(DATA, max_steps=length)
    assert [steps(store, run) for run in runs(store)] == [STEPS[:4], STEPS[:8]]
    for folder, length in (("same", 4), ("same_2", 8)):
        assert board_steps(tmp_path / "board" / folder) == STEPS[:length]


@pytest.mark.parametrize("by_variable", [False, True])
def test_two_trainings_in_one_active_run(
    tmp_path: Path, store: str, by_variable: bool, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    mlflow.set_tracking_uri(store)
    with mlflow.start_run() as active:
        if by_variable:
            monkeypatch.setenv("MLFLOW_RUN_ID", active.info.run_id)
            monkeypatch.setattr(MLflowTracker, "capture", dict)
        for name in ("one", "two"):
            made = trainer(new_model(), tmp_path / name, store)
            for _ in range(2):
                made.fit(DATA, max_steps=2)
    found = {run.info.run_id: run for run in runs(store)}
    first = found.pop(active.info.run_id)
    ((_, second),) = found.items()
    assert steps(store, first) == steps(store, second) == STEPS[:4]
    assert second.data.tags["mlflow.parentRunId"] == first.info.run_id
    assert f"the MLflow run {first.info.run_id} holds another training" in caplog.text


def test_a_resume_in_another_active_run_has_the_whole_training_there(tmp_path: Path, store: str) -> None:
    mlflow.set_tracking_uri(store)
    for length in (4, 12):
        with mlflow.start_run():
            trainer(new_model(), tmp_path / "run", store, resume_from_checkpoint=True).fit(
                DATA, max_steps=length
            )
    assert [steps(store, run) for run in runs(store)] == [STEPS[:4], STEPS]


def test_a_deleted_experiment_is_said(tmp_path: Path, store: str, caplog: pytest.LogCaptureFixture) -> None:
    client = MlflowClient(store)
    number = client.create_experiment("gone")
    client.delete_experiment(number)
    tracking = {"progress": "off", "mlflow_tracking_uri": store, "mlflow_experiment": "gone"}
    trainer(new_model(), tmp_path / "run", store, tracking=tracking).fit(DATA)
    assert "the MLflow experiment is deleted" in caplog.text
    assert f"`mlflow experiments restore -x {number}`" in caplog.text
    client.restore_experiment(number)  # the remedy
    assert sync(tmp_path / "run") == 0
    (run,) = client.search_runs([number])
    assert steps(store, run) == STEPS


def test_names_that_mlflow_does_not_take(
    tmp_path: Path, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["a//b", "a/b", "/a", "a", "", "acc@5", "acc_5", "../up", "x" * 300, "x" * 301, "."]

    def log(context: Context) -> None:
        for value, name in enumerate(names):
            context.log(name, value)

    made = trainer(new_model(), tmp_path / "run", store, callbacks=[OnStep(log, rank=0)])
    for _ in range(2):  # another process has the same names
        made.fit(DATA, max_steps=1)
    run = check_one_run(store, STEPS[:2])
    found = {name: value for name, value in run.data.metrics.items() if steps(store, run, name) == [1, 2]}
    values = Counter(found.values())
    assert all(values[float(value)] >= 1 for value in range(len(names)))
    assert {"a/b", "a", "acc_5", "up"} <= set(found)
    assert "cannot have the metric 'acc_5' beside others" in caplog.text


def test_a_run_name_outside_of_the_folder_is_refused(tmp_path: Path, store: str) -> None:
    for name in ("../up", "/up", "a/../../up"):
        tracking = {"progress": "off", "run_name": name}
        with pytest.raises(UserError, match=r"tracking\.run_name.*names a folder"):
            trainer(new_model(), tmp_path / "run", store, tracking=tracking)
    trainer(new_model(), tmp_path / "run", store, tracking={"progress": "off", "run_name": "team/up..2"})


@pytest.mark.starts_processes
@pytest.mark.slow
def test_runs_that_start_at_once_make_one_store(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'new.db'}"
    code = (
        "import sys; from distributed.config import DistributedConfig;"
        " from distributed_plugins.mlflow import MLflowTracker; import mlflow.tracking;"
        " print('up', flush=True); sys.stdin.readline();"
        " made = MLflowTracker(DistributedConfig(tracking={'mlflow_tracking_uri': sys.argv[1],"
        " 'mlflow_experiment': 'new'})); made.context = {}; made.start({}); made.finish('finished')"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, uri], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.wait() for process in started] == [0, 0, 0]
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("new")
    assert experiment is not None
    assert len(client.search_runs([experiment.experiment_id])) == 3


# -- random numbers ----------------------------------------------------------------------


def test_a_trackers_module_draws_apart(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import distributed_plugins.mlflow as module

    monkeypatch.setattr(module, "random", random, raising=False)
    flush = MLflowTracker.flush

    def drawing(self: MLflowTracker) -> None:
        module.random.random()  # type: ignore[attr-defined]
        assert module.random.Random is random.Random  # type: ignore[attr-defined]
        flush(self)

    monkeypatch.setattr(MLflowTracker, "flush", drawing)
    before = random.getstate()
    trainer(new_model(), tmp_path / "run", store).fit(DATA)
    assert random.getstate() == before
    check_one_run(store, STEPS)


@pytest.mark.parametrize("variable", [None, "sqlite:///runs.db"])
def test_the_store_is_that_of_the_beginning(
    variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread starts MLflow after a callback has changed the working folder and the variable."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    monkeypatch.chdir(folders[0])
    if variable is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", variable)
    config = DistributedConfig(mlflow_tracking=True)
    (spec,) = register_trackers()
    outbox = Outbox(str(folders[0]), "0123")
    outbox.append("start", {}, place={})
    outbox.append("log_metrics", {"loss": 1.0}, 1)
    (folders[0] / "note").touch()
    outbox.append("log_artifact", str(folders[0] / "note"))
    outbox.append("finish", "finished")
    delivery = Delivery(outbox.path, spec, partial(MLflowTracker, config), "0123", {})
    monkeypatch.chdir(folders[1])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///other.db")
    delivery.run()
    assert list(folders[1].iterdir()) == []
    name = "mlflow.db" if variable is None else "runs.db"
    check_one_run(f"sqlite:///{folders[0] / name}", [1])
    assert len(list((folders[0] / "mlruns").rglob("note"))) == 1
