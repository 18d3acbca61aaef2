"""A fork server for the ranks that this process starts: a host imports the framework once.

The command line begins it while the script still builds its model. Later calls of `fit`, trials of a tuner
and restarts of an elastic run find it ready.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed.communication.environment import detect
from distributed.config import DistributedConfig
from distributed.interfaces.backend_spec import BackendSpec
from distributed.launch.fork_server import ForkServer
from distributed.launch.forked import ADDRESS, search_path

__all__ = ["WarmServer", "begin_early", "preload_of", "shared_env", "warm_server"]

logger = logging.getLogger("distributed")

_RANK = ("torch", "torch._dynamo", "torch.distributed", "torch.utils.serialization")
_OWN = ("distributed.launch.rank_process", "distributed.training.loop")


@dataclass(frozen=True)
class WarmServer:
    """A fork server of this process.

    Attributes:
        address: path of its socket.
        requested: whether `launch_start` requests it, so that a fresh process in its place is reported.
    """

    address: str
    requested: bool

    def report_refusal(self, reason: str, permanent: bool) -> None:
        """Log why a rank is started as a fresh process instead, and do not ask this server again.

        Args:
            permanent: whether another server would refuse, too; otherwise the next run begins one.
        """
        level = logging.WARNING if self.requested else logging.DEBUG
        logger.log(level, "a rank is started as a fresh process: %s", reason)
        if _running is not None and _running.server.address == self.address:
            _running.refuses, _running.stale = permanent, True


@dataclass
class _Running:
    """The server of this process.

    Attributes:
        owner: the process that began it; a fork of that process has none.
        stale: it has refused a rank.
        refuses: another one would, too.
    """

    server: ForkServer
    owner: int
    stale: bool = False
    refuses: bool = False


_running: _Running | None = None


def preload_of(spec: BackendSpec) -> list[str]:
    """The modules of the backend itself, which import their framework in the way in which ranks need it."""
    return [target.partition(":")[0] for target in (spec.target, spec.objects)]


def shared_env(local_size: int, env: Mapping[str, str]) -> dict[str, str]:
    """The part of the ranks' environment that is the same on all `local_size` ranks of this host: this
    process's and `env`. Unless they set ``OMP_NUM_THREADS``, a rank has an equal share of the processors."""
    both = {**os.environ, **env}
    if not both.get("OMP_NUM_THREADS"):  # empty is unset, and to OpenMP all processors
        both["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // local_size))
    return both


def begin_early(config: DistributedConfig, spec: BackendSpec, script: Path) -> None:
    """Begin the server before `script` is run, if it is known that its ranks will be forks.

    Args:
        config: what the command line sets; the script may set more.
        spec: of the backend.
        script: its folder is the first entry of the ranks' `sys.path`.
    """
    on_cpu = config.device == "cpu" or not Path("/dev/nvidiactl").exists()
    ranks = config.num_ranks or 1
    starts = config.launch == "spawn" or (config.launch == "auto" and detect(os.environ) is None)
    if ranks == 1 or spec.remote or not starts or not _wanted(config, on_cpu):
        return
    env = shared_env(ranks // config.num_nodes, {})
    _begin(env, preload_of(spec), [str(script.parent), *sys.path[1:]])


def warm_server(
    config: DistributedConfig, spec: BackendSpec, on_cpu: bool, env: Mapping[str, str]
) -> WarmServer | None:
    """The server that forks the ranks of `config`; begun if none is running.

    Args:
        spec: of the backend.
        on_cpu: whether the ranks train on CPU.
        env: environment of the ranks, for a server that has to be begun.

    Returns:
        None where the ranks are to be fresh processes.
    """
    if not _wanted(config, on_cpu):
        return None
    running = _begin(env, preload_of(spec), sys.path)
    return None if running.refuses else WarmServer(running.server.address, config.launch_start == "warm")


def _wanted(config: DistributedConfig, on_cpu: bool) -> bool:
    if ADDRESS in os.environ:  # of a server that this process did not begin
        return False
    return config.launch_start == "warm" or (config.launch_start == "auto" and on_cpu)


def _begin(env: Mapping[str, str], modules: Sequence[str], entries: Sequence[str]) -> _Running:
    """The server of this process. One that has refused a rank is replaced, if that can help."""
    global _running
    if _running is not None and _running.owner == os.getpid():
        if not _running.stale or _running.refuses:
            return _running
        _end(_running)
    server = ForkServer([*_RANK, *_OWN, *modules], env, search_path(entries))
    _running = _Running(server, os.getpid())
    atexit.register(_end, _running)
    return _running


def _end(running: _Running) -> None:
    if running.owner == os.getpid():
        running.server.close()
