"""Where ranks meet: who waits for whom, what is said meanwhile, and what is refused."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distributed import UserError
from distributed.communication import rendezvous
from distributed.communication.environment import detect
from distributed.communication.rendezvous import Rendezvous, arrive, await_ranks, listen, open_store
from tests.communication.test_joined import TORCHRUN
from tests.support import commands
from tests.support.ports import free_port


def test_the_waiting_names_the_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributed.communication.rendezvous._REMIND", 0.05)
    store = dist.HashStore()
    arrive(store, 2, 4)
    with pytest.raises(UserError, match=r"ranks 1, 3 of 4 did not join within \d+ s"):
        await_ranks(store, 0, 4, 0.2)
    assert "waiting for ranks 1, 3 of 4" in capsys.readouterr().out
    late = threading.Thread(target=lambda: [arrive(store, rank, 4) for rank in (3, 1)])
    late.start()
    await_ranks(store, 0, 4, 60.0)
    late.join()


class CountedStore(dist.Store):
    """A store that counts its operations."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store, self.calls = store, 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("set", "add", "wait", "check", "get"):
            self.calls += 1
            return getattr(self.store, name)
        return super().__getattribute__(name)


def test_the_last_rank_joins_by_as_many_operations_as_there_are_for_any_number_of_ranks() -> None:
    operations = set()
    for size in (2, 16, 300):
        shared = dist.HashStore()
        for rank in range(1, size):
            arrive(shared, rank, size)
        store = CountedStore(shared)
        await_ranks(store, 0, size, 60.0)
        operations.add(store.calls)
    assert operations == {5}


def test_a_rank_that_joins_twice_does_not_stand_for_another_one() -> None:
    store = dist.HashStore()
    for rank in (1, 1, 1):
        arrive(store, rank, 3)
    with pytest.raises(UserError, match="ranks 2 of 3 did not join"):
        await_ranks(store, 0, 3, 0.1)


def test_of_many_missing_ranks_some_are_named() -> None:
    with pytest.raises(UserError, match=r"ranks 1, 2, .*, 64 and 135 more of 200 did not join"):
        await_ranks(dist.HashStore(), 0, 200, 0.05)


