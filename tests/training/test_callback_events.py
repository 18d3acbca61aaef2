"""A callback's methods are those of events, or the error names the nearest event."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from distributed import Callback
from distributed.errors import UserError
from distributed.registry.catalog import build_catalog
from distributed.registry.hookspecs import hookimpl
from distributed.training.callback_runner import CallbackRunner
from tests.support.training import make_trainer

NEAREST = {
    "on_train_begin": "on_run_start",
    "on_fit_start": "on_run_start",
    "on_batch_end": "on_step_end",
    "on_train_batch_end": "on_step_end",
    "on_before_optimizer_step": "on_step_end",
    "on_train_epoch_end": "on_epoch_end",
    "on_epoch_begin": "on_epoch_end",
    "on_evaluate": "on_validation_end",
    "on_save": "on_checkpoint",
    "on_train_end": "on_run_end",
    "on_logs": "on_log",
}


def never(self: Any, *args: Any) -> None:
    raise AssertionError("no event has this name")


@pytest.mark.parametrize(("name", "nearest"), NEAREST.items(), ids=list(NEAREST))
def test_a_method_for_no_event_names_the_nearest(name: str, nearest: str) -> None:
    callback = type("Mine", (Callback,), {name: never})()
    with pytest.raises(UserError, match=rf"Mine\.{name} would never be called\. The nearest is {nearest}:"):
        make_trainer(nn.Linear(4, 2), callbacks=[callback])
    # The remedies.
    renamed = type("Mine", (Callback,), {nearest: never})
    helper = type("Mine", (Callback,), {f"when{name}": never, "on_step_end": never})
    make_trainer(nn.Linear(4, 2), callbacks=[renamed(), helper()])


def test_a_method_of_a_plugins_callback_is_checked_too() -> None:
    class Plugin:
        @hookimpl
        def register_callbacks(self) -> list[Callback]:
            return [type("Theirs", (Callback,), {"on_batch_end": never})()]

    context: Any = type("Context", (), {"config": None})()
    runner = CallbackRunner(context, [], build_catalog([Plugin()], found=[]))
    with pytest.raises(UserError, match=r"Theirs\.on_batch_end"):
        runner.gather()
