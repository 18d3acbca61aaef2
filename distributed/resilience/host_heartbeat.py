"""Detect lost hosts by heartbeats: crashed, stopped, or disconnected from the network.

A connection over an unplugged cable does not break: ranks are blocked in their collectives for minutes
without naming the lost host. Therefore the process that monitors each host's ranks exchanges a heartbeat
with the one on node 0 every second. A host without a heartbeat for `host_timeout` seconds is lost, and all
reachable hosts get the same name. Time in which this process was suspended does not count.

The ranks' store is used once, to publish the address of node 0. Its client may block for as long as the
cable is out, and a thread that blocks in it aborts a process that leaves the interpreter.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from time import perf_counter
from typing import Any

from distributed.errors import WorkerError
from distributed.resilience.hang_diagnosis import name_ranks
from distributed.resilience.running_time import RunningTime
from distributed.system.addresses import is_loopback, own_addresses
from distributed.system.descriptors import allow_descriptors

_BEAT = 1.0
"""Seconds between heartbeats."""
_MANY = 1 << 15
"""Hosts that may connect to node 0."""
_KEY = "host watch"


@dataclass(frozen=True)
class LostHost:
    """A host that is lost.

    Attributes:
        host: host name; empty without any heartbeat.
        how: clause that follows the name in a message.
    """

    node: int
    host: str
    ranks: tuple[int, ...]
    how: str

    def error(self) -> WorkerError:
        """The loss as the error that ends the run, or the round of an elastic one."""
        return WorkerError(
            f"host {self.host} (node {self.node}, {name_ranks(self.ranks)}) {self.how}. Try: check that the"
            " host runs and can be reached from the others (`preflight` tests every pair); `elastic` runs"
            " continue without it",
            rank=self.ranks[0] if self.ranks else -1,
            host=self.host,
            exc_type="HostLost",
        )


@dataclass
class _Peer:
    node: int
    host: str
    ranks: tuple[int, ...]
    last_heartbeat: float
    ended: bool = False


class HostHeartbeat:
    """Exchanges heartbeats with the other hosts of a run. Starts threads; `close` ends them.

    Args:
        place: host and port of the ranks' store.
        node: number of this host; all others report to node 0.
        timeout: seconds without a heartbeat after which a host is lost; None disables.
        run: key of this run among those that use the same store.
    """

    def __init__(
        self, place: tuple[str, int], node: int, ranks: tuple[int, ...], timeout: float | None, run: str = ""
    ) -> None:
        self.node, self.ranks, self.timeout = node, ranks, timeout
        self._place, self._key = place, f"{_KEY} {run}"
        self._host = socket.gethostname()
        self._peers: dict[int, _Peer] = {}
        self._lost: LostHost | None = None
        self._closed, self._found = threading.Event(), threading.Event()
        self._lines: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._token = secrets.token_hex(16)
        self._time = RunningTime(_BEAT)
        threading.Thread(target=self._serve if node == 0 else self._report, daemon=True).start()

    @property
    def lost(self) -> LostHost | None:
        """The first host found to be lost, here or by node 0. Read it about once a second."""
        now = self._time.tick()
        if self._lost is None and self.timeout is not None:
            ages = {peer.node: self._time.between(peer.last_heartbeat, now) for peer in self._alive()}
            node = max(ages, key=ages.__getitem__, default=None)
            if node is not None and ages[node] > self.timeout:
                how = f"sent no heartbeat for {ages[node]:.0f} s: it is down or disconnected"
                self._lose(self._peers[node], how)
        return self._lost

    def _alive(self) -> list[_Peer]:
        return [peer for peer in list(self._peers.values()) if not peer.ended]

    def lost_within(self, seconds: float) -> LostHost | None:
        """`lost`, after waiting for it: a rank detects a broken connection a moment earlier."""
        self._found.wait(seconds)
        return self.lost

    def close(self) -> None:
        """Sign off, so that other hosts do not report this one as lost, and end the threads."""
        self._send({"lost": asdict(self._lost) if self._lost else None, "end": True})
        self._closed.set()
        with self._lock:
            for line in self._lines:
                with suppress(OSError):  # wakes a listener; on a connection, sent messages still arrive
                    line.shutdown(socket.SHUT_RDWR if line is self._listener else socket.SHUT_WR)
                line.close()

    def _lose(self, peer: _Peer, how: str) -> None:
        if self._lost is None and not self._closed.is_set():
            self._lost = LostHost(peer.node, peer.host, peer.ranks, how)
            self._found.set()
            self._send({"lost": asdict(self._lost)})

    # -- node 0 ------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            # Several "hosts" on loopback are one machine, so no other needs to connect.
            alone = is_loopback(self._place[0])
            allow_descriptors(_MANY)
            listener = socket.create_server(("127.0.0.1" if alone else "", 0), backlog=1024)
        except OSError:
            return  # this host is not monitored, which must not stop the run
        with self._lock:
            self._lines.append(listener)
            self._listener = listener
        threading.Thread(target=self._beat, daemon=True).start()
        addresses = ["127.0.0.1"] if alone else own_addresses()
        where = {"addresses": addresses, "port": listener.getsockname()[1], "token": self._token}
        store = self._store()
        if store is None:
            return
        store.set(self._key, json.dumps(where))
        while not self._closed.is_set():
            try:
                line, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._welcome, args=[line], daemon=True).start()

    def _welcome(self, line: socket.socket) -> None:
        line.settimeout(10.0)
        with suppress(OSError, ValueError, KeyError, TypeError), line.makefile("rb") as messages:
            first = json.loads(messages.readline(4096))
            if not hmac.compare_digest(str(first["token"]), self._token):
                line.close()
                return
            peer = _Peer(int(first["node"]), str(first["host"]), tuple(first["ranks"]), perf_counter())
            line.settimeout(None)
            with self._lock:
                self._lines.append(line)
            self._peers[peer.node] = peer
            self._listen(peer, messages)

    # -- the others --------------------------------------------------------------------

    def _report(self) -> None:
        store = self._store()
        where = self._find(store) if store is not None else None
        del store
        line = self._call(where) if where is not None else None
        if line is None or where is None:
            return
        with self._lock:
            self._lines.append(line)
        hello = {"token": where["token"], "node": self.node, "host": self._host, "ranks": self.ranks}
        self._send(hello)
        with suppress(OSError, ValueError, KeyError, TypeError), line.makefile("rb") as messages:
            first = json.loads(messages.readline(4096))
            peer = _Peer(0, first["host"], tuple(first["ranks"]), perf_counter())
            self._peers[0] = peer
            threading.Thread(target=self._beat, daemon=True).start()
            self._listen(peer, messages)

    def _find(self, store: Any) -> dict[str, Any] | None:
        with suppress(RuntimeError):  # the store may go with the run
            while not self._closed.wait(0.1):
                if store.check([self._key]):
                    found: dict[str, Any] = json.loads(store.get(self._key))
                    return found
        return None

    def _call(self, where: dict[str, Any]) -> socket.socket | None:
        for _ in range(30):
            for address in where["addresses"]:
                with suppress(OSError):
                    line = socket.create_connection((address, where["port"]), timeout=3.0)
                    line.settimeout(None)
                    return line
            if self._closed.wait(_BEAT):
                break
        return None  # perhaps a firewall: hosts are not monitored then

    # -- both --------------------------------------------------------------------------

    def _store(self) -> Any:
        """A client of the ranks' store, once it is served; None after `close`."""
        import torch.distributed as dist  # slow, and only needed with several hosts

        while not self._closed.is_set():
            with suppress(OSError, RuntimeError):
                socket.create_connection(self._place, timeout=3.0).close()
                return dist.TCPStore(
                    *self._place, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10)
                )
            self._closed.wait(0.2)
        return None

    def _listen(self, peer: _Peer, messages: Any) -> None:
        try:
            for text in messages:
                peer.last_heartbeat = perf_counter()
                message = json.loads(text)
                if message.get("lost") and self._lost is None:
                    found = message["lost"]
                    self._lost = LostHost(**{**found, "ranks": tuple(found["ranks"])})
                    self._found.set()
                if message.get("end"):
                    peer.ended = True
        except (OSError, ValueError):
            pass
        if not peer.ended:
            self._lose(peer, "is lost: its monitor process disconnected without signing off")

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT):
            self._send({"host": self._host, "ranks": self.ranks})

    def _send(self, message: dict[str, Any]) -> None:
        text = json.dumps(message).encode() + b"\n"
        with self._lock:
            for line in self._lines:
                with suppress(OSError):
                    line.send(text, socket.MSG_DONTWAIT)  # a full buffer means that the host does not read
