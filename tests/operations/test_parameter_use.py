"""A search over a parameter that no trial reads reports no best value of it."""

from __future__ import annotations

import json
import logging
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed import DistributedTuner
from distributed.commands.script import execute
from distributed.operations.tuning.parameter_use import SampledParameters, watched_arguments
from distributed.operations.tuning.trial_record import Trial

GIVEN = {"lr": 0.1, "hidden_size": 8}


def keyword(**parameters: Any) -> Any:
    return parameters


READS: dict[str, tuple[Callable[[SampledParameters], Any], set[str]]] = {
    "nothing": (lambda p: None, set(GIVEN)),
    "presence only": (lambda p: "lr" in p, set(GIVEN)),
    "names only": (list, set(GIVEN)),
    "an item": (lambda p: p["lr"], {"hidden_size"}),
    "get": (lambda p: p.get("lr", 1.0), {"hidden_size"}),
    "pop": (lambda p: p.pop("lr"), {"hidden_size"}),
    "keywords": (lambda p: keyword(**p), set()),
    "a copy": (dict, set()),
    "items": (lambda p: list(p.items()), set()),
    "a union": (lambda p: {"x": 1} | p, set()),
    "json": (json.dumps, set()),
    "pickle": (pickle.dumps, set()),
}


@pytest.mark.parametrize("case", READS)
def test_what_reads_a_parameter(case: str) -> None:
    read, unread = READS[case]
    parameters = SampledParameters(GIVEN)
    read(parameters)
    assert parameters.unread == unread


def test_a_copy_is_a_plain_dictionary() -> None:
    parameters = SampledParameters(GIVEN)
    for copy in (parameters.copy(), parameters | {}, {} | parameters, pickle.loads(pickle.dumps(parameters))):
        assert type(copy) is dict
        assert copy == GIVEN


SCRIPTS = {
    "never reads its arguments": ("pass", {"lr", "hidden_size"}),
    "reads sys.argv": ("import sys; words = sys.argv[1:]", set()),
    "pops its arguments": ("import sys; words = [sys.argv.pop() for _ in range(4)]", set()),
    "looks for a flag": ("import sys; fast = '--lr' in sys.argv", set()),
    "reads its name": ("import sys; name = sys.argv[0]", {"lr", "hidden_size"}),
    "parses one and ignores the other": (
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr')\np.parse_known_args()",
        {"hidden_size"},
    ),
    "parses both": (
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr')\n"
        "p.add_argument('--hidden-size')\np.parse_args()",
        set(),
    ),
}


@pytest.mark.parametrize("case", SCRIPTS)
def test_what_a_script_reads_of_its_arguments(case: str, tmp_path: Path) -> None:
    text, expected = SCRIPTS[case]
    (tmp_path / "script.py").write_text(text)
    argv, words = sys.argv, list(sys.argv)
    with watched_arguments({"lr": "--lr", "hidden_size": "--hidden-size"}) as unread:
        execute(tmp_path / "script.py", ["--lr", "0.1", "--hidden-size", "8"])
    assert unread == expected
    assert sys.argv is argv
    assert argv == words


def search(tmp_path: Path, *unread: list[str]) -> DistributedTuner:
    """A search that has ended, with a trial for each list of names that it did not read."""
    space = {"lr": {"choice": [0.1, 0.2]}, "hidden_size": {"choice": [8]}, "fixed": 3}
    found = DistributedTuner(lambda parameters: None, space, output_dir=tmp_path / "search")
    trials = [
        Trial(str(n), {"lr": 0.1, "hidden_size": 8, "fixed": 3}, "finished", "loss", float(n), unread=names)
        for n, names in enumerate(unread)
    ]
    assert found._conclude(trials) == found.best_parameters
    return found


def test_a_parameter_that_no_trial_read_is_no_result(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = search(tmp_path, ["fixed", "hidden_size"], ["hidden_size", "lr"])
    assert found.unread == ["hidden_size"]
    assert found.best_parameters == {"lr": 0.1, "fixed": 3}
    assert "no trial read 'hidden_size'" in caplog.text


def test_one_that_some_trials_read_is_a_result(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = search(tmp_path, ["hidden_size"], [])
    assert found.unread == []
    assert found.best_parameters["hidden_size"] == 8
    assert caplog.text == ""


def test_the_line_of_a_trial_names_what_it_did_not_read() -> None:
    assert ", did not read lr, hidden_size, " in Trial("1", {}, unread=["lr", "hidden_size"]).line()
