"""MLflow: a real SQLite store, read back with MLflow's own client."""

from __future__ import annotations

import json
import math
import os
import random
import stat
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from textwrap import dedent
from threading import Thread
from typing import Any

import mlflow
import pytest
from distributed_plugins.mlflow import MLflowTracker
from mlflow.tracking import MlflowClient
from urllib3.util.retry import RequestHistory

from distributed import Callback
from distributed.config import DistributedConfig
from distributed.testing.conformance import problem, small_model
from tests.support.training import make_trainer


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for all tests: creating its tables takes MLflow a second."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"
    made = tracker(uri, mlflow_experiment="first")
    made.start({})
    made.finish("finished")
    return uri


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MLflow keeps the store in use in a variable of its own and in the environment."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    yield
    mlflow.set_tracking_uri(None)


def tracker(uri: str | None, **tracking: str) -> MLflowTracker:
    section = tracking | ({"mlflow_tracking_uri": uri} if uri else {})
    return MLflowTracker(DistributedConfig(mlflow_tracking=True, tracking=section))


def history(uri: str, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in MlflowClient(uri).get_metric_history(run_id, name)]


@pytest.mark.slow
def test_parameters_metrics_and_files_come_back(store, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRUNCATE_LONG_VALUES", "false")  # the tracker does it by itself
    (tmp_path / "model.txt").write_text("weights")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "part.txt").write_text("part")
    run = tracker(store, mlflow_experiment="digits", run_name="tuesday")
    run.start({"batch_size": 32, "learning_rate": 0.125, "long": "x" * 7000})
    for step in range(1, 8):  # more than one flush, the last of them at the end
        run.log_metrics({"loss": 1.0 / step, "acc@5": 0.5}, step)
    run.log_artifact(str(tmp_path / "model.txt"))
    run.log_artifact(str(tmp_path / "folder"))
    run.finish("finished")

    client = MlflowClient(store)
    saved = client.get_run(run.run_id)
    assert saved.data.params["batch_size"] == "32"
    assert saved.data.params["learning_rate"] == "0.125"
    assert saved.data.params["long"] == "x" * 6000
    assert saved.info.run_name == "tuesday"
    assert saved.info.status == "FINISHED"
    assert client.get_experiment(saved.info.experiment_id).name == "digits"
    assert sorted(history(store, run.run_id, "loss")) == [(step, 1.0 / step) for step in range(1, 8)]
    assert len(history(store, run.run_id, "acc_5")) == 7
    assert {f.path for f in client.list_artifacts(run.run_id)} == {"model.txt", "folder"}
    assert [f.path for f in client.list_artifacts(run.run_id, "folder")] == ["folder/part.txt"]


@pytest.mark.parametrize(
    ("status", "expected"), [("finished", "FINISHED"), ("stopped", "KILLED"), ("failed", "FAILED")]
)
def test_the_end_is_recorded(store, status, expected):
    run = tracker(store)
    run.start({})
    run.finish(status)
    saved = MlflowClient(store).get_run(run.run_id)
    assert saved.info.status == expected
    assert saved.info.end_time is not None
    assert saved.info.experiment_id == "0"  # Default


def test_more_than_a_batch_of_parameters_and_metrics(store):
    run = tracker(store)
    run.start({f"p{i}": i for i in range(130)})
    run.log_metrics({f"m{i}": float(i) for i in range(1100)}, 1)
    run.log_metrics({"last": 1.0}, 2)  # comes while the first batch is being written
    run.finish("finished")
    data = MlflowClient(store).get_run(run.run_id).data
    assert len(data.params) == 130
    assert len(data.metrics) == 1101


def test_a_figure_that_is_not_finite_is_recorded(store):
    run = tracker(store)
    run.start({})
    run.log_metrics({"loss": math.nan}, 1)
    run.finish("failed")
    assert math.isnan(history(store, run.run_id, "loss")[0][1])


def test_the_callers_active_run_is_joined_and_left_open(store):
    mlflow.set_tracking_uri(store)
    assert MLflowTracker.capture() == {}  # no run is active yet
    with mlflow.start_run(run_name="callers") as active:
        mlflow.log_param("batch_size", "mine")
        run = tracker(None)  # no store in the configuration: the run's own is taken
        run.context = MLflowTracker.capture()
        assert run.context == {
            "run_id": active.info.run_id,
            "tracking_uri": store,
            "experiment_id": active.info.experiment_id,
        }
        run.start({"batch_size": 32, "epochs": 2})
        run.log_metrics({"loss": 0.5}, 3)
        run.finish("finished")
        assert run.run_id == active.info.run_id
        assert MlflowClient(store).get_run(run.run_id).info.status == "RUNNING"
        again = tracker(None)  # a second fit with other values in the same run
        again.context = MLflowTracker.capture()
        again.start({"batch_size": 64, "epochs": 3, "seed": 1})
        again.finish("finished")
        mlflow.log_metric("speedup", 7.5)
    saved = MlflowClient(store).get_run(active.info.run_id)
    assert saved.info.status == "FINISHED"
    assert saved.data.params == {"batch_size": "mine", "epochs": "2", "seed": "1"}
    assert saved.data.metrics == {"loss": 0.5, "speedup": 7.5}


def test_an_explicit_other_store_is_not_left_for_the_callers_run(store):
    run = tracker(store)
    run.context = {"run_id": "0" * 32, "tracking_uri": "sqlite:///elsewhere.db", "experiment_id": "0"}
    run.start({})
    run.finish("finished")
    assert run.run_id != "0" * 32


