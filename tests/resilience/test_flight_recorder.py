"""torch's Flight Recorder in failure reports: real gloo ranks, and dumps in the format of NCCL's ranks."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from stat import S_IMODE
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed import WorkerError
from distributed.resilience import collective_mismatch, flight_dumps, flight_records
from distributed.resilience.collective_mismatch import compare
from distributed.resilience.flight_dumps import collect, keep_dumps, recorder_missed, recorder_off, switch_on
from distributed.resilience.flight_records import OFF, FlightRecord, parse_dump, read_record
from tests.support.flight_dumps import dump, entry
from tests.support.training import make_trainer


def told(*dumps: bytes) -> str:
    """What a report says of ranks 0, 1, ... with these dumps."""
    return compare([parse_dump(data, rank) for rank, data in enumerate(dumps)]).text


# Real ranks


class SkipsACollective(nn.Module):
    """Reduces 1 MiB in every forward pass; rank 1 leaves that out in step 3 and never returns, or raises."""

    def __init__(self, ends: bool = False) -> None:
        super().__init__()
        self.layer, self.calls, self.ends = nn.Linear(4, 2), 0, ends

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 1:
            self.group: Any = dist.new_group([0, 1], group_desc="experts")
        if self.calls == 3 and os.environ["RANK"] == "1":
            if self.ends:
                raise ZeroDivisionError("no expert")
            threading.Event().wait()
        dist.all_reduce(torch.ones(2**18), group=self.group)
        found: Tensor = self.layer(x)
        return found


def _fail(model: nn.Module, folder: Path) -> WorkerError:
    trainer = make_trainer(model, 2, folder=folder, batch_size=4, hang_timeout=3.0, stall_report=None)
    with pytest.raises(WorkerError) as caught:
        trainer.fit((torch.ones(64, 4), torch.zeros(64, dtype=torch.long)), epochs=1)
    return caught.value


@pytest.mark.starts_processes
def test_a_hang_names_the_collective_that_a_rank_skipped(tmp_path: Path) -> None:
    text = _fail(SkipsACollective(), tmp_path).summary
    name = "all_reduce #3 of group 'experts' (1.0 MiB float32)"
    assert f"rank 0: {name}, scheduled; rank 1: all_reduce #" in text
    assert f"Rank 1 has not called {name}, which rank 0 has called." in text

    folder = tmp_path / "failure_report_1_flight_recorder"
    assert f"The dumps are in {folder}." in text
    assert S_IMODE(folder.stat().st_mode) == 0o700
    assert [(path.name, S_IMODE(path.stat().st_mode)) for path in sorted(folder.iterdir())] == [
        ("rank_0", 0o600),
        ("rank_1", 0o600),
    ]
    # What the other tests build has the fields that the real recorder writes, and its version.
    real = pickle.loads((folder / "rank_0").read_bytes())
    built = pickle.loads(dump(entry(1)))
    assert set(real["entries"][-1]) - {"frames"} == set(built["entries"][0])
    assert (real["version"], set(built)) == (built["version"], set(built) & set(real))
    assert real["entries"][-1]["profiling_name"] == "gloo:all_reduce"


@pytest.mark.starts_processes
def test_a_rank_that_raises_leaves_its_dump(tmp_path: Path) -> None:
    """gloo records that the collective of the other rank has ended, though it failed without rank 1."""
    text = _fail(SkipsACollective(ends=True), tmp_path).summary
    assert "rank 1 (" in text.partition(" raised ZeroDivisionError: no expert")[0]
    assert "Rank 1 has not called all_reduce #3 of group 'experts' (1.0 MiB float32)" in text
    assert {path.name for path in (tmp_path / "failure_report_1_flight_recorder").iterdir()} == {
        "rank_0",
        "rank_1",
    }


# NCCL's dumps


def test_a_rank_that_is_behind_is_named_with_what_it_misses() -> None:
    waits = [entry(number) for number in range(110, 118)]
    waits.append(entry(118, sizes=[[6_553_600]], state="started", group=("0", "default_pg")))
    done = [entry(number) for number in range(110, 118)]
    text = told(
        dump(*waits, ranks="[0, 1, 2]"), dump(*done, ranks="[0, 1, 2]"), dump(*waits, ranks="[0, 1, 2]")
    )
    assert text == (
        "Last collective by torch's Flight Recorder:"
        " ranks 0, 2: all_reduce #118 of group 'default_pg' (25.0 MiB float32), started;"
        " rank 1: all_reduce #117 of group 'default_pg' (3.9 KiB float32), completed."
        " Rank 1 has not called all_reduce #118 of group 'default_pg' (25.0 MiB float32), which ranks"
        " 0, 2 have called."
    )


def test_ranks_in_one_collective_differ_in_nothing() -> None:
    same = dump(entry(1), entry(2, state="started"), ranks="[0, 1]")
    found = compare([parse_dump(same, 0), parse_dump(same, 1)])
    assert not found.differ
    assert found.text.endswith("ranks 0, 1: all_reduce #2 of group 'default_pg' (3.9 KiB float32), started.")


def test_another_operation_and_another_size_are_told_apart() -> None:
    usual = dump(entry(1), entry(2, state="started"))
    other = dump(entry(1), entry(2, "broadcast", state="scheduled"))
    bigger = dump(entry(1), entry(2, sizes=[[2000]], state="scheduled"))
    assert (
        "The ranks differ in the operation of a collective: rank 2 has called broadcast #2 of group"
        " 'default_pg' (3.9 KiB float32), and ranks 0, 1 have called all_reduce #2"
        in told(usual, usual, other)
    )
    assert (
        "The ranks differ in the size or dtype of a collective: rank 1 has called all_reduce #2 of group"
        " 'default_pg' (7.8 KiB float32), and ranks 0, 2 have called all_reduce #2"
        in told(usual, bigger, usual)
    )


def test_groups_are_counted_apart() -> None:
    """Ranks 0 and 1 of a tensor group are far ahead of what they have called in the default group."""
    mesh = ("3", "mesh_tensor")
    first = dump(
        entry(1, state="started"),
        *(entry(n, group=mesh) for n in range(2, 40)),
        ranks="[0, 1, 2]",
        _3="[0, 1]",
    )
    last = dump(entry(1, state="started"), ranks="[0, 1, 2]", _3="[0, 1]")
    assert "has not called" not in told(first, first, last)
    late = dump(
        entry(1, state="started"),
        *(entry(n, group=mesh) for n in range(2, 39)),
        ranks="[0, 1, 2]",
        _3="[0, 1]",
    )
    assert "Rank 1 has not called all_reduce #39 of group 'mesh_tensor'" in told(first, late, last)


def test_sizes_that_a_finished_collective_allowed_are_no_mismatch() -> None:
    """gloo gathers tensors of different sizes."""
    small, large = (dump(entry(1, "all_gather", sizes=[[n]], outputs=[[9]])) for n in (4, 5))
    assert "differ" not in told(small, large)


def test_a_broadcast_that_its_source_has_sent_blocks_nobody() -> None:
    assert "has not called" not in told(dump(entry(1), entry(2, "broadcast")), dump(entry(1)))
    assert "Rank 1 has not called broadcast #2" in told(
        dump(entry(1), entry(2, "broadcast"), entry(3, state="started")), dump(entry(1))
    )


def test_a_send_is_named_and_not_compared() -> None:
    send = entry(7, "send 0->1", state="started", point_to_point=True)
    text = told(dump(entry(1), send), dump(entry(1)))
    assert "rank 0: send 0->1 #7 of group 'default_pg' (3.9 KiB float32), started" in text
    assert "has not called" not in text


TORCH_PAIRS = {
    "equal": (entry(1), entry(1)),
    "operation": (entry(1, state="started"), entry(1, "broadcast", state="started")),
    "size": (entry(1, state="started"), entry(1, sizes=[[7]], state="started")),
    "dtype": (entry(1, state="started"), entry(1, dtype="Half", state="started")),
    "scatter": (
        entry(1, "scatter", sizes=[[4]], outputs=[[2]]),
        entry(1, "scatter", sizes=[], outputs=[[2]]),
    ),
    "gather": (
        entry(1, "gather", sizes=[[2]], outputs=[[2], [2]]),
        entry(1, "gather", sizes=[[2]], outputs=[]),
    ),
    "reduce_scatter": (
        entry(1, "reduce_scatter", sizes=[[4]], outputs=[[2]], state="started"),
        entry(1, "reduce_scatter", sizes=[[8]], outputs=[[4]], state="started"),
    ),
}


@pytest.mark.parametrize("name", TORCH_PAIRS)
def test_collectives_match_as_in_torchs_own_analysis(name: str) -> None:
    from torch.distributed.flight_recorder.components.types import MatchState, Op

    pair = TORCH_PAIRS[name]
    first, second = (Op(one, {"0": {0, 1}}, "0") for one in pair)
    matches = first.match(second).state == MatchState.FULLY_MATCHED
    found = compare([parse_dump(dump(one), rank) for rank, one in enumerate(pair)])
    assert found.differ is not matches


# Damaged and missing dumps


class Runs:
    """An object whose unpickling creates a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (self.path,)


