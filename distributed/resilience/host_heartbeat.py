"""Tells which host is gone: dead, stopped, or cut off by the network.

A connection over a cable that was pulled does not break: ranks wait in their collectives for minutes, and
none knows for whom. So the process that watches each host's ranks sends a sign of life every second to the
one on node 0, and gets one back. Who is silent for `host_timeout` seconds is lost, and everybody who can
still be reached is told the same name.

The ranks' store is used once, to tell where node 0 listens: its client may block for as long as the cable
is out, and a thread that blocks in it aborts a process that leaves the interpreter.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from distributed.errors import WorkerError
from distributed.system.addresses import is_loopback, own_addresses

__all__ = ["HostWatch", "LostHost"]

_BEAT = 1.0
"""Seconds between signs of life."""
_KEY = "host watch"


@dataclass(frozen=True)
class LostHost:
    """A host that is gone.

    Attributes:
        node: its number among the nodes.
        host: its name; empty when it was never heard.
        ranks: that it ran.
        how: what was seen, after its name.
    """

    node: int
    host: str
    ranks: tuple[int, ...]
    how: str

    def error(self) -> WorkerError:
        """The loss as the error that ends the run, or the round of an elastic one."""
        several = len(self.ranks) > 1
        names = f"rank{'s' if several else ''} {', '.join(map(str, self.ranks))}"
        return WorkerError(
            f"host {self.host} (node {self.node}, {names}) {self.how}. Try: see whether it runs and can be"
            " reached from the others (`preflight` tests every pair); `elastic` lets a run go on without it",
            rank=self.ranks[0] if self.ranks else -1,
            host=self.host,
            exc_type="HostLost",
        )


@dataclass
class _Peer:
    """What is known of another host."""

    node: int
    host: str
    ranks: tuple[int, ...]
    heard: float
    ended: bool = False


class HostWatch:
    """This host's part in watching the hosts of a run. Starts threads; `close` ends them.

    Args:
        place: host and port of the ranks' store.
        node: this host's number; node 0 is the one that all others report to.
        ranks: of this host.
        timeout: seconds of silence after which a host is lost; None never.
        run: what tells this run from others that use the same store.
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
        threading.Thread(target=self._serve if node == 0 else self._report, daemon=True).start()

    @property
    def lost(self) -> LostHost | None:
        """The first host found to be lost, here or by node 0."""
        if self._lost is None and self.timeout is not None:
            now = time.monotonic()
            silent = [p for p in list(self._peers.values()) if not p.ended and now - p.heard > self.timeout]
            if silent:
                peer = min(silent, key=lambda p: p.heard)
                how = f"has not been heard from for {now - peer.heard:.0f} s: it is down, or cut off"
                self._lose(peer, how)
        return self._lost

    def lost_within(self, seconds: float) -> LostHost | None:
        """`lost`, waited for: a rank sees a broken connection a moment before this does."""
        self._found.wait(seconds)
        return self.lost

    def look(self) -> None:
        """Call this about once a second.

        Raises:
            WorkerError: another host is lost; names it.
        """
        lost = self.lost
        if lost is not None:
            raise lost.error()

    def close(self) -> None:
        """Say farewell, so that nobody takes this host's end for a loss."""
        self._tell({"lost": asdict(self._lost) if self._lost else None, "end": True})
        self._closed.set()
        with self._lock:
            for line in self._lines:
                with suppress(OSError):  # a listener wakes; on a connection, what was said still arrives
                    line.shutdown(socket.SHUT_RDWR if line is self._listener else socket.SHUT_WR)
                line.close()

    def _lose(self, peer: _Peer, how: str) -> None:
        if self._lost is None and not self._closed.is_set():
            self._lost = LostHost(peer.node, peer.host, peer.ranks, how)
            self._found.set()
            self._tell({"lost": asdict(self._lost)})

    # -- node 0 ------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            # Several "hosts" that meet on loopback are one, and nobody else's business.
            alone = is_loopback(self._place[0])
            listener = socket.create_server(("127.0.0.1" if alone else "", 0), backlog=1024)
        except OSError:
            return  # this host cannot be watched, which is no reason to fail
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
            peer = _Peer(int(first["node"]), str(first["host"]), tuple(first["ranks"]), time.monotonic())
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
        self._tell(hello)
        with suppress(OSError, ValueError, KeyError, TypeError), line.makefile("rb") as messages:
            first = json.loads(messages.readline(4096))
            peer = _Peer(0, first["host"], tuple(first["ranks"]), time.monotonic())
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
        return None  # a firewall, perhaps: hosts are then not watched

    # -- both --------------------------------------------------------------------------

    def _store(self) -> Any:
        """A client of the ranks' store, once somebody serves it; None when this ends before."""
        import torch.distributed as dist  # slow, and none but several hosts need it

        while not self._closed.is_set():
            with suppress(OSError, RuntimeError):
                socket.create_connection(self._place, timeout=3.0).close()
                return dist.TCPStore(
                    *self._place, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10)
                )
            self._closed.wait(0.2)
        return None

    def _listen(self, peer: _Peer, messages: Any) -> None:
        """Take what `peer` says until it ends."""
        try:
            for text in messages:
                peer.heard = time.monotonic()
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
            self._lose(peer, "is gone: what watched its ranks has ended without a word")

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT):
            self._tell({"host": self._host, "ranks": self.ranks})

    def _tell(self, message: dict[str, Any]) -> None:
        text = json.dumps(message).encode() + b"\n"
        with self._lock:
            for line in self._lines:
                with suppress(OSError):
                    line.send(text, socket.MSG_DONTWAIT)  # a full buffer is a host that does not listen
