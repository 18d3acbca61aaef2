"""LocalLauncher: start the ranks of this node as processes, and again when the run is elastic."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

from distributed.checkpoint.run_directory import lent, owned_directory
from distributed.communication.environment import torchrun_variables
from distributed.communication.rendezvous import Rendezvous
from distributed.errors import UserError
from distributed.interfaces.launcher import Launcher, RankCommand
from distributed.interfaces.placement import LauncherEnvironment
from distributed.interfaces.plan import RunPlan
from distributed.launch.supervisor import Supervisor
from distributed.launch.warm_start import WarmServer, preload_of, shared_env, warm_server
from distributed.planner.resolve import rescale
from distributed.resilience.elastic import Elastic, SingleHost
from distributed.resilience.host_heartbeat import HostHeartbeat
from distributed.resilience.rank_monitor import Limits, RankMonitor
from distributed.system.addresses import is_loopback, loopback_interface


class LocalLauncher(Launcher):
    """Starts this node's ranks as processes that meet in a store which it serves, and again when the
    run is elastic."""

    def prepare(self, plan: RunPlan) -> None:
        """Let the host import the framework while the task is packed."""
        _warm(plan, {})

    def run(self, plan: RunPlan, command: RankCommand) -> None:
        if plan.counts:
            _run_rounds(plan, command)
            return
        with ExitStack() as stack:
            host, port = _endpoint(plan)
            if plan.node_rank == 0:
                port = stack.enter_context(Rendezvous(host, port, plan.world_size)).port
            _supervisor(command, plan, host, port).run()


def _run_rounds(plan: RunPlan, command: RankCommand) -> None:
    """An elastic run. Its ranks change from round to round, so that its launcher holds the lease."""
    if plan.num_nodes == 1:
        with owned_directory(plan, command) as lent_command:
            supervise = partial(_supervisor, lent_command)
            Elastic(plan, lent_command, supervise, SingleHost(list(plan.counts)), rescale).run()
        return
    from distributed.resilience.elastic_hosts import ElasticHosts

    hosts = ElasticHosts(plan, _endpoint(plan))
    try:
        lent_command = lent(command, hosts.run_id)
        Elastic(plan, lent_command, partial(_supervisor, lent_command), hosts, rescale).run()
    finally:
        hosts.release()


def _supervisor(command: RankCommand, plan: RunPlan, host: str, port: int) -> Supervisor:
    envs = rank_envs(plan, command, host, port)
    hosts = None
    if plan.num_nodes > 1:
        hosts = HostHeartbeat((host, port), plan.node_rank, tuple(envs), plan.config.host_timeout)
    watch = RankMonitor(command.folder, Limits.of(plan), hosts)
    warm, heeds_signals = _warm(plan, command.env), plan.config.heeds_signals
    preload = preload_of(plan.spec)
    if (
        warm is None
    ):  # the server of another process serves many runs: it imports what ranks import later, too
        preload = [*plan.spec.requires, *preload, *plan.spec.preload]
    return Supervisor(command.argv, envs, command.folder, watch, heeds_signals, preload, warm)


def _warm(plan: RunPlan, env: Mapping[str, str]) -> WarmServer | None:
    return warm_server(plan.config, plan.spec, plan.device == "cpu", shared_env(plan.local_size, env))


def _endpoint(plan: RunPlan) -> tuple[str, int]:
    if plan.num_nodes == 1:
        return "127.0.0.1", 0
    text = plan.config.rdzv_endpoint or ""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError("not an address", field="rdzv_endpoint", got=text, allowed="HOST:PORT of node 0")
    return host, int(port)


def rank_envs(plan: RunPlan, command: RankCommand, host: str, port: int) -> dict[int, dict[str, str]]:
    """rank -> environment, for the ranks of this node."""
    first = plan.node_rank * plan.local_size
    return {first + local: _rank_env(plan, command, local, host, port) for local in range(plan.local_size)}


def _rank_env(plan: RunPlan, command: RankCommand, local: int, host: str, port: int) -> dict[str, str]:
    """The environment of one rank, in torchrun's own words."""
    env = shared_env(plan.local_size, command.env)
    if is_loopback(host):
        env = {"GLOO_SOCKET_IFNAME": loopback_interface(), **env}
    rank = plan.node_rank * plan.local_size + local
    place = LauncherEnvironment(
        "spawn", rank, plan.world_size, local, plan.local_size, plan.node_rank, plan.num_nodes, host, port
    )
    own = {"DISTRIBUTED_RUN_DIR": str(command.folder), "PYTHONUNBUFFERED": "1"}
    return {**env, **torchrun_variables(place), **own}
