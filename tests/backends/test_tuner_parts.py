"""The parts of a search that need no cluster: spaces, a trial, arguments, the verb."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributed import DistributedTuner, Trainer, UserError
from distributed.cli import main
from distributed.commands.tune import _how_to_train
from distributed.config import DistributedConfig, Layer, load, read_file
from distributed.config.script_overlay import active
from distributed.operations.report.record_format import NAME
from distributed.operations.tuning.parent_run import ParentRun
from distributed.operations.tuning.search_folder import SearchFolder
from distributed.operations.tuning.search_space import Range, parse_space
from distributed.operations.tuning.trial import EPOCHS, MISSING, SCORE, Session, TrialOrder, run_trial
from distributed.operations.tuning.trial_channel import TRIAL, TrialListener, TrialReport
from distributed.operations.tuning.trial_record import Trial, load_trial
from distributed.testing.conformance import problem, small_model

X, Y = problem(26)


# -- spaces ----------------------------------------------------------------------------


def test_plain_words_become_ranges_and_values_stay() -> None:
    space = {
        "lr": {"loguniform": ["1e-4", 1e-2]},  # YAML 1.1 reads 1e-4 as text
        "size": {"choice": [8, 16]},
        "depth": {"randint": [1, 4]},
        "grid": {"grid_search": [1, 2]},
        "fixed": 3,
        "nested": {"a": {"uniform": [0, 1]}, "b": "word"},
    }
    assert parse_space(space) == {
        "lr": Range("loguniform", (1e-4, 1e-2)),
        "size": Range("choice", (8, 16)),
        "depth": Range("randint", (1, 4)),
        "grid": Range("grid", (1, 2)),
        "fixed": 3,
        "nested": {"a": Range("uniform", (0.0, 1.0)), "b": "word"},
    }


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({}, "a search needs parameters to sample"),
        (["lr"], "search_space: a search needs parameters"),
        ({3: 1}, "not a parameter name"),
        (
            {"lr": {"logunform": [1, 2]}},
            "search_space.lr: 'logunform' is not a kind of range. Did you mean 'loguniform'?",
        ),
        (
            {"lr": {"loguniform": [0, 1]}},
            "search_space.lr: loguniform wants [low, high], both above 0. Got [0, 1]",
        ),
        ({"lr": {"uniform": [2, 1]}}, "uniform wants [low, high]"),
        ({"lr": {"uniform": [1]}}, "uniform wants [low, high]"),
        ({"lr": {"uniform": [0, "inf"]}}, "uniform wants [low, high]. Got 'inf'"),
        ({"lr": {"choice": []}}, "choice wants one of the values in a list"),
        ({"lr": {"choice": "abc"}}, "choice wants"),
        ({"n": {"randint": [0.5, 3]}}, "randint wants [low, high]"),
        ({"a": {"n": {"normal": [0, -1]}}}, "search_space.a.n: normal wants"),
    ],
)
def test_ranges_that_make_no_sense_name_the_parameter(space: Any, words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_space(space)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"train_fn": 3}, "train_fn: not a function. Got 'int'"),
        ({"num_gpus": 0}, "num_gpus: must be a positive integer. Got 0"),
        ({"trials_per_gpu": 0.5}, "trials_per_gpu: must be a positive integer"),
        ({"num_gpus": 2, "num_cpus": 2}, "Set only one of them"),
        ({"trials_per_gpu": 2, "ranks_per_trial": 2}, "a trial of several ranks needs whole GPUs"),
        ({"mode": "most"}, "mode: unknown mode"),
        ({"time_limit": 0}, "time_limit: must be positive"),
        ({"seed": -1}, "seed: must be a non-negative integer"),
        ({"resume": True}, "resume: there is no search to resume"),
    ],
)
def test_arguments_that_make_no_sense(given: dict[str, Any], words: str) -> None:
    options = {"train_fn": print, "search_space": {"lr": 1}, **given}
    with pytest.raises(UserError) as caught:
        DistributedTuner(**options)
    assert words in str(caught.value)


# -- one trial -------------------------------------------------------------------------


class Heard(Session):
    """An engine that stops the trial after so many reports."""

    def __init__(self, stop_after: int = 99) -> None:
        self.name, self.reports, self.stop_after = "t", list[dict[str, Any]](), stop_after

    def report(self, figures: Mapping[str, Any], checkpoint: str | None) -> None:
        self.reports.append({**figures, "checkpoint": checkpoint})
        if len(self.reports) == self.stop_after:
            raise SystemExit(0)


def fits(config: dict[str, Any]) -> dict[str, Any] | None:
    options = {"backend": "pytorch-ddp", "batch_size": 8, "learning_rate": 0.3, "optimizer": "sgd"}
    Trainer(small_model(), options, num_processes=config.get("ranks")).fit((X, Y), (X, Y), epochs=3)
    return config.get("returns")


def order(tmp_path: Path, fn: Any = fits, **given: Any) -> TrialOrder:
    return TrialOrder(train_fn=fn, folder=str(tmp_path), **given)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_epoch_is_heard_with_its_checkpoint_wherever_the_ranks_are(tmp_path: Path, ranks: int) -> None:
    session = Heard()
    run_trial(order(tmp_path, ranks=2, hands_over=2), {"ranks": ranks, "returns": {"gain": 2}}, session)
    assert [report.get("epoch") for report in session.reports] == [0, 1, 2, 2]
    assert [report[EPOCHS] for report in session.reports] == [1, 2, 3, 3]
    # After the last epoch there is nothing to go on with.
    assert [SCORE in report for report in session.reports] == [True, True, False, False]
    assert session.reports[1][SCORE] == session.reports[1]["val_accuracy"]
    handed = [report["checkpoint"] for report in session.reports]
    assert handed[0] is handed[2] is None
    assert "/trials/t/checkpoints/step_" in handed[1]
    trial = load_trial(tmp_path, "t")
    assert trial is not None
    assert (trial.status, trial.metrics["gain"], trial.metric) == ("finished", 2, "val_accuracy")
    assert active() is None
    assert TRIAL not in os.environ
    # Once more, in a search that is resumed: it says again what it said last, and trains nothing.
    again = Heard()
    run_trial(order(tmp_path, fn=None), {"ranks": ranks, "returns": {"gain": 2}}, again)
    assert [report["gain"] for report in again.reports] == [2]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trial_that_is_stopped_ends_and_goes_on_later(tmp_path: Path, ranks: int) -> None:
    session = Heard(stop_after=2)
    with pytest.raises(SystemExit):
        run_trial(order(tmp_path, ranks=2), {"ranks": ranks}, session)
    trial = load_trial(tmp_path, "t")
    assert trial is not None
    assert (trial.status, len(trial.reports)) == ("running", 2)
    later = Heard()
    run_trial(order(tmp_path, ranks=2), {"ranks": ranks}, later)
    assert [report["epoch"] for report in later.reports] == [2]
    trial = load_trial(tmp_path, "t")
    assert trial is not None
    assert [report["epoch"] for report in trial.reports] == [0, 1, 2]


def returns(config: dict[str, Any]) -> dict[str, float]:
    return {"loss": 0.5}


@pytest.mark.parametrize(
    ("fn", "parameters", "number"), [(returns, {"a": 1}, 1), (fits, {"returns": {"gain": 2.0}}, 4)]
)
def test_a_trial_stopped_at_its_last_report_has_not_failed(
    tmp_path: Path, fn: Any, parameters: dict[str, Any], number: int
) -> None:
    """The engine says so in the trial's own thread, not where epochs are heard."""
    for heard in (number, 1):  # started again, it has its last report alone to make
        with pytest.raises(SystemExit):
            run_trial(order(tmp_path, fn), parameters, Heard(stop_after=heard))
        trial = load_trial(tmp_path, "t")
        assert trial is not None
        assert (trial.status, trial.error, len(trial.reports)) == ("running", None, number)
        assert trial.value is not None


