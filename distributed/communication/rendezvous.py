"""Rendezvous of the ranks: the store that one process serves, and connections to it."""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from itertools import count

import torch.distributed as dist

from distributed.errors import UserError, listed
from distributed.interfaces.placement import LauncherEnvironment
from distributed.system.addresses import is_loopback
from distributed.system.descriptors import allow_descriptors
from distributed.system.output import print_line

_REMIND = 10.0
_SOON = timedelta(seconds=1)
_PATIENCE = 60.0
"""Seconds until an address must resolve to the serving host; a cluster's DNS names may appear late."""
_MET = "met"
"""Key that is set after all ranks have joined."""
_stores: dict[tuple[str, int], dist.Store] = {}
_meetings = count()


class Rendezvous:
    """The rendezvous store of the ranks. With a loopback address it listens on loopback only.

    Args:
        host: address of this host for the ranks.
        port: port number; 0 takes a free one.

    Raises:
        UserError: the port is in use; on entering, `host` is the address of another host.
    """

    def __init__(self, host: str, port: int, world_size: int) -> None:
        self.host, self.world_size = host, world_size
        try:
            self._socket = listen(host, port)
        except OSError as error:
            raise UserError(
                f"cannot listen for the rendezvous: {error.strerror}",
                field="rdzv_endpoint",
                got=f"{host}:{port}",
                remedy=f"Choose another port, or stop the run that uses it (ss -ltnp 'sport = {port}')",
            ) from None
        self.port: int = self._socket.getsockname()[1]

    def __enter__(self) -> Rendezvous:
        try:
            if not is_loopback(self.host):
                _await_server(self.host, self.port, "node 0", _PATIENCE)
            self.store = serve(self._socket, self.host, self.world_size, timedelta(seconds=_PATIENCE))
        except (OSError, dist.DistNetworkError) as error:
            self._socket.close()
            raise UserError(
                f"not the address of this host, {socket.gethostname()}, which is node 0: {error}",
                field="rdzv_endpoint",
                got=f"{self.host}:{self.port}",
                remedy="Start node rank 0 on the host of that address, or name this host in it on all nodes",
            ) from None
        return self

    def __exit__(self, *exc: object) -> None:
        del self.store


