"""Real searches on one small Ray cluster: what they find, stop, hand over, record and survive."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from distributed_backends.ray.tune import engine
from torch import nn

from distributed import DistributedTuner, PyTorchDDPTrainer, Trainer, UserError, WorkerError
from distributed.cli import main
from distributed.commands.bundled.digits import build_model, load_digits
from distributed.operations.tuning.trial_record import load_trial
from distributed.testing.conformance import problem, small_model

X, Y = problem(26)
Fn = Callable[[dict[str, Any]], Any]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


def tuner(fn: Fn, space: dict[str, Any], tmp_path: Path, **given: Any) -> DistributedTuner:
    return DistributedTuner(fn, space, **{"num_cpus": 2, "output_dir": tmp_path / "search", **given})


def epochs_of(search: DistributedTuner) -> dict[str, list[int]]:
    found = {trial.name: [r["epoch"] for r in trial.reports if "epoch" in r] for trial in search.results}
    return dict(sorted(found.items()))


# -- the interface, and the trackers ---------------------------------------------------


def as_the_user_writes_it(config: dict[str, Any]) -> dict[str, Any]:
    hidden = config["hidden_size"]
    model = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3)).double()
    trainer = PyTorchDDPTrainer(model, learning_rate=config["lr"], batch_size=8, epochs=2, optimizer="sgd")
    trainer.fit((X, Y), (X, Y))
    return {"accuracy": trainer.best_accuracy}


def test_a_search_as_its_users_write_it_with_both_trackers(
    ray_cluster: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from ray import tune

    search_space = {"hidden_size": tune.choice([8, 16]), "lr": tune.grid_search([0.3, 1e-6])}
    search = DistributedTuner(
        train_fn=as_the_user_writes_it,
        search_space=search_space,
        num_gpus=2,  # Run 2 trials in parallel
        trials_per_gpu=1,
        mlflow="digits",
        tensorboard=True,
        name="my search",
    )
    best_params = search.tune(num_samples=2)
    said = capfd.readouterr().out
    assert "random search: 4 trials of 1 rank on CPU, 2 at a time; in " in said
    assert "no GPU found: num_gpus counts CPU slots" in said
    assert best_params["lr"] == 0.3
    assert best_params["hidden_size"] in (8, 16)
    assert epochs_of(search) == {f"{n:05d}": [0, 1] for n in range(4)}
    assert {trial.status for trial in search.results} == {"finished"}
    # What train_fn returns is the last report; val_accuracy decides as under checkpoint.metric.
    assert all(trial.reports[-1].keys() == {"accuracy"} for trial in search.results)
    assert search.best.metric == "val_accuracy"
    assert search.best.value == max(trial.value or 0.0 for trial in search.results)
    _check_mlflow(search)
    events = {path.parent.name for path in (search.output_dir / "tensorboard").glob("*/events.*")}
    assert events == {f"{n:05d}" for n in range(4)}


def _check_mlflow(search: DistributedTuner) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{Path('mlflow.db').absolute()}")
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    parent = runs.pop("my search")
    assert runs, _output_of_trials()
    assert parent.data.metrics["best_val_accuracy"] == search.best.value
    assert {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {parent.info.run_id}
    assert {run.info.status for run in [parent, *runs.values()]} == {"FINISHED"}
    for trial in search.results:
        run = runs.pop(trial.name)
        assert float(run.data.params["lr"]) == trial.parameters["lr"]
        assert run.data.params["hidden_size"] == str(trial.parameters["hidden_size"])
        assert len(client.get_metric_history(run.info.run_id, "val_accuracy")) == 2
    assert runs == {}


def _output_of_trials() -> str:
    from ray._private.worker import _global_node

    logs = sorted(Path(_global_node.get_logs_dir_path()).glob("worker-*.err"))
    return "\n".join(path.read_text(errors="replace")[-2000:] for path in logs)


# -- stopping early, several ranks -----------------------------------------------------


def two_ranks(config: dict[str, Any]) -> None:
    trainer = Trainer(small_model(), learning_rate=config["lr"], batch_size=4, epochs=6, optimizer="sgd")
    history = trainer.fit((X, Y), (X, Y))
    assert history.world_size == 2


def test_asha_stops_a_poor_trial_and_its_ranks(ray_cluster: None, tmp_path: Path) -> None:
    """The ranks are processes of their own, and their figures decide while they run."""
    space = {"lr": {"grid": [0.3, 1e-8]}}
    stops: dict[str, Any] = {"scheduler": "asha", "grace_period": 2, "metric": "val_loss"}
    search = tuner(two_ranks, space, tmp_path, ranks_per_trial=2, **stops)
    assert search.tune(num_samples=1)["lr"] == 0.3
    states = {trial.parameters["lr"]: trial for trial in search.results}
    assert (states[0.3].status, states[1e-8].status) == ("finished", "stopped")
    assert len(epochs_of(search)[states[0.3].name]) == 6
    assert len(epochs_of(search)[states[1e-8].name]) == 2
    assert search.best.checkpoint is not None
    assert Path(search.best.checkpoint, "manifest.json").exists()
    assert ranks_at_work() == []


def ends_slowly(config: dict[str, Any]) -> None:
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = "0"  # what Ray gives a stopped trial to end
    goes_on(config)


def test_a_trial_waits_for_the_stopped_one_before_it(ray_cluster: None, tmp_path: Path) -> None:
    space = {"lr": {"grid": [0.3, 1e-8, 1e-9, 1e-10]}}
    search = tuner(
        ends_slowly, space, tmp_path, num_cpus=1, scheduler="asha", grace_period=1, metric="val_loss"
    )
    assert search.tune(num_samples=1)["lr"] == 0.3
    assert [trial.status for trial in search.results] == ["finished", "stopped", "stopped", "stopped"]


def ranks_at_work() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "from distributed.launch import rank_process" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    _, alive = psutil.wait_procs(found, timeout=15)
    return list(alive)


# -- population based training ---------------------------------------------------------


def goes_on(config: dict[str, Any]) -> None:
    trainer = Trainer(
        small_model(), backend="serial", learning_rate=config["lr"], batch_size=8, optimizer="sgd"
    )
    trainer.fit((X, Y), (X, Y), epochs=4)


def test_pbt_goes_on_from_the_better_trials_weights(ray_cluster: None, tmp_path: Path) -> None:
    search = tuner(
        goes_on,
        {"lr": {"grid": [1e-8, 0.5]}},
        tmp_path,
        metric="val_loss",
        scheduler="pbt",
        grace_period=2,
        scheduler_options={
            "synch": True,
            "quantile_fraction": 0.5,
            "resample_probability": 1.0,
            "hyperparam_mutations": {"lr": {"uniform": [0.2, 0.3]}},
        },
    )
    search.tune(num_samples=1)
    poor, good = sorted(search.results, key=lambda trial: trial.name)
    losses = {trial.name: [r["val_loss"] for r in trial.reports] for trial in search.results}
    assert epochs_of(search) == {poor.name: [*range(4)], good.name: [*range(4)]}
    # Alone it stands still; with the donor's weights after two epochs it is where the donor was, and learns.
    assert losses[poor.name][1] == pytest.approx(losses[poor.name][0], rel=1e-5)
    assert losses[poor.name][2] < losses[good.name][1] < losses[poor.name][1]
    # It is the new rate that it learns with: the same steps, taken here.
    rate = poor.parameters["lr"]
    assert 0.2 <= rate <= 0.3
    plain: dict[str, Any] = {"backend": "serial", "batch_size": 8, "optimizer": "sgd"}
    Trainer(small_model(), **plain, learning_rate=0.5, checkpoint_dir="donor").fit((X, Y), (X, Y), epochs=2)
    same = {"resume_from_checkpoint": "donor", "checkpoint": {"hyperparameters": "given"}}
    alone = Trainer(small_model(), **plain, **same, learning_rate=rate).fit((X, Y), (X, Y), epochs=4)
    assert [epoch["val_loss"] for epoch in alone.epochs] == pytest.approx(losses[poor.name][2:], rel=1e-9)


# -- a time limit ----------------------------------------------------------------------


def endless(config: dict[str, Any]) -> None:
    epochs = 1 if Path(config["go"]).exists() else 10**6
    trainer = Trainer(small_model(), backend="serial", batch_size=8, optimizer="sgd")
    trainer.fit((X, Y), (X, Y), epochs=epochs)


def test_a_search_that_ran_out_of_time_goes_on_with_more(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trials that were cut off, and those that had not been made."""
    space = {"go": str(tmp_path / "go"), "n": {"grid": [*range(4)]}}
    trials = tmp_path / "search" / "trials"

    def is_over() -> float:
        """The time when two trials have reported, and only then."""
        found = [load_trial(tmp_path / "search", path.name) for path in trials.glob("*")]
        return 1e9 if sum(bool(trial and trial.reports) for trial in found) == 2 else 0.0

    with monkeypatch.context() as patch:
        patch.setattr(engine, "time", SimpleNamespace(monotonic=is_over))
        first = tuner(endless, space, tmp_path, time_limit=60.0, max_concurrent=2)
        first.tune(1)
    assert [trial.status for trial in first.results] == ["stopped", "stopped"]
    (tmp_path / "go").touch()
    again = tuner(endless, space, tmp_path, time_limit=600.0, resume=True, max_concurrent=1)
    again.tune(1)
    assert sorted(trial.parameters["n"] for trial in again.results) == [*range(4)]
    assert {trial.status for trial in again.results} == {"finished"}
    # They went on from their checkpoints, and have no epoch twice.
    assert all(epochs == [*range(len(epochs))] for epochs in epochs_of(again).values())