def two_fits(config: dict[str, Any]) -> None:
    for _ in range(2):
        Trainer(small_model(), backend="serial", batch_size=8).fit((X, Y), epochs=2)


def test_two_trainers_in_a_trial_keep_apart(tmp_path: Path) -> None:
    run_trial(order(tmp_path / "two", two_fits), {"a": 1}, session := Heard())
    assert [(r.get("fit"), r["epoch"], r[EPOCHS]) for r in session.reports] == [
        (None, 0, 1),
        (None, 1, 2),
        (2, 0, 3),
        (2, 1, 4),
    ]
    assert {path.name for path in (tmp_path / "two" / "trials" / "t").iterdir()} > {
        "checkpoints",
        "checkpoints_2",
    }
    with pytest.raises(RuntimeError, match="Call fit once in train_fn"):
        run_trial(order(tmp_path / "pbt", two_fits, hands_over=1), {"a": 1}, Heard())


def leaves(config: dict[str, Any]) -> Any:
    if config["deed"] == "exit":
        raise SystemExit(3)
    if config["deed"] == "ranks":
        Trainer(small_model(), num_processes=3)
    return {"nothing": None, "number": 0.9, "words": {"a": "b"}}.get(config["deed"])


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("exit", "SystemExit: 3"),
        ("nothing", "train_fn called no fit and returned no metrics, so the trial has no result"),
        ("number", "train_fn must return its last report or nothing. Got 'float'"),
        ("ranks", "has 2 slots on one node, and its trainer requests 3 on 1 node"),
    ],
)
def test_a_trial_that_fails_says_why(tmp_path: Path, deed: str, words: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        run_trial(order(tmp_path, leaves, ranks=2), {"deed": deed}, Heard())
    trial = load_trial(tmp_path, "t")
    assert trial is not None
    assert trial.status == "failed"
    assert words in str(trial.error)
    assert words in str(caught.value)


def test_a_metric_that_a_trial_never_reports_is_said_at_its_end(tmp_path: Path) -> None:
    session = Heard()
    run_trial(order(tmp_path, metric="gain"), {"a": 1}, session)
    assert [MISSING in report for report in session.reports] == [False, False, False, True]
    assert not any(SCORE in report for report in session.reports)


def test_a_stranger_is_not_heard(tmp_path: Path) -> None:
    heard: list[Any] = []
    listener = TrialListener(lambda *said: heard.append(said), waits=False)
    with listener.open():
        address, _, _ = os.environ[TRIAL].split(" ")
        stranger = TrialReport(f"\0{address}", b"another key", False)
        with pytest.raises(Exception, match="digest"):
            stranger.on_run_start(None)  # type: ignore[arg-type]
    assert heard == []


def test_a_stranger_who_says_nothing_keeps_nobody_waiting(tmp_path: Path) -> None:
    listener = TrialListener(lambda *said: None, waits=False)
    with listener.open(), socket.socket(socket.AF_UNIX) as silent:
        address, key, _ = os.environ[TRIAL].split(" ")
        silent.connect(f"\0{address}")
        report = TrialReport(f"\0{address}", bytes.fromhex(key), False)
        run: Any = None  # nothing was held back, so no run is asked about anything
        report.on_run_start(run)
        report.on_run_end(run, "finished")


# -- a search that is resumed ----------------------------------------------------------


def claim(tmp_path: Path, **given: Any) -> None:
    from distributed_backends.ray.tune.engine import RayTune
    from ray import tune

    changes = {"hyperparam_mutations": {"lr": tune.uniform(0, 1), "a": lambda: 1}}
    usual: dict[str, Any] = {"scheduler": "pbt", "scheduler_options": changes, "config": {"epochs": 3}}
    search = DistributedTuner(
        print, {"lr": {"uniform": [0, 1]}}, **{"output_dir": tmp_path / "s", **usual, **given}
    )
    SearchFolder(search.output_dir).claim(search._asked(RayTune(), 1), search.resume)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_epochs", 2),
        ("grace_period", 2),
        ("scheduler_options", {"quantile_fraction": 0.5}),
        ("config", {"epochs": 3, "batch_size": 4}),
        ("config", None),
    ],
)
def test_a_search_goes_on_only_with_what_makes_its_trials_comparable(
    tmp_path: Path, field: str, value: Any
) -> None:
    claim(tmp_path)
    more = {"epochs": 3, "tracking": {"progress": "off"}}
    claim(tmp_path, resume=True, config=more, time_limit=60, max_concurrent=1, num_cpus=1)
    with pytest.raises(UserError, match=f"{field}: the search in .* was started with") as caught:
        claim(tmp_path, resume=True, **{field: value})
    assert "0x" not in str(caught.value)


