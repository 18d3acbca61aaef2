"""One run at a time writes into a directory: who holds its lease, and when another takes it over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.filesystem import FileLayer
from distributed.checkpoint.lease import Lease
from distributed.checkpoint.object_store import located
from distributed.errors import UserError
from tests.campaigns.thread_ranks import Meeting, SliceRank, holds_step, save
from tests.support import commands


@pytest.fixture(params=["disk", "store", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[FileLayer, str]:
    """A directory, and what reads and writes there."""
    if request.param == "disk":
        return located(str(tmp_path))
    root = "memory://" if request.param == "store" else f"{request.getfixturevalue('bucket')}/"
    return located(f"{root}lease-{uuid.uuid4().hex}")


@pytest.fixture(autouse=True)
def _no_lease_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A lease that a test leaves as a killed run does would be renewed until the process ends."""
    made: list[Lease] = []
    begin = Lease.__init__

    def remember(lease: Lease, *args: Any, **given: Any) -> None:
        begin(lease, *args, **given)
        made.append(lease)

    monkeypatch.setattr(Lease, "__init__", remember)
    yield
    for lease in made:
        lease._released.set()
        if lease._beat is not None:
            lease._beat.join(timeout=60)
            assert not lease._beat.is_alive()


def claims(place: tuple[FileLayer, str]) -> list[str]:
    files, directory = place
    return sorted(name for name in files.names(directory) if name.startswith(".lease"))


def refused(place: tuple[FileLayer, str]) -> str:
    with pytest.raises(UserError) as error:
        Lease(*place).acquire()
    return str(error.value)


class OtherHost(Lease):
    """What a process of another host would write."""

    def __init__(self, files: FileLayer, directory: str, timeout: float = 0.6) -> None:
        super().__init__(files, directory, timeout)
        self._owner = replace(self._owner, host="node7", boot="another", pid=4242)

    def crash(self) -> None:
        """End without releasing."""
        assert self._beat is not None
        self._released.set()
        self._beat.join()


class EndedProcess(Lease):
    """What a process of this host wrote that has ended since."""

    def __init__(self, files: FileLayer, directory: str) -> None:
        super().__init__(files, directory)
        # This pid, as another process had it.
        self._owner = replace(self._owner, started="1")


def leave(kind: Callable[..., Any], place: tuple[FileLayer, str]) -> Any:
    """A lease that is held and never released."""
    lease = kind(*place)
    lease.acquire()
    lease._released.set()
    return lease


def test_a_held_lease_is_refused_with_its_owner_and_a_released_one_leaves_nothing(
    place: tuple[FileLayer, str],
) -> None:
    lease = Lease(*place)
    lease.acquire()
    assert lease.attempt()
    message = refused(place)
    assert f"another run is writing there: pid {os.getpid()} on {os.uname().nodename}, since 20" in message
    assert f"Got '{place[1]}'" in message
    assert "End that run, or choose another directory" in message
    lease.check()
    lease.release()
    assert claims(place) == []
    Lease(*place).acquire()


def test_a_process_of_this_host_that_has_ended_is_followed_at_once(place: tuple[FileLayer, str]) -> None:
    lost = leave(EndedProcess, place)
    lease = Lease(*place)
    assert lease.attempt()
    assert claims(place) == [".lease-00000002"]
    with pytest.raises(UserError, match=r"lost its lease.*60 s without a heartbeat"):
        lost.check()
    lease.check()


def test_another_host_is_waited_for_until_it_releases_or_its_heartbeat_stops(
    place: tuple[FileLayer, str], caplog: pytest.LogCaptureFixture
) -> None:
    gone = OtherHost(*place)
    gone.acquire()
    message = refused(place)  # its heartbeat went on
    assert "pid 4242 on node7" in message
    assert "waiting up to 0.6 s" in caplog.text
    gone.crash()
    lease = Lease(*place, timeout=0.6)
    assert not lease.attempt()
    lease.acquire()
    assert "from pid 4242 on node7, since 20" in caplog.text
    assert "no heartbeat for 0.6 s" in caplog.text
    lease.release()
    busy, after = OtherHost(*place, timeout=60.0), Lease(*place)
    busy.acquire()
    assert not after.attempt()
    busy.release()
    assert after.attempt()
    after.release()


def test_an_unreadable_claim_counts_as_that_of_another_host(place: tuple[FileLayer, str]) -> None:
    files, directory = place
    files.make_directories(directory)
    files.write_file(os.path.join(directory, ".lease-00000004"), b"torn")
    lease = Lease(*place, timeout=0.3)
    assert not lease.attempt()
    lease.acquire()
    assert claims(place) == [".lease-00000005"]


def test_ranks_of_a_run_whose_launcher_holds_the_lease_share_it(place: tuple[FileLayer, str]) -> None:
    launcher = Lease(*place)
    launcher.acquire()
    rank = Lease(*place, run=launcher.run)
    assert rank.attempt()
    rank.check()
    rank.release()
    launcher.check()
    launcher.release()
    rank.run, files = "other", place[0]
    files.make_directories(place[1])
    Lease(*place).acquire()
    with pytest.raises(UserError, match="lost its lease"):
        rank.check()


