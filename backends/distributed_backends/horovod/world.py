"""Start Horovod on the ranks of any launcher.

horovodrun serves Horovod's rendezvous and sets every rank's environment. Under every other
launcher, ours and torchrun among them, rank 0 serves it and publishes its address in the store of
the ranks' own rendezvous.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from threading import Thread
from typing import Any

import horovod.torch as hvd
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
from torch.distributed import Store

from distributed.communication.rendezvous import await_ranks, open_store
from distributed.config import DistributedConfig
from distributed.interfaces.placement import LauncherEnvironment
from distributed.system.addresses import loopback_interface
from distributed.system.processes import environment
from distributed_backends.horovod.collectives import barrier, broadcast_object
from distributed_backends.horovod.section import HorovodSection

_ours: dict[str, str] | None = None
"""The settings with which this module started Horovod; None when it did not."""


def start_horovod(place: LauncherEnvironment, config: DistributedConfig) -> Store:
    """Start Horovod on this rank unless it runs as wanted, and return the ranks' common store.

    Collective. It stays started until the process ends: the user may have started it, and may
    use it after `fit`.

    Args:
        config: time limit, and options that Horovod only reads when it starts.

    Raises:
        UserError: ranks are missing, or the store cannot be reached.
    """
    settings, timeout = _settings(config), timedelta(seconds=config.collective_timeout)
    if place.launcher == "horovodrun":
        if not _runs_as(settings):
            _start({}, settings, config)
        if place.num_nodes > 1:
            # Its variables name the host that serves the rendezvous, which rank 0 may not be on.
            host = broadcast_object(socket.gethostname(), 0, "distributed.host")
            place = replace(place, master_addr=host)
        return open_store(place, place.rank, place.size, timeout)
    store = open_store(place, place.rank, place.size, timeout)
    await_ranks(store, place.rank, place.size, config.collective_timeout)
    if not _runs_as(settings):
        with _rendezvous(place, store) as variables:
            _start(variables, settings, config)
    return store


def _settings(config: DistributedConfig) -> dict[str, str]:
    """Settings that Horovod reads at its start and this run depends on."""
    settings = {}
    if config.deterministic:
        # Tensor fusion groups gradients by timing, and the grouping decides the order of additions.
        settings["HOROVOD_FUSION_THRESHOLD"] = "0"
    if HorovodSection.of(config).timeline:
        settings["HOROVOD_TIMELINE"] = "DYNAMIC"
    return settings


def _runs_as(settings: Mapping[str, str]) -> bool:
    if not hvd.is_initialized():
        return False
    return _ours == settings if _ours is not None else settings.items() <= os.environ.items()


def _start(variables: Mapping[str, str], settings: dict[str, str], config: DistributedConfig) -> None:
    global _ours
    if hvd.is_initialized():
        hvd.shutdown()
    limit = math.ceil(config.collective_timeout)
    limits = {
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(limit),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(max(1, min(60, limit // 2))),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(max(2, limit)),
    }
    # Read once, at the start: later they would only mislead `joined.detect`.
    with environment({**limits, **os.environ, **variables, **settings}):
        hvd.init()
        barrier()
    _ours = settings


@contextmanager
def _rendezvous(place: LauncherEnvironment, store: Store) -> Iterator[dict[str, str]]:
    """Horovod's variables for this rank, while rank 0 serves what they point to."""
    server: Any = None
    alone = place.num_nodes == 1
    if place.rank == 0:
        server = RendezvousHTTPServer(("127.0.0.1" if alone else "", 0), RendezvousHandler, 0)
        server.init([_slot(place, rank) for rank in range(place.size)])
        thread = Thread(target=server.serve_forever, daemon=True, name="horovod-rendezvous")
        thread.start()
        store.set("horovod", str(server.server_port))
    here = _slot(place, place.rank)
    variables = {
        "HOROVOD_RANK": str(here.rank),
        "HOROVOD_SIZE": str(here.size),
        "HOROVOD_LOCAL_RANK": str(here.local_rank),
        "HOROVOD_LOCAL_SIZE": str(here.local_size),
        "HOROVOD_CROSS_RANK": str(here.cross_rank),
        "HOROVOD_CROSS_SIZE": str(here.cross_size),
        "HOROVOD_HOSTNAME": here.hostname,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1" if alone else place.master_addr,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": store.get("horovod").decode(),
    }
    if alone and "HOROVOD_GLOO_IFACE" not in os.environ:
        variables["HOROVOD_GLOO_IFACE"] = loopback_interface()
    try:
        yield variables
    finally:
        if server is not None:
            server.shutdown()
            server.server_close()
            thread.join()


def _slot(place: LauncherEnvironment, rank: int) -> Any:
    node, local = divmod(rank, place.local_size)
    # The name only distinguishes nodes; two may share a host.
    return SlotInfo(f"node{node}", rank, local, node, place.size, place.local_size, place.num_nodes)