@pytest.mark.slow
@pytest.mark.parametrize("uri", [None, "sqlite:///runs.db"])
def test_a_relative_store_is_that_of_the_directory(uri, tmp_path, monkeypatch):
    """Also the second one in a process: MLflow keeps the connections of the first under the same URI."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        run = tracker(uri)
        run.start({})
        child = run.child_context()
        run.finish("finished")
        store = tmp_path / name / (uri or "mlflow.db").removeprefix("sqlite:///")
        assert child["tracking_uri"] == f"sqlite:///{store}"
        assert MlflowClient(child["tracking_uri"]).get_run(run.run_id).info.status == "FINISHED"


def test_mlflows_own_variables_are_followed(store, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from the environment")
    run = tracker(None)
    run.start({})
    run.finish("finished")
    client = MlflowClient(store)
    experiment = client.get_experiment(client.get_run(run.run_id).info.experiment_id)
    assert experiment.name == "from the environment"
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", experiment.experiment_id)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    run = tracker(None)
    run.start({})
    run.finish("finished")
    assert client.get_run(run.run_id).info.experiment_id == experiment.experiment_id


def test_a_write_that_failed_is_told_at_a_later_record(store):
    run = tracker(store)
    run.start({})
    MlflowClient(store).delete_run(run.run_id)  # MLflow refuses to write to a deleted run
    run.log_metrics({"loss": 1.0}, 1)
    with pytest.raises(Exception, match="must be in the 'active' state"):
        run.finish("finished")


@pytest.mark.starts_processes
def test_a_local_store_is_private_and_nothing_reaches_the_network(tmp_path):
    script = """
        import socket, sys
        reached = []
        def watch(event, args):
            if event == "socket.getaddrinfo":
                reached.append(str(args[0]))
            elif event == "socket.connect" and args[0].family != socket.AF_UNIX:
                reached.append(str(args[1]))
        sys.addaudithook(watch)
        from distributed.config import DistributedConfig
        from distributed_plugins.mlflow import MLflowTracker
        tracker = MLflowTracker(DistributedConfig(mlflow_tracking=True))
        tracker.start({"a": 1}); tracker.log_metrics({"loss": 1.0}, 1)
        open("note.txt", "w").close(); tracker.log_artifact("note.txt"); tracker.finish("finished")
        import threading
        for thread in threading.enumerate():  # whatever MLflow still had in mind
            if thread is not threading.current_thread():
                thread.join(10)
        print("reached", reached)
    """
    # Under test runners and CI MLflow keeps quiet by itself; a user's terminal is what counts.
    quiet = ("PYTEST", "CI", "GITHUB", "GITLAB", "BUILD", "TF_BUILD", "MLFLOW", "DO_NOT_TRACK")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(quiet)}
    done = subprocess.run(
        [sys.executable, "-c", dedent(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "reached []"
    assert stat.S_IMODE((tmp_path / "mlflow.db").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "mlruns").stat().st_mode) == 0o700
    assert [path.name for path in Path(tmp_path, "mlruns").rglob("note.txt")] == ["note.txt"]


# -- random numbers ----------------------------------------------------------------------


class Draws(Callback):
    """Records a random number of each step."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def on_step_end(self, context: Any) -> None:
        self.drawn.append(random.random())


def test_a_tracked_run_draws_the_same_random_numbers(store: str) -> None:
    """MLflow draws the name of a run, and would give runs of one seed the same name."""
    drawn = []
    tracked = {"mlflow_tracking": True, "tracking": {"mlflow_tracking_uri": store, "progress": "off"}}
    for fields in ({}, tracked, tracked):
        draws = Draws()
        make_trainer(small_model(), backend="serial", batch_size=4, callbacks=[draws], **fields).fit(
            problem(12)
        )
        drawn.append(draws.drawn)
    assert len(drawn[0]) == 3
    assert drawn[0] == drawn[1] == drawn[2]
    first, second = MlflowClient(store).search_runs(["0"], max_results=2)
    assert first.info.run_name != second.info.run_name


def test_telemetry_leaves_the_random_numbers_of_training_alone(
    monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    """Where a user wants it: MLflow's thread draws when it has fetched its configuration."""
    from mlflow.telemetry import client

    class Configuration(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = {"mlflow_version": mlflow.__version__, "ingestion_url": "http://127.0.0.1:9"}
            body = json.dumps({**found, "rollout_percentage": 100}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            return None

    with ThreadingHTTPServer(("127.0.0.1", 0), Configuration) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        monkeypatch.setattr(client, "_get_config_url", lambda version: url)
        monkeypatch.setattr(client, "get_or_create_installation_id", lambda: None)
        made = client.TelemetryClient()
        before = random.getstate()
        made._fetch_config()
        made._config_thread.join(30)
        server.shutdown()
    assert made.config is not None
    assert random.getstate() == before


def test_a_retry_leaves_the_random_numbers_of_training_alone(store: str) -> None:
    """A client pauses for a random time before it retries, in the thread that writes records."""
    from urllib3.util.retry import Retry

    before = random.getstate()
    failed = (RequestHistory("GET", "/", None, 503, None),) * 3
    retry = Retry(backoff_factor=0.1, backoff_jitter=1.0, history=failed)
    assert retry.get_backoff_time() != retry.get_backoff_time()
    assert random.getstate() == before