# -- the command line ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("epochs: 1", [], "the file has no section `tune:` with a search_space"),
        ("tune: {search_space: {lr: 1}, metrik: a}", [], "Did you mean 'metric'?"),
        (
            "tune: {search_space: {learning_rate: {uniform: [2, 1]}}}",
            [],
            "search_space.learning_rate: uniform wants",
        ),
        ("epoch: 1\ntune: {search_space: {a: 1}}", [], "Did you mean 'epochs'?"),
        ("tune: {search_space: {a: 1}}", ["--num-samples", "few"], "--num-samples: not a number"),
        ("tune: {search_space: {a: 1}}", ["--num-sample", "2"], "Did you mean '--num-samples'?"),
        ("tune: {search_space: {a: 1}}", ["--resume"], "resume: there is no search to resume"),
    ],
)
def test_the_verb_refuses_what_makes_no_sense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str], said: str
) -> None:
    file = tmp_path / "tune.yaml"
    file.write_text(text)
    assert main(["tune", "--config", str(file), *words]) == 2
    assert said in capsys.readouterr().err


def told(tmp_path: Path, file: str, best: Trial) -> tuple[str, DistributedConfig]:
    """The command that trains with `best`, and the configuration that it would have."""
    (tmp_path / "tune.yaml").write_text(file)
    args = argparse.Namespace(script="train.py")
    search: Any = SimpleNamespace(best=best, best_parameters=best.parameters, output_dir=tmp_path, plot=str)
    lines = _how_to_train(search, args, [read_file(tmp_path / "tune.yaml")], [])
    return lines[1], load(tmp_path / "best.yaml")