# -- what goes wrong -------------------------------------------------------------------


def misbehaves(config: dict[str, Any]) -> Any:
    if config["deed"] == "raise":
        raise ValueError("no such thing")
    return {"loss": float("nan") if config["deed"] == "nan" else torch.tensor(0.25)}


def test_a_trial_that_goes_wrong_is_recorded_and_others_go_on(ray_cluster: None, tmp_path: Path) -> None:
    deeds = ["nan", "well", "raise"]
    search = tuner(misbehaves, {"deed": {"grid": deeds}}, tmp_path)
    assert search.tune(1) == {"deed": "well"}
    found = {trial.parameters["deed"]: trial for trial in search.results}
    assert [found[deed].status for deed in deeds] == ["nan", "finished", "failed"]
    assert (search.best.value, found["nan"].value) == (0.25, None)
    assert found["raise"].error == "ValueError: no such thing"
    assert "in misbehaves" in (search.output_dir / "trials" / found["raise"].name / "error.txt").read_text()
    # The same folder takes no other search, and the same search only when it is asked to go on.
    with pytest.raises(UserError, match="this folder already holds a search"):
        tuner(misbehaves, {"deed": {"grid": deeds}}, tmp_path).tune(1)
    with pytest.raises(UserError, match=r"search_space: the search in .* was started with"):
        tuner(misbehaves, {"deed": "well"}, tmp_path, resume=True).tune(1)
    again = tuner(misbehaves, {"deed": {"grid": deeds}}, tmp_path, resume=True)
    assert again.tune(1) == {"deed": "well"}
    assert [trial.to_dict() for trial in again.results] == [trial.to_dict() for trial in search.results]