def check_that_no_code_is_run(folder: Path) -> None:
    data = pickle.dumps({"version": "2.10", "entries": [Runs(str(folder / "made"))], "pg_config": {}})
    record = parse_dump(data, 0)
    assert not (folder / "made").exists()
    assert "a dump holds plain values only" in record.problem


def test_a_dump_cannot_run_code(tmp_path: Path) -> None:
    check_that_no_code_is_run(tmp_path)


def test_truncated_and_foreign_dumps_are_reported_and_hide_nothing() -> None:
    whole = dump(entry(1), entry(2, state="started"))
    for length in range(1, len(whole), 7):
        assert "its dump is truncated or damaged" in parse_dump(whole[:length], 0).problem, length
    assert parse_dump(dump(entry(1), version="3.0"), 0).problem == (
        "its dump has version 3.0; version 2 can be read"
    )
    for content in (
        [],
        {"version": "2.1"},
        {"version": "2.1", "entries": [1]},
        {"version": "2.1", "entries": 3},
    ):
        assert "unknown format" in parse_dump(pickle.dumps(content), 0).problem, content
    text = told(whole, whole[:50], OFF)
    assert "rank 0: all_reduce #2" in text
    assert "Of rank 1, its dump is truncated or damaged" in text
    assert "Of rank 2, its Flight Recorder is off (TORCH_FR_BUFFER_SIZE=0)." in text