def test_what_the_verb_writes_trains_what_was_tuned(tmp_path: Path) -> None:
    """A section is merged leaf by leaf, and the ranks are the trial's, whatever the machine has."""
    sampled = {"data": {"per_sample_rng": True}, "size": 4}
    best = Trial("00000", sampled, ranks=2)
    command, config = told(tmp_path, "data: {drop_last: true}\nepochs: 3\n", best)
    assert command.endswith("best.yaml -- --size 4")
    assert (config.data.drop_last, config.data.per_sample_rng, config.epochs) == (True, True, 3)
    assert config.num_processes == 2
    best.ranks = None
    assert told(tmp_path, "num_gpus: 4", best)[1].num_processes is None


@pytest.mark.parametrize(("asked", "ranks"), [(None, 2), (1, None)])
def test_a_trial_records_the_ranks_that_its_trainer_was_given(
    tmp_path: Path, asked: int | None, ranks: int | None
) -> None:
    run_trial(order(tmp_path, ranks=2), {"ranks": asked}, Heard())
    trial = load_trial(tmp_path, "t")
    assert trial is not None
    assert trial.ranks == ranks


def test_a_search_leaves_the_users_record_alone(tmp_path: Path) -> None:
    """Neither an empty run of its own, nor all trials as one run."""
    kept = Layer(
        "config", {"checkpoint_dir": str(tmp_path / "mine"), "tracking.record_dir": str(tmp_path / "r")}
    )
    with ParentRun([kept], "search", {}, {}):
        pass
    run_trial(order(tmp_path, layers=(kept,)), {"a": 1}, Heard())
    found = {path.parent.relative_to(tmp_path) for path in tmp_path.rglob(NAME)}
    assert found == {Path("trials/t/checkpoints")}