def test_searches_without_a_result_say_why(ray_cluster: None, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"all 2 trials failed; trial 00000: ValueError: no such thing"):
        tuner(misbehaves, {"deed": "raise"}, tmp_path / "a").tune(2)
    started = tuner(misbehaves, {"deed": "well", "n": {"grid": [*range(40)]}}, tmp_path / "b", metric="gain")
    with pytest.raises(UserError, match=r"metric: no trial reported this metric. Got 'gain'. Allowed: loss"):
        started.tune(1)
    # Nobody waited for forty trials to find that out.
    assert len(started.results) < 10


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_cpus": 17}, "num_cpus: the search requests 17 CPUs; there are 16"),
        (
            {"num_cpus": 2, "ranks_per_trial": 3},
            "a trial of 3 ranks needs as many CPUs on one node",
        ),
        ({"scheduler": "ahsa"}, "scheduler: unknown scheduler. Got 'ahsa'"),
        (
            {"scheduler": "asha", "scheduler_options": {"reduction": 2}},
            "unexpected keyword argument 'reduction'",
        ),
        (
            {"scheduler": "pbt", "checkpoints": False},
            "checkpoints: this scheduler continues trials from checkpoints",
        ),
        ({"scheduler": "pbt"}, "pbt changes sampled parameters, but the space has only"),
    ],
)
def test_what_cannot_be_is_refused_before_a_trial_starts(
    ray_cluster: None, tmp_path: Path, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        tuner(misbehaves, {"deed": "well"}, tmp_path, **given).tune(1)
    assert words in str(caught.value)
    assert not list(tmp_path.glob("search/trials/*"))


# -- digits ----------------------------------------------------------------------------


def digits(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    train, validation = load_digits()
    Trainer(build_model(), config, backend="serial", epochs=2, log_every_n_steps=1000).fit(train, validation)


def test_twenty_trials_on_the_digits_beat_the_default(ray_cluster: None, tmp_path: Path) -> None:
    """The same epochs, the same first weights and the same validation data as the example's own values."""
    torch.manual_seed(0)
    train, validation = load_digits()
    plain = Trainer(build_model(), backend="serial", batch_size=32, learning_rate=2e-3, epochs=2)
    default = plain.fit(train, validation).best_accuracy
    space = {"learning_rate": {"loguniform": [1e-4, 3e-2]}, "batch_size": {"choice": [8, 16, 32, 64]}}
    search = tuner(digits, space, tmp_path, scheduler="asha")
    best = search.tune(num_samples=20)
    assert len(search.results) == 20
    assert default is not None
    assert (search.best.value or 0.0) > default
    assert best.keys() == space.keys()


# -- the command line ------------------------------------------------------------------

SCRIPT = """
import argparse
import torch
from distributed import Trainer
parser = argparse.ArgumentParser()
parser.add_argument("--hidden-size", type=int)
parser.add_argument("--note")
asked = parser.parse_args()
assert asked.note == "a b"
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long()
size = asked.hidden_size
model = torch.nn.Sequential(torch.nn.Linear(4, size), torch.nn.ReLU(), torch.nn.Linear(size, 2))
history = Trainer(model, batch_size=16, epochs=9, learning_rate=1e-9).fit((x, y), (x, y))
print(f"epochs {len(history.epochs)}")
"""
CONFIG = """
epochs: 3
optimizer: sgd
tune:
  num_samples: 2
  num_cpus: 2
  search_space:
    learning_rate: {grid: [0.5, 1e-9]}
    hidden_size: {choice: [4, 8]}
"""


def test_the_verb_tunes_a_script_and_says_how_to_train(
    ray_cluster: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text(SCRIPT)
    Path("tune.yaml").write_text(CONFIG)
    words = ["--config", "tune.yaml", "--script", "train.py", "--output-dir", "out", "--num-samples", "1"]
    assert main(["tune", *words, "--", "--note", "a b"]) == 0
    out = capfd.readouterr().out
    assert "best: trial 00000, val_accuracy" in out
    assert "learning_rate=0.5" in out
    assert (tmp_path / "out" / "search.html").exists()
    command = next(line.strip() for line in out.splitlines() if "distributed.cli train" in line)
    assert command.startswith("python -m distributed.cli train --script train.py --config ")
    # The command does train: with the best values, the file's epochs, and the script's own arguments.
    assert main(shlex.split(command)[3:]) == 0
    assert "epochs 3" in capfd.readouterr().out
    # A search that is over is read, not run.
    assert main(["tune", *words, "--resume", "--", "--note", "a b"]) == 0
    assert "best: trial 00000" in capfd.readouterr().out


def test_nothing_of_a_search_is_left_in_the_environment() -> None:
    assert not [name for name in os.environ if name.startswith("TUNE_")]
