"""Elastic membership, delegated to torch's elastic rendezvous."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from distributed.checkpoint.lease import Lease
from distributed.checkpoint.run_directory import claim_directory
from distributed.communication.rendezvous import connect, listen, serve
from distributed.errors import UserError, WorkerError
from distributed.interfaces.plan import RunPlan
from distributed.resilience.elastic import HostSlot, Membership, served
from distributed.system.addresses import address_among, is_own_address
from distributed.system.output import print_line

_LEASE = "lease"
"""Key of the run that holds the lease on ``checkpoint_dir``."""
_LOOK = 0.5
"""Seconds between checks for another host."""
_ALIVE = 2
"""Seconds between a host's heartbeats; after three missed ones it is lost. On a busy host a heartbeat may
be a second late."""
_FAREWELL = timedelta(seconds=60)
_ANSWER = timedelta(seconds=60)
"""Timeout of the store, which responds at once unless its host is lost."""


class ElasticHosts(Membership):
    """This host among those of the rendezvous at ``rdzv_endpoint``.

    The first process on the host of that address serves the rendezvous; when it ends, the run ends.

    Args:
        plan: plan for the largest number of hosts.
        endpoint: host and port of the rendezvous.

    Attributes:
        serves: whether this host serves the rendezvous, and holds the lease on ``checkpoint_dir``.
        run_id: names the lease, for the ranks of all hosts.

    Raises:
        UserError: the endpoint does not respond, or another run writes into ``checkpoint_dir``.
    """

    has_others = True

    def __init__(self, plan: RunPlan, endpoint: tuple[str, int]) -> None:
        self.plan, self.endpoint = plan, endpoint
        # torch's own store for the ranks would listen on all interfaces, and its peers' addresses go stale.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._store, self._lease = _open_rendezvous(plan, *endpoint)
        self.serves = self._lease is not None
        try:
            if self._lease is not None:
                self._store.set(_LEASE, self._lease.run)
            self.run_id = self._store.get(_LEASE).decode()
        except dist.DistError as error:
            raise self._rendezvous_lost(error) from None
        section, self._patience = plan.config.elastic, timedelta(seconds=plan.config.collective_timeout)
        self.min_nodes = plan.counts[-1] // plan.local_size
        self._handler = DynamicRendezvousHandler.from_backend(
            run_id="distributed",
            store=self._store,
            backend=C10dRendezvousBackend(self._store, "distributed"),
            min_nodes=self.min_nodes,
            max_nodes=plan.num_nodes,
            local_addr=address_among(*endpoint),
            timeout=RendezvousTimeout(self._patience, timedelta(seconds=section.last_call)),
            keep_alive_interval=_ALIVE,
        )
        self._round: Any = None
        self._num_nodes = 0

    def meet(self) -> HostSlot:
        """Wait for the hosts of the next round.

        Raises:
            UserError: too few hosts joined.
            WorkerError: the host that serves the rendezvous is lost.
            SystemExit: the run was over before this host could take part.
        """
        reminder = threading.Timer(10.0, self._remind)
        reminder.daemon = True
        reminder.start()
        try:
            self._round = self._handler.next_rendezvous()
        except (RendezvousClosedError, RendezvousGracefulExitError):
            raise _late_exit() from None
        except RendezvousTimeoutError:
            raise UserError(
                f"fewer than {self.min_nodes} hosts joined within {self._patience.total_seconds():g} s",
                field="elastic.min_ranks",
                got=self.plan.counts[-1],
                remedy="Start the same command on more hosts, or allow fewer ranks",
            ) from None
        except (RendezvousConnectionError, RendezvousStateError, dist.DistError) as error:
            raise self._rendezvous_lost(error) from None
        finally:
            reminder.cancel()
        here = self._round.world_size * self.plan.local_size
        # The largest number that keeps the global batch.
        size = next(count for count in self.plan.counts if count <= here)
        self._num_nodes = size // self.plan.local_size
        return HostSlot(self._round.rank, self._num_nodes, self.plan.local_size)

    @contextmanager
    def store(self, size: int) -> Iterator[tuple[str, int]]:
        """Serve the store of the round's ranks on its first host, and publish the address to the others."""
        key, shared = "ranks", self._round.store
        try:
            if self._round.rank == 0:
                with served(address_among(*self.endpoint), size) as (host, port):
                    shared.set(key, f"{host}:{port}")
                    yield host, port
            else:
                host, _, number = shared.get(key).decode().rpartition(":")
                yield host, int(number)
        except dist.DistError as error:
            raise self._rendezvous_lost(error) from None

    @contextmanager
    def watch(self, newcomer: Callable[[], None]) -> Iterator[None]:
        """Check for another host twice a second while the ranks run."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(_LOOK):
                with suppress(RendezvousConnectionError, RendezvousStateError, dist.DistError):
                    if self._handler.num_nodes_waiting() > 0:
                        newcomer()
                        return

        thread = threading.Thread(target=look, name="membership", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def stand_by(self) -> None:
        """Return when the others leave this round, or another host joins.

        Raises:
            WorkerError: the host that serves the rendezvous is lost.
            SystemExit: the run has ended.
        """
        print_line(
            f"this host is on standby: global batch {self.plan.batch.global_batch_size} is not divisible by"
            f" {self._round.world_size * self.plan.local_size} ranks",
            sys.stdout,
        )
        try:
            while self._handler.num_nodes_waiting() == 0:
                with suppress(dist.DistStoreError):
                    self._round.store.wait(["all done"], timedelta(seconds=_LOOK))
                    self.finish_serving()
                    raise _late_exit()
        except (RendezvousConnectionError, RendezvousStateError, dist.DistError) as error:
            raise self._rendezvous_lost(error) from None

    def finish(self) -> None:
        """Report the end to the others; the host that serves the rendezvous leaves last."""
        with suppress(dist.DistError):
            store, number = self._round.store, self._num_nodes
            if store.add("done", 1) == number:
                store.set("all done", "1")
            if self.serves:
                store.wait(["all done"], _FAREWELL)
            self.finish_serving()

    def finish_serving(self) -> None:
        """Close the rendezvous to late hosts, on the host that serves it."""
        if self.serves:
            self._handler.shutdown()

    def release(self) -> None:
        """Release the lease: this host no longer takes part."""
        if self._lease is not None:
            self._lease.release()

    def _remind(self) -> None:
        text = f"waiting for hosts: at least {self.min_nodes} must join at {self._name()}"
        print_line(text, sys.stdout)

    def _name(self) -> str:
        return f"{self.endpoint[0]}:{self.endpoint[1]}"

    def _rendezvous_lost(self, error: Exception) -> WorkerError:
        return WorkerError(
            f"lost the host that serves the rendezvous at {self._name()} ({type(error).__name__});"
            " run the same command with --resume",
            rank=-1,
            host=socket.gethostname(),
            exc_type=type(error).__name__,
        )


def _late_exit() -> SystemExit:
    print_line("the run finished without this host (it joined too late for the last round)", sys.stdout)
    return SystemExit(0)


def _open_rendezvous(plan: RunPlan, host: str, port: int) -> tuple[dist.Store, Lease | None]:
    """The rendezvous store; and the lease on the checkpoint directory, if this process serves the
    rendezvous. The server claims the directory before other hosts can join; they must not claim it."""
    if is_own_address(host):
        with suppress(OSError):  # another process of this host was first
            listener = listen(host, port)
            lease = claim_directory(plan)
            return serve(listener, host, 1, _ANSWER), lease
    store = connect(host, port, 1, timedelta(seconds=plan.config.collective_timeout))
    store.set_timeout(_ANSWER)
    return store, None
