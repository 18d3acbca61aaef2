"""Schedules, kinds of optimizers and resumes on joined ranks: the tests of other places, run on theirs.

As a script, on ranks that a launcher started, it runs the tests of an area and prints their errors.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist

from tests.support.torchrun import under_torchrun
from tests.training import test_optimizer_kinds as kinds
from tests.training import test_resumed_state as resumed
from tests.training import test_schedules as schedules

Test = Callable[..., None]
AREAS: dict[str, dict[str, list[Test]]] = {
    "schedules": {
        "pytorch-ddp": [
            schedules.test_a_schedule_by_steps_and_resumed,
            schedules.test_a_loop_of_fits,
            schedules.test_a_configured_schedule_in_a_loop_of_fits,
            schedules.test_a_scheduler_that_takes_the_epoch,
            schedules.test_the_metric_of_a_plateau,
            schedules.test_a_plateau_without_its_metric,
            schedules.test_steps_counted_by_epochs,
            schedules.test_a_schedule_of_the_batches_of_a_loader,
            schedules.test_an_epoch_that_the_run_cuts_counts_once,
        ],
    },
    "optimizers": {
        "pytorch-ddp": [
            kinds.test_modes_of_an_optimizer,
            kinds.test_an_optimizer_with_modes_is_resumed,
            kinds.test_a_step_by_a_closure,
            kinds.test_what_is_trained_changes,
        ],
    },
    "resumes": {
        "pytorch-ddp": [
            resumed.test_an_optimizer_of_another_kind_takes_over_the_state,
            resumed.test_which_hyperparameters_win_is_said,
            resumed.test_joined_optimizers_are_resumed,
            resumed.test_the_own_state_of_an_optimizer_object_is_resumed,
            resumed.test_weights_alone_are_taken_where_the_optimizer_does_not_fit,
            resumed.test_a_head_that_does_not_fit_stays_as_built,
            resumed.test_carried_state_is_refused_where_steps_have_several_micro_batches,
            resumed.test_caches_are_not_carried_state,
            resumed.test_an_average_without_a_state_of_its_own_is_resumed,
            resumed.test_parameters_of_a_loss_are_trained_and_resumed,
            resumed.test_a_validation_may_differentiate,
            resumed.test_a_finished_run_has_empty_series,
        ],
        "fsdp": [
            resumed.test_joined_optimizers_are_resumed,
            resumed.test_weights_alone_are_taken_where_the_optimizer_does_not_fit,
            resumed.test_an_average_without_a_state_of_its_own_is_resumed,
        ],
    },
    "one rank": {"pytorch-ddp": [resumed.test_carried_state_is_resumed]},
}


@pytest.fixture(scope="module")
def errors(forking_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """Errors of an area by test, of which each area is started once."""
    found: dict[str, dict[str, str]] = {}

    def of(area: str) -> dict[str, str]:
        if area not in found:
            folder, ranks = tmp_path_factory.mktemp("joined"), 1 if area == "one rank" else 2
            output, _ = under_torchrun(forking_python, __name__, area, str(folder), ranks=ranks)
            found[area] = json.loads(output.splitlines()[-1])
        return found[area]

    return of


def name_of(backend: str, test: Test) -> str:
    return f"{backend}-{test.__name__.removeprefix('test_')}"


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("area", "name"),
    [(area, name_of(backend, test)) for area, of in AREAS.items() for backend in of for test in of[backend]],
)
def test_on_joined_ranks(area: str, name: str, errors: Callable[[str], dict[str, str]]) -> None:
    if error := errors(area)[name]:
        pytest.fail(error, pytrace=False)


def parameters(test: Test, place: tuple[str, int, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Those that pytest would call `test` with, at one place."""
    axes = []
    for mark in test.pytestmark:  # type: ignore[attr-defined]
        if mark.name == "parametrize":
            names, values = mark.args[0], mark.args[1]
            if "place" in names or "backend" in names:
                continue
            several = not isinstance(names, str)
            axes.append(
                [dict(zip(names, value, strict=True)) if several else {names: value} for value in values]
            )
    wanted = {"rank_pool": None, "pool": None, "caplog": None, "place": place}
    wanted |= dict(zip(("backend", "ranks", "fields"), place, strict=True))
    for parts in itertools.product(*axes):
        given = wanted | {name: value for part in parts for name, value in part.items()}
        yield {name: given[name] for name in inspect.signature(test).parameters if name in given}


def error_of(test: Test, given: dict[str, Any], folder: Path) -> str:
    """Traceback of a failing test with its parameters; empty if it passes."""
    if "tmp_path" in inspect.signature(test).parameters:
        folder.mkdir(parents=True, exist_ok=True)
        given = {**given, "tmp_path": folder}
    try:
        test(**given)
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - it is reported
        return f"rank {os.environ['RANK']}, {str(given)[:300]}\n{traceback.format_exc()}"
    return ""


def exchange(store: dist.Store, case: str, error: str) -> str:
    """The errors of all ranks.

    Raises:
        dist.DistStoreError: a rank has not come in time, and has to be ended; with this rank's error.
    """
    store.set(f"{case}/{os.environ['RANK']}", error)
    try:
        return "".join(store.get(f"{case}/{n}").decode() for n in range(int(os.environ["WORLD_SIZE"])))
    except dist.DistStoreError as late:
        late.add_note(f"{case}: {error}")
        raise


def main(area: str, folder: str) -> None:
    """Print ``{test: errors}`` on rank 0."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    found: dict[str, str] = {}
    for backend, tests in AREAS[area].items():
        place = (backend, int(os.environ["WORLD_SIZE"]), {})
        for test in tests:
            name = name_of(backend, test)
            for i, given in enumerate(parameters(test, place)):
                error = error_of(test, given, Path(folder, name, str(i)))
                found[name] = found.get(name, "") + exchange(store, f"{name}/{i}", error)
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