def interleaved(kind: type[FileLayer], *args: Any) -> tuple[Any, list[Callable[[], object]]]:
    """A layer, and what it calls before the next claims are made, one each."""
    before: list[Callable[[], object]] = []

    class Interleaved(kind):  # type: ignore[misc, valid-type]
        def create(self, path: str, data: bytes, staging: str) -> None:
            if before:
                before.pop(0)()
            super().create(path, data, staging)

    return Interleaved(*args), before


def test_of_two_starts_at_once_one_wins_whatever_the_order(place: tuple[FileLayer, str]) -> None:
    files, directory = place
    store = [fsspec.url_to_fs(directory)[0]] if "://" in directory else []
    slow, before = interleaved(type(files), *store)

    # Both have seen no claim.
    first, second = Lease(slow, directory), Lease(files, directory)
    before.append(lambda: second.attempt() or pytest.fail("the faster one acquires it"))
    assert not first.attempt()
    second.check()
    second.release()

    # Both have seen the same void claim; when the slow one makes its own, the fast one has come and gone,
    # and a third run has begun with a number that is free again.
    leave(EndedProcess, place)
    leave(EndedProcess, place)
    first, second, third = Lease(slow, directory), Lease(files, directory), Lease(files, directory)

    def others() -> None:
        second.acquire()
        second.release()
        third.acquire()

    before.append(others)
    assert not first.attempt()
    third.check()
    assert claims(place) == [".lease-00000001"]
    third.release()
    assert first.attempt()


STRESS = """
import os, sys
from distributed.checkpoint.lease import Lease
from distributed.checkpoint.filesystem import FileLayer
from distributed.errors import UserError

directory, rounds, crashes = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "crash"
sys.stdin.readline()
done = 0
while done < rounds:
    lease = Lease(FileLayer(), directory)
    try:
        lease.acquire()
    except UserError:
        continue
    inside = os.open(os.path.join(directory, "inside"), os.O_CREAT | os.O_EXCL)
    os.unlink(os.path.join(directory, "inside"))
    lease.check()
    done += 1
    if crashes and done == rounds:
        os.kill(os.getpid(), 9)
    lease.release()
print("done", done)
"""


@pytest.mark.starts_processes
def test_processes_that_start_at_once_hold_it_one_after_another(tmp_path: Path) -> None:
    """Half of them end by SIGKILL while they hold it."""
    leave(EndedProcess, located(str(tmp_path)))
    started = [
        commands.start(
            [sys.executable, "-c", STRESS, str(tmp_path), "6", how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            fresh=True,  # it imports no framework
        )
        for how in ("crash", "end", "crash", "end")
    ]
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process, code in zip(started, (-signal.SIGKILL, 0, -signal.SIGKILL, 0), strict=True):
        out, errors = process.communicate(timeout=200)
        assert process.returncode == code, errors
        assert (out == "done 6\n") == (code == 0)
    lease = Lease(*located(str(tmp_path)))
    assert lease.attempt()
    lease.release()
    assert [name for name in os.listdir(tmp_path) if not name.startswith(".tmp-lease")] == []


# -- what it protects ----------------------------------------------------------------------------------


def owned(place: tuple[FileLayer, str], timeout: float = 60.0) -> PortableCheckpointer:
    store = PortableCheckpointer(place[1], keep_last=1)
    store.acquire(SliceRank(0, Meeting(1), 0), timeout)
    return store


def test_a_run_that_has_lost_the_lease_writes_nothing_more(place: tuple[FileLayer, str]) -> None:
    """As one that was suspended for longer than the timeout, on a host that others cannot see."""
    store = owned(place)
    rank, lineage = SliceRank(0, Meeting(1), 3), {"lineage": "same"}
    store.save(rank, {"progress": {"step": 3}, **lineage}, {})
    pending = store.begin(SliceRank(0, Meeting(1), 4), {"progress": {"step": 4}, **lineage}, {})
    assert not isinstance(pending, str)
    store.finish(rank, pending)
    assert store.lease is not None
    store.lease._owner = replace(store.lease._owner, boot="another")
    for name in claims(place):
        place[0].remove(os.path.join(place[1], name))
    other = owned(place)
    save(place[1], 5, **lineage)
    for action in (
        lambda: store.save(SliceRank(0, Meeting(1), 6), {"progress": {"step": 6}, **lineage}, {}),
        lambda: store.mark_best(store.path_of(4)),
        lambda: store.set_aside("same", 3),
    ):
        with pytest.raises(UserError, match="lost its lease"):
            action()
    store.release()
    assert store.steps() == [5, 4]
    assert holds_step(store.path_of(5), 5)
    assert store.best() is None
    other.release()


def test_a_directory_that_was_emptied_during_the_run_is_owned_again(place: tuple[FileLayer, str]) -> None:
    files, directory = place
    store = owned(place)
    assert store.lease is not None
    files.remove(directory)
    store.save(SliceRank(0, Meeting(1), 3), {"progress": {"step": 3}}, {})
    assert claims(place) == [".lease-00000001"]
    store.release()
    assert claims(place) == []