def test_a_dump_of_any_size_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "flight_0").open("wb") as file:
        file.truncate(flight_records.MAX_BYTES + 1)
    record = read_record([tmp_path / "flight_0"], 0)
    assert record is not None
    assert record.problem == "its dump is larger than 64.0 MiB"
    assert keep_dumps(tmp_path, str(tmp_path / "failure_report_1.txt")) == ""


def check_that_old_records_accuse_nobody(folder: Path) -> None:
    """Rank 1 does not answer; its dump of an earlier report says nothing of now."""
    (folder / "flight_0").write_bytes(dump(entry(1), entry(2, state="started"), ranks="[0, 1]"))
    (folder / "flight_failed_0").write_bytes(dump(entry(1), entry(2, state="started"), ranks="[0, 1]"))
    (folder / "flight_1").write_bytes(dump(entry(1), ranks="[0, 1]"))
    os.utime(folder / "flight_1", (0, 0))
    os.mkfifo(folder / "flight_1.request")
    descriptor = os.open(folder / "flight_1.request", os.O_RDWR)
    try:
        text = compare(collect(folder, {0: 1, 1: 1}, alive=[1])).text
    finally:
        os.close(descriptor)
    assert "rank 0: all_reduce #2" in text
    assert "Of rank 1, its dump is out of date by" in text
    assert "has not called" not in text


def test_a_rank_that_does_not_answer_is_out_of_date(tmp_path: Path) -> None:
    check_that_old_records_accuse_nobody(tmp_path)


