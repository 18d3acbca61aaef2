"""A tracker on joined ranks delays and loses nothing, and one training is one run."""

from __future__ import annotations

import json
import re
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from distributed.cli import main
from tests.plugins.test_delivery import (
    STEPS,
    accept_only,
    check_one_run,
    clean_environment,  # noqa: F401 - a fixture
    sync,
    template,  # noqa: F401 - a fixture
)
from tests.support.torchrun import under_torchrun

pytestmark = pytest.mark.starts_processes
Weights = dict[tuple[str, int], list[list[float]]]


@dataclass
class Trained:
    """What the first start left: all its trainings, and the last one killed."""

    folder: Path
    uris: dict[str, str]
    weights: Weights
    errors: str
    python: Path

    def check_weights(self, name: str, found: Weights | None = None) -> None:
        """Each rank has the weights of a training without a tracker."""
        for rank in range(2):
            assert (found or self.weights)[name, rank] == self.weights["plain", rank]


def start(
    python: Path, phase: str, folder: Path, uris: dict[str, str], code: int | None
) -> tuple[Weights, str]:
    module = "tests.plugins.delivery_joined"
    output, errors = under_torchrun(python, module, phase, str(folder), json.dumps(uris), code=code)
    found = map(json.loads, re.findall(r"\{\"name.*?\}", output))
    return {(one["name"], one["rank"]): one["weights"] for one in found}, errors


@pytest.fixture(scope="module")
def trained(
    forking_python: Path,
    tmp_path_factory: pytest.TempPathFactory,
    template: bytes,  # noqa: F811
) -> Trained:
    folder = tmp_path_factory.mktemp("joined")
    uris = {}
    for name in ("silent", "second", "resumed", "killed"):
        (folder / f"{name}.db").write_bytes(template)
        uris[name] = f"sqlite:///{folder / name}.db"
    with closing(accept_only()) as server:
        silent = {**uris, "silent": f"http://127.0.0.1:{server.getsockname()[1]}"}
        weights, errors = start(forking_python, "first", folder, silent, 1)
    return Trained(folder, uris, weights, errors, forking_python)


def test_a_server_that_never_answers(trained: Trained) -> None:
    trained.check_weights("silent")
    (said,) = re.findall(r"tracker 'mlflow' \(http.*", trained.errors)
    assert "has not answered in start" in said
    (command,) = re.findall(r"`python -m distributed\.cli (track sync .*?)`", said)
    store = trained.uris["silent"]
    for _ in range(2):
        assert main([*command.split(), "--set", f"tracking.mlflow_tracking_uri={store}"]) == 0
        check_one_run(store, STEPS)


def test_a_second_fit_and_a_resume_continue_the_run(trained: Trained) -> None:
    for name in ("second", "resumed"):
        trained.check_weights(name)
        check_one_run(trained.uris[name], STEPS)


def test_a_killed_rank_loses_no_step(trained: Trained) -> None:
    store = trained.uris["killed"]
    assert sync(trained.folder / "killed") == 0
    check_one_run(store, STEPS[:7], "FAILED")
    found, _ = start(trained.python, "again", trained.folder, trained.uris, 0)
    check_one_run(store, STEPS)
    trained.check_weights("killed", found)
