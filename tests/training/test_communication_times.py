"""Exposed and hidden communication: by arithmetic, in the record of a run, and absent where not known."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from secrets import token_hex
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed import Callback
from distributed.cli import main
from distributed.interfaces.backend import Backend, CommunicationTimes
from distributed.interfaces.placement import World
from distributed.parallel.gradient_reducer import GradientReducer
from distributed.testing.rank_pool import RankPool
from distributed.training import flight_clock
from distributed.training.flight_clock import FlightClock
from tests.support.training import make_trainer

NAMES = ("exposed_communication_seconds", "hidden_communication_share", "time_communication")


# -- arithmetic ----------------------------------------------------------------------------------------------


def test_the_hidden_share_is_that_of_the_shorter_of_both() -> None:
    # Backward computes for 4 s, gradients are under way for 3 s, and the step waits for 1 s of these.
    times = CommunicationTimes(exposed=1.0, total=3.0)
    assert times.hidden_share(backward=5.0) == pytest.approx((4 + 3 - 5) / min(4, 3))
    assert CommunicationTimes(4.0, 6.0, compute=2.0).hidden_share(99.0) == 1.0
    assert CommunicationTimes(3.0, 3.0).hidden_share(7.0) == 0.0
    assert CommunicationTimes(3.0, 2.9).hidden_share(7.0) == 0.0  # noticed late
    assert CommunicationTimes(1.0).hidden_share(5.0) is None
    assert CommunicationTimes(5.0, 5.0).hidden_share(5.0) is None


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(flight_clock, "perf_counter", made)
    return made


def test_seconds_under_way_are_those_of_the_union(clock: Clock) -> None:
    flights, done = FlightClock(), dict.fromkeys("abc", False)
    flights.launch(lambda: done["a"])
    clock.now = 1.0
    flights.launch(lambda: done["b"])  # at the same time as the first
    clock.now = 3.0
    done["a"] = True
    flights.look()
    clock.now = 4.0
    done["b"] = True
    flights.look()  # from 0 to 4
    clock.now = 10.0
    flights.look()
    flights.launch(lambda: done["c"])
    clock.now = 12.0
    flights.end()  # from 10 to 12
    flights.look()
    assert flights.take() == 6.0
    assert flights.take() == 0.0


def test_a_backend_that_says_nothing_knows_nothing() -> None:
    class Plain(Backend):
        pass

    class Known(Backend):
        def communication_seconds(self) -> float:
            return 0.25

    for size, kind, expected in (
        (2, Plain, None),
        (1, Plain, CommunicationTimes(0.0)),
        (2, Known, CommunicationTimes(0.25)),
    ):
        kind.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
        backend: Any = kind()
        backend.world = World(size=size)
        assert backend.communication_times() == expected


# -- runs ----------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Layers with a gradient each, so that the first ones to be reduced have others to hide behind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(48, 48) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def logs_of(
    backend: str, rank_pool: RankPool | None, ranks: int = 2, **fields: Any
) -> list[dict[str, float]]:
    data = torch.randn(64, 48), torch.randn(64, 48)
    fields = {"batch_size": 8, "log_every_n_steps": 2, "bucket_cap_mb": 0.005, **fields}
    steps = fields.pop("max_steps", 4)
    trainer = make_trainer(Chain(), ranks, rank_pool, backend=backend, loss_fn=nn.MSELoss(), **fields)
    return list(trainer.fit(data, max_steps=steps).logs)


@pytest.mark.parametrize(
    ("backend", "fields"),
    [("pytorch-ddp", {}), ("horovod", {}), ("pytorch-ddp", {"parallel": {"tensor": 2}, "ranks": 4})],
)
def test_a_record_has_exposed_and_hidden_communication(
    backend: str, fields: dict[str, Any], rank_pool: RankPool, tmp_path: Path
) -> None:
    logs = logs_of(backend, rank_pool, tracking={"record_dir": str(tmp_path)}, **fields)
    assert len(logs) == 2
    for log in logs:
        assert log["exposed_communication_seconds"] > 0.0
        assert 0.0 <= log["hidden_communication_share"] <= 1.0
        assert 0.0 < log["time_communication"] <= 1.0
    assert (tmp_path / "record.jsonl").read_text().count("hidden_communication_share") == 2
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path), "--output", str(page)]) == 0
    for title in ("Exposed communication per step", "Hidden share of communication"):
        assert f"<h3>{title}</h3>" in page.read_text()


def test_what_is_not_known_is_absent(rank_pool: RankPool) -> None:
    for log in logs_of("fsdp", rank_pool):
        assert not set(NAMES) & set(log)
        assert "time_backward" in log
    # A codec does not show when its exchange has ended.
    for log in logs_of("pytorch-ddp", rank_pool, compression={"codec": "fp16"}):
        assert log["exposed_communication_seconds"] > 0.0
        assert "hidden_communication_share" not in log
    for log in logs_of("pytorch-ddp", None, ranks=1):
        assert log["time_communication"] == 0.0
        assert not {*NAMES[:2]} & set(log)


DELAY = 0.2


class Late(Callback):
    """Ranks 2 and 3 send their gradients so long after ranks 0 and 1 have begun to wait for them.

    Args:
        token: of keys of the store, which outlives a run.
    """

    all_ranks = True

    def __init__(self, token: str) -> None:
        self.token = token

    def on_run_start(self, context: Any) -> None:
        rank, store, steps = context.world.rank, dist.distributed_c10d._get_default_store(), count()
        self.name = "_share_use" if rank < 2 else "_send"
        self.real = getattr(GradientReducer, self.name)

        def wait_or_be_late(reducer: GradientReducer, *args: Any) -> Any:
            key = f"{self.token}-{rank % 2}-{next(steps)}"
            if rank < 2:  # in `finish`, after its clock has started
                store.set(key, b"")
            else:
                store.wait([key])
                sleep(DELAY)
            return self.real(reducer, *args)

        setattr(GradientReducer, self.name, wait_or_be_late)

    def on_run_end(self, context: Any, status: str) -> None:
        setattr(GradientReducer, self.name, self.real)


def test_waiting_for_a_late_rank_is_exposed(rank_pool: RankPool) -> None:
    # A single bucket a step.
    late = {"bucket_cap_mb": 25.0, "callbacks": [Late(token_hex(8))]}
    for log in logs_of("pytorch-ddp", rank_pool, parallel={"tensor": 2}, ranks=4, **late):
        assert log["exposed_communication_seconds"] >= DELAY
        assert log["hidden_communication_share"] <= 1.0