def test_a_rank_without_a_rendezvous_says_where_it_waits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributed.communication.rendezvous._REMIND", 0.05)
    joined = detect({**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
    assert joined is not None
    with pytest.raises(
        UserError, match=f"MASTER_ADDR: rank 1 cannot reach .*{joined.master_port}.*Check that rank 0"
    ):
        open_store(joined, 1, 4, timedelta(seconds=0.4))
    assert (
        f"rank 1 is waiting for the rendezvous at 127.0.0.1:{joined.master_port}" in capsys.readouterr().out
    )


def test_a_store_named_by_loopback_listens_there_alone() -> None:
    for host in ("127.0.0.1", "localhost"):
        with Rendezvous(host, 0, 1) as meeting:
            client = dist.TCPStore("127.0.0.1", meeting.port, is_master=False, timeout=timedelta(seconds=5))
            client.set("key", "value")
            assert meeting.store.get("key") == b"value"
            outward = Path("/proc/net/tcp").read_text()
            assert f"00000000:{meeting.port:04X}" not in outward
            assert f"0100007F:{meeting.port:04X}" in outward


def test_a_run_that_does_not_leave_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a rank that comes again before all were there wait: nobody has called on it yet."""
    monkeypatch.setattr("distributed.communication.rendezvous._meetings", repeat(0))
    monkeypatch.setattr("distributed.communication.rendezvous._stores", {})
    with Rendezvous("127.0.0.1", 0, 2) as meeting:
        place = {**TORCHRUN, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting.port)}
        joined = detect(place)
        first = open_store(joined, 1, 2, timedelta(seconds=5))
        with pytest.raises(UserError, match="ranks 0 of 2 did not join"):
            await_ranks(first, 1, 2, 0.1)
        again = open_store(joined, 1, 2, timedelta(seconds=5))
        arrive(again, 0, 2)
        await_ranks(again, 1, 2, 5.0)
        with pytest.raises(
            UserError, match=f"MASTER_ADDR: rank 1: the rendezvous address is still held.*{meeting.port}"
        ):
            open_store(joined, 1, 2, timedelta(seconds=0.3))
        assert "rank 1 is waiting for an earlier run to release 127.0.0.1" in capsys.readouterr().out
        # torch's agents let ranks meet again in one store.
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        open_store(joined, 1, 2, timedelta(seconds=5))


@pytest.fixture
def first_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    """Ends a run whose ranks have all joined, if it is closed."""
    monkeypatch.setattr(rendezvous, "_meetings", repeat(0))
    monkeypatch.setattr(rendezvous, "_stores", {})
    with ExitStack() as stack:
        meeting = stack.enter_context(Rendezvous("127.0.0.1", 0, 2))
        monkeypatch.setenv("MASTER_PORT", str(meeting.port))
        for rank in (0, 1):
            arrive(dist.PrefixStore("distributed/0/0", meeting.store), rank, 2)
        yield stack


def open_as_rank_1() -> dist.Store:
    """Rank 1 of the next run at the same address."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ["MASTER_PORT"]}
    return open_store(detect({**TORCHRUN, **place}), 1, 2, timedelta(seconds=60))


def next_run() -> Rendezvous:
    """The rendezvous of the next run."""
    return Rendezvous("127.0.0.1", int(os.environ["MASTER_PORT"]), 2)


def test_the_wait_for_an_earlier_run_takes_no_further_clients(
    first_run: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch asks the name server for the name of every client's address."""
    clients: list[bool] = []
    reminders: queue.SimpleQueue[str] = queue.SimpleQueue()

    class Counted(dist.TCPStore):
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **given)
            clients.append(not given["is_master"])

    monkeypatch.setattr(dist, "TCPStore", Counted)
    monkeypatch.setattr(rendezvous, "_REMIND", 0.05)
    monkeypatch.setattr(rendezvous, "print_line", lambda text, stream: reminders.put(text))
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(open_as_rank_1)
        waits = [reminders.get(timeout=60) for _ in range(10)]
        assert all("rank 1 is waiting for an earlier run to release" in text for text in waits)
        assert sum(clients) == 2, "one finds the earlier run, the other begins the wait for its end"
        first_run.close()
        with next_run() as second:
            opened.result(timeout=60).set("of", "rank 1")
            assert dist.PrefixStore("distributed/0/0", second.store).get("of") == b"rank 1"


def test_an_earlier_run_that_ends_as_the_wait_begins_is_not_waited_for(
    first_run: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run serves that address before the rank waits for the first one's end."""
    found, look = [], rendezvous._is_of_earlier_run

    def end_first_run_after_look(store: dist.Store) -> bool:
        found.append(look(store))
        if len(found) == 2:
            del store
            first_run.close()
            first_run.enter_context(next_run())
        return found[-1]

    monkeypatch.setattr(rendezvous, "_is_of_earlier_run", end_first_run_after_look)
    open_as_rank_1()
    assert found == [True, True, False]


def test_node_0_on_another_host_than_the_address_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed.communication.rendezvous._REMIND", 0.1)
    monkeypatch.setattr("distributed.communication.rendezvous._PATIENCE", 0.3)
    meeting = Rendezvous("203.0.113.1", 0, 2)  # an address for documents
    with pytest.raises(UserError, match=r"rdzv_endpoint: not the address of this host.*Start node rank 0 on"):
        meeting.__enter__()
    listen("127.0.0.1", meeting.port).close()


# Two runs, one after the other; the first one's rank 0 has something left to do when it ends.
TWICE = """
import atexit, json, os, time
import torch
from torch import nn
from distributed import Callback, Trainer

def upload():
    while not os.path.exists("uploaded"):
        time.sleep(0.05)

class Upload(Callback):
    def on_run_start(self, context):
        atexit.register(upload)

data = torch.ones(8, 4), torch.zeros(8, dtype=torch.long)
options = json.loads(os.environ["OPTIONS"])
for callbacks in ([Upload()], []):
    trainer = Trainer(nn.Linear(4, 2), batch_size=2, device="cpu", callbacks=callbacks, **options)
    print("TRAINED", trainer.fit(data, epochs=1).world_size, flush=True)
"""


@pytest.mark.starts_processes
def test_a_second_run_waits_for_the_first_one_to_leave(tmp_path: Path) -> None:
    """On node 1 the first is over while node 0 still serves its store."""
    (tmp_path / "twice.py").write_text(TWICE)
    shared: dict[str, Any] = {"num_gpus": 2, "num_nodes": 2, "collective_timeout": 20}
    shared["rdzv_endpoint"] = f"127.0.0.1:{free_port()}"
    nodes = [
        commands.start(
            [sys.executable, "twice.py"],
            env={**os.environ, "OPTIONS": json.dumps({**shared, "node_rank": node})},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for node in (0, 1)
    ]
    try:
        assert nodes[1].stdout is not None
        until = f"rank 1 is waiting for an earlier run to release {shared['rdzv_endpoint']}"
        heard = []
        while (line := nodes[1].stdout.readline()) and until not in line:
            heard.append(line)
        assert until in line, "".join(heard)
        (tmp_path / "uploaded").touch()
        outputs = commands.finish(nodes, timeout=120)
        assert outputs[1][0].count("TRAINED 2") == 1
    finally:
        (tmp_path / "uploaded").touch()
        for node in nodes:
            node.kill()


@pytest.mark.parametrize("where", ["rdzv_endpoint", "MASTER_PORT"])
def test_a_port_in_use(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import nn

    from distributed import Trainer

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        given: dict[str, Any] = {}
        if where == "rdzv_endpoint":
            given = {"num_gpus": 2, "num_nodes": 2, "node_rank": 0, "rdzv_endpoint": f"127.0.0.1:{port}"}
        else:
            env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            for name, value in env.items():
                monkeypatch.setenv(name, value)
        with pytest.raises(
            UserError, match=f"{where}: .*[Aa]ddress already in use.*{port}.*Choose another"
        ) as caught:
            Trainer(nn.Linear(1, 1), device="cpu", batch_size=1, **given).fit([(0, 0), (1, 1)])
        assert caught.value.field == where
