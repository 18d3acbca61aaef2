"""The mixin that feeds trackers: what they get, and what becomes of one that fails."""

from __future__ import annotations

import logging
from pathlib import Path
from textwrap import dedent

import pytest

from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.placement import World
from distributed.interfaces.tracker import TrackerSpec
from distributed.registry.catalog import Catalog, build_catalog
from distributed.registry.hookspecs import hookimpl
from distributed.tracking.trackers import Trackers, capture_contexts, check_trackers
from distributed.training.mixins.tracking import TrackingMixin

TRACKERS = """
    from distributed.interfaces.tracker import Tracker

    calls = []

    class Good(Tracker):
        def __init__(self, config):
            self.config = config
        @classmethod
        def capture(cls):
            return {"place": "caller"}
        def start(self, params):
            calls.append(("start", dict(params), self.context))
        def log_metrics(self, metrics, step):
            calls.append(("log_metrics", dict(metrics), step))
        def log_artifact(self, path):
            calls.append(("log_artifact", path))
        def finish(self, status):
            calls.append(("finish", status))

    def bad(method):
        def fail(self, *args):
            calls.append(f"bad {method}")
            raise OSError(f"no {method} today")
        return type(f"Bad_{method}", (Good,), {"start": lambda *a: None, "log_metrics": lambda *a: None,
                    "log_artifact": lambda *a: None, "finish": lambda *a: None, method: fail})

    BadInit, BadStart, BadLog = bad("__init__"), bad("start"), bad("log_metrics")
    BadArtifact, BadFinish = bad("log_artifact"), bad("finish")
    class BadCapture(Good):
        @classmethod
        def capture(cls):
            raise OSError("no capture today")
"""


class Plugin:
    def __init__(self, *specs: TrackerSpec) -> None:
        self.specs = list(specs)

    @hookimpl
    def register_trackers(self):
        return self.specs


class Loop(TrackingMixin):
    def __init__(self, catalog: Catalog, rank: int = 0, contexts=None, **config) -> None:
        self.trackers = Trackers(DistributedConfig(**config), World(rank=rank, size=2), catalog, contexts)


def spec(target: str, enabled=lambda config: True, requires: tuple[str, ...] = ()) -> TrackerSpec:
    return TrackerSpec(target.lower(), f"trackers_of_test:{target}", enabled, requires, "pip install them")


def catalog(*specs: TrackerSpec) -> Catalog:
    return build_catalog([Plugin(*specs)], found=[])


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list:
    (tmp_path / "trackers_of_test.py").write_text(dedent(TRACKERS))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "trackers_of_test", raising=False)
    import trackers_of_test

    return trackers_of_test.calls


def run(loop: Loop) -> None:
    loop.trackers.start({"global_batch_size": 64})
    loop.track_metrics({"loss": 1.0}, 1)
    loop.track_artifact("model.pt")
    loop.track_metrics({"loss": 0.5, "step": 2}, 2)
    loop.trackers.finish("finished")


LATER_CALLS = [
    ("log_metrics", {"loss": 1.0}, 1),
    ("log_artifact", "model.pt"),
    ("log_metrics", {"loss": 0.5}, 2),
    ("finish", "finished"),
]


def test_a_tracker_gets_parameters_metrics_artifacts_and_the_end(calls):
    contexts = {"good": {"place": "caller"}, "other": {"place": "elsewhere"}}
    loop = Loop(catalog(spec("Good")), contexts=contexts, batch_size=8, learning_rate=0.5)
    run(loop)
    name, params, context = calls[0]
    assert (name, context) == ("start", {"place": "caller"})
    assert params["batch_size"] == 8
    assert params["learning_rate"] == 0.5
    assert params["data.verify"] is True
    assert params["global_batch_size"] == 64
    assert "gradient_clipping" not in params  # None says nothing
    assert all(isinstance(value, bool | int | float | str) for value in params.values())
    assert calls[1:] == LATER_CALLS


def test_only_rank_0_tracks(calls):
    run(Loop(catalog(spec("Good")), rank=1))
    assert calls == []


def test_only_trackers_that_the_configuration_asks_for_start(calls):
    chosen = spec("Good", enabled=lambda config: config.wants_mlflow)
    run(Loop(catalog(chosen)))
    assert calls == []
    run(Loop(catalog(chosen), mlflow_tracking=True))
    assert len(calls) == 5


@pytest.mark.parametrize(
    ("target", "method"),
    [
        ("BadInit", "__init__"),
        ("BadStart", "start"),
        ("BadLog", "log_metrics"),
        ("BadArtifact", "log_artifact"),
        ("BadFinish", "finish"),
    ],
)
def test_a_tracker_that_fails_is_dropped_and_the_others_go_on(calls, caplog, target, method):
    with caplog.at_level(logging.WARNING, logger="distributed"):
        run(Loop(catalog(spec(target), spec("Good"))))
    assert [call for call in calls if call != f"bad {method}"][1:] == LATER_CALLS
    assert calls.count(f"bad {method}") == 1
    (record,) = caplog.records
    shown = method if method != "__init__" else "start"
    assert f"'{target.lower()}' failed in {shown}" in record.message
    assert f"OSError: no {method} today" in record.message


def test_a_predicate_or_module_that_fails_drops_its_tracker_alone(calls, caplog):
    def broken(config):
        raise ValueError("cannot tell")

    run(Loop(catalog(spec("Good", enabled=broken), spec("NoSuchClass"), spec("Good"))))
    assert calls[1:] == LATER_CALLS
    assert any("cannot tell" in record.message for record in caplog.records)
    assert any("NoSuchClass" in record.message for record in caplog.records)


def test_a_missing_requirement_is_an_error_with_the_remedy(calls):
    found = catalog(spec("Good", requires=("no_such_package_at_all",)))
    with pytest.raises(UserError, match=r"tracker 'good' needs no_such_package_at_all.*pip install them"):
        Loop(found).trackers.start({})
    with pytest.raises(UserError, match="no_such_package_at_all"):
        check_trackers(DistributedConfig(), found)


def test_contexts_come_from_the_callers_process(calls, caplog):
    found = catalog(spec("Good"), spec("BadCapture"), spec("Good", enabled=lambda config: False))
    assert capture_contexts(DistributedConfig(), found) == {"good": {"place": "caller"}}
    assert "no capture today" in caplog.text


def test_finishing_twice_or_before_the_start_does_nothing(calls):
    loop = Loop(catalog(spec("Good")))
    loop.trackers.finish("failed")
    run(loop)
    loop.trackers.finish("failed")
    assert calls[1:] == LATER_CALLS


def test_the_loop_beside_the_mixin_may_use_any_other_name():
    # Mixins share one namespace with the loop: every name of ours says that it is ours.
    own = {name for name in vars(TrackingMixin) if not name.startswith("__")}
    assert {name for name in own if "track" not in name} == set()