def listen(host: str, port: int) -> socket.socket:
    """A bound, listening socket; on loopback alone when `host` is loopback."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1" if is_loopback(host) else "", port))
    except OSError:
        listener.close()
        raise
    listener.listen(256)
    return listener


def serve(listener: socket.socket, host: str, size: int, timeout: timedelta) -> dist.TCPStore:
    """A store that this process serves on `listener`."""
    allow_descriptors(size)
    # The store takes over a bound socket, because it would bind to all interfaces itself.
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1" if is_loopback(host) else host,
        port,
        size,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def connect(host: str, port: int, size: int, timeout: timedelta, rank: int = 0) -> dist.TCPStore:
    """A client of the store at that address, after waiting for it.

    Raises:
        UserError: no store is served within `timeout`.
    """
    try:
        _await_server(host, port, f"rank {rank}", timeout.total_seconds())
    except OSError as error:
        raise _unreachable(host, port, rank, error) from None
    return dist.TCPStore(host, port, size, is_master=False, wait_for_workers=False, timeout=timeout)


def meeting_place(joined: LauncherEnvironment | None) -> tuple[str, int]:
    """Host and port of this rank's rendezvous."""
    if joined is not None:
        return joined.master_addr, joined.master_port
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def open_store(joined: LauncherEnvironment | None, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """The launcher's store, or one that rank 0 serves.

    Raises:
        UserError: the port is in use or does not respond, or an earlier run keeps using it.
    """
    place = meeting_place(joined)
    # A second fit must not read the first one's keys: gloo would connect to ended peers.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"distributed/{restart}/{next(_meetings)}"
    waiting = _Waiting(
        f"rank {rank} is waiting for an earlier run to release {place[0]}:{place[1]}", at_once=True
    )
    line: socket.socket | None = None
    while True:
        left = timeout - timedelta(seconds=waiting.seconds)
        with line or nullcontext():
            if place not in _stores:
                _stores[place] = _reach(*place, rank, size, max(left, _SOON))
            store = dist.PrefixStore(prefix, _stores[place])
            if not _is_of_earlier_run(store):
                return store
            del store, _stores[place]
            if left <= timedelta():
                raise _held(*place, rank)
            if line is not None:
                waiting.until_closed(line, left.total_seconds())
        line = _line_to_server(*place)


def _line_to_server(host: str, port: int) -> socket.socket | None:
    """A connection whose end tells that the server there has ended; None if there is no server.

    A store that is opened later has the same server, or the connection has ended. Looking at the store again
    and again would need a client for each look, and torch asks the name server for the name of each client's
    address: seconds where that answers late.
    """
    try:
        return socket.create_connection((host, port), timeout=_REMIND)
    except OSError:
        return None


def _is_of_earlier_run(store: dist.Store) -> bool:
    """Whether the store belongs to an earlier run, in which all ranks have already joined.

    The processes of a second run count their rendezvous from 0 again. torch's agents keep one store for
    all ranks that they start, and reuse it when a host joins or leaves.
    """
    ours = "DISTRIBUTED_RUN_DIR" in os.environ
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not ours:
        return False
    try:
        return bool(store.check([_MET]))
    except dist.DistError:
        return True  # the earlier run has ended


def _held(host: str, port: int, rank: int) -> UserError:
    return UserError(
        f"rank {rank}: the rendezvous address is still held by an earlier run",
        field="MASTER_ADDR",
        got=f"{host}:{port}",
        remedy=f"Stop that run on node 0 (ss -ltnp 'sport = {port}' names it), or choose another port",
    )


def _reach(host: str, port: int, rank: int, size: int, timeout: timedelta) -> dist.Store:
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        if rank == 0 and not served:
            return serve(listen(host, port), host, size, timeout)
        return connect(host, port, size, timeout, rank)
    except dist.DistNetworkError as error:
        raise _unreachable(host, port, rank, error) from None
    except OSError as error:
        raise UserError(
            f"cannot listen for the rendezvous: {error.strerror}",
            field="MASTER_PORT",
            got=port,
            remedy="Choose another port (torchrun --master-port), or stop the run that uses it",
        ) from None


def _await_server(host: str, port: int, who: str, timeout: float) -> None:
    """Return when a server listens there. Prints meanwhile that `who` is waiting; raises the OSError
    after `timeout` seconds. torch's own client waits silently and then prints its stack."""
    waiting = _Waiting(f"{who} is waiting for the rendezvous at {host}:{port}")
    while True:
        try:
            socket.create_connection((host, port), timeout=_REMIND).close()
            return
        except OSError:
            if waiting.seconds >= timeout:
                raise
            waiting.pause()


class _Waiting:
    """Prints a reminder at intervals while a process waits.

    Args:
        text: reminder without the time.
        at_once: whether to print at the first pause, not only after `_REMIND` seconds.
    """

    def __init__(self, text: str, at_once: bool = False) -> None:
        self.text, self._started = text, time.monotonic()
        self._printed = float("-inf") if at_once else 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the creation of this object."""
        return time.monotonic() - self._started

    def pause(self) -> None:
        """Wait a moment before the next try."""
        self._remind()
        time.sleep(0.1)

    def until_closed(self, line: socket.socket, timeout: float) -> None:
        """Return when the other end of `line` is closed, or after `timeout` seconds."""
        deadline = self.seconds + timeout
        while (left := deadline - self.seconds) > 0:
            self._remind()
            line.settimeout(min(_REMIND, left))
            try:
                line.recv(1)
            except TimeoutError:
                continue
            except OSError:
                pass  # reset: the server ended before it accepted the connection
            return

    def _remind(self) -> None:
        waited = self.seconds
        if waited - self._printed >= _REMIND:
            print_line(f"{self.text} ({waited:.0f} s)", sys.stdout)
            self._printed = waited


def _unreachable(host: str, port: int, rank: int, error: Exception) -> UserError:
    return UserError(
        f"rank {rank} cannot reach the rendezvous: {error}",
        field="MASTER_ADDR",
        got=f"{host}:{port}",
        remedy="Check that rank 0 runs there and that no firewall blocks the port",
    )


def arrive(store: dist.Store, rank: int, size: int) -> None:
    """Enter `rank` among those that have joined; the last of them ends the wait of all.

    A rank that joins again, after another one was missing, is counted once.
    """
    store.set(f"here/{rank}", socket.gethostname())
    if store.add(f"times/{rank}", 1) == 1 and store.add("number here", 1) == size:
        store.set(_MET, "1")


def await_ranks(store: dist.Store, rank: int, size: int, timeout: float) -> None:
    """Return when every rank has joined; rank 0 prints meanwhile which are missing.

    A rank asks the store for one key, however many ranks there are, unless some are late.

    Raises:
        UserError: after `timeout` seconds; names the missing ranks.
    """
    arrive(store, rank, size)
    started = time.monotonic()
    while True:
        try:
            store.wait([_MET], timedelta(seconds=min(_REMIND, timeout)))
            return
        except dist.DistStoreError:
            waited = time.monotonic() - started
            if rank and waited < timeout:
                continue
            absent = [r for r in range(size) if not store.check([f"here/{r}"])]
            names = listed(absent)
            if absent and waited >= timeout:
                raise UserError(
                    f"ranks {names} of {size} did not join within {waited:.0f} s",
                    field="collective_timeout",
                    got=timeout,
                    remedy="Check the output of these ranks for the cause, or start them",
                ) from None
            if absent:
                print_line(f"waiting for ranks {names} of {size} ({waited:.0f} s)", sys.stdout)