def test_a_rank_without_a_dump_is_named_if_others_have_one(tmp_path: Path) -> None:
    assert collect(tmp_path, {0: 1, 1: 1}, alive=[]) == []  # as of ranks of TensorFlow
    (tmp_path / "flight_failed_0").write_bytes(dump(entry(1)))
    (_, missing) = collect(tmp_path, {0: 1, 1: 1}, alive=[])
    assert missing == FlightRecord(1, problem="there is no dump: it ended without one")


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Path]:
    flight_dumps.answer_requests(tmp_path, 4)
    yield tmp_path
    flight_dumps.stop_answers()


def test_a_rank_answers_each_request_anew(listener: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([dump(entry(1)), dump(entry(1), entry(2))])
    monkeypatch.setattr(flight_dumps, "dump_recorder", lambda: next(answers))
    for length in (1, 2):
        (record,) = collect(listener, {4: os.getpid()}, alive=[4])
        assert (record.problem, len(record.collectives)) == ("", length)
    assert S_IMODE((listener / "flight_4").stat().st_mode) == 0o600


def test_the_watchdogs_newer_dump_is_preferred(tmp_path: Path) -> None:
    (tmp_path / "flight_0").write_bytes(dump(entry(1)))
    os.utime(tmp_path / "flight_0", (0, 0))
    (tmp_path / "flight_watchdog_0").write_bytes(dump(entry(1), entry(2, state="started", retired=True)))
    (record,) = collect(tmp_path, {0: 1}, alive=[])
    assert (record.problem, len(record.collectives)) == ("", 2)


# Variables


def test_the_recorder_is_switched_on_and_a_users_values_stay(tmp_path: Path) -> None:
    empty: dict[str, str] = {}
    switch_on(tmp_path, empty)
    assert empty == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/flight_watchdog_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    own = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/logs/trace_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
    given = dict(own)
    switch_on(tmp_path, given)
    assert given == own
    assert recorder_missed("cuda:0", own)
    assert not recorder_missed("cpu", own)
    assert not recorder_missed("cuda:0", empty)
    assert (recorder_off(own), recorder_off(empty), recorder_off({})) == (True, False, False)


# Mutants: each breaks one line, and the check that is meant to catch it fails.


def _allows_classes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(flight_records, "_PlainUnpickler", pickle.Unpickler)


def _takes_old_dumps_for_new(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(flight_dumps, "read_record", lambda paths, rank, fresh: read_record(paths, rank))


def _mixes_groups(patch: pytest.MonkeyPatch) -> None:
    inner = flight_records._collective
    patch.setattr(flight_records, "_collective", lambda one: replace(inner(one), group="0"))


def _never_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(collective_mismatch, "_find_late", lambda calls, known: [])


def _trusts_every_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(collective_mismatch, "_ONE_SIDED", ("all_reduce",))


def check_that_a_lost_collective_is_missed() -> None:
    lost = dump(entry(1, transport="gloo", retired=True), entry(2, transport="gloo", retired=True))
    assert "Rank 1 has not called all_reduce #2" in told(lost, dump(entry(1, transport="gloo", retired=True)))


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[Path], None]]] = [
    (_allows_classes, check_that_no_code_is_run),
    (_takes_old_dumps_for_new, check_that_old_records_accuse_nobody),
    (_mixes_groups, lambda _: test_groups_are_counted_apart()),
    (_never_late, lambda _: test_a_rank_that_is_behind_is_named_with_what_it_misses()),
    (_trusts_every_end, lambda _: check_that_a_lost_collective_is_missed()),
]


@pytest.mark.parametrize(("break_it", "check"), MUTANTS, ids=[mutant.__name__ for mutant, _ in MUTANTS])
def test_a_mutant_is_caught(
    break_it: Callable[[pytest.MonkeyPatch], None],
    check: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "sound").mkdir()
    (tmp_path / "broken").mkdir()
    check(tmp_path / "sound")
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        check(tmp_path / "broken")
