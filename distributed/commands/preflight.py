"""``preflight``: check the hosts of a run and the links between them before it starts."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from distributed.commands.doctor import print_findings
from distributed.commands.flags import add_config_flags, collect_layers
from distributed.commands.tables import print_json, print_table
from distributed.communication.environment import detect
from distributed.config import DistributedConfig, load_layers
from distributed.errors import UserError
from distributed.interfaces.placement import LauncherEnvironment

if TYPE_CHECKING:
    from distributed.operations.doctor.preflight_facts import Facts
    from distributed.operations.doctor.preflight_measure import Survey

_EPILOG = """
Start it on every host as you start the run, with one process per host: by hand with --num-nodes, --node-rank
and --rdzv-endpoint; under srun with --ntasks-per-node=1; under torchrun with --nproc-per-node=1. Node 0
prints.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``preflight``."""
    parser.epilog = _EPILOG
    parser.add_argument("--json", action="store_true", help="Print JSON instead of tables.")
    parser.add_argument(
        "--wait",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="Time to wait for all hosts. Default: 120.",
    )
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Survey the hosts; node 0 prints. 1 when a finding is an error, on every host.

    Raises:
        UserError: no rendezvous address is set, or hosts did not join.
    """
    config = load_layers(collect_layers(args))
    place = _find_rank(config)

    from distributed.operations.doctor.check_hosts import judge
    from distributed.operations.doctor.preflight_measure import survey

    found = survey(place, args.wait, config.checkpoint_dir, config.device != "cpu")
    findings = judge(found, config.gpus_per_node, config.device)
    failed = any(finding.status == "error" for finding in findings)
    if place.rank:
        print(f"node {place.rank} is done; node 0 ({found.hosts[0].host}) has the tables", flush=True)
    elif args.json:
        print_json({**asdict(found), "findings": [asdict(finding) for finding in findings]})
    else:
        _print_hosts(found)
        print_findings(findings)
    return int(failed)


def _find_rank(config: DistributedConfig) -> LauncherEnvironment:
    joined = detect(os.environ)
    if joined is not None:
        if joined.local_size > 1:
            raise UserError(
                f"preflight needs one process per host; {joined.launcher} started"
                f" {joined.local_size} on this host",
                remedy="Use srun --ntasks-per-node=1 or torchrun --nproc-per-node=1",
            )
        return joined
    if config.num_nodes == 1:
        return LauncherEnvironment("preflight", 0, 1, 0, 1, 0, 1, "127.0.0.1", 0)
    host, _, port = (config.rdzv_endpoint or "").rpartition(":")
    if config.node_rank is None or not host or not port.isdigit():
        raise UserError(
            f"{config.num_nodes} hosts have no rendezvous address",
            field="node_rank, rdzv_endpoint",
            got=f"{config.node_rank}, {config.rdzv_endpoint}",
            remedy="Run this command on every host with --node-rank 0, 1, ... and --rdzv-endpoint HOST:PORT"
            " of node 0, or start one process per host under srun or torchrun",
        )
    node, size = config.node_rank, config.num_nodes
    return LauncherEnvironment("preflight", node, size, 0, 1, node, size, host, int(port))


def _print_hosts(survey: Survey) -> None:
    columns = ["node", "host", "address", "python", "torch", "GPUs", "cores", "memory", "clock", "round trip"]
    print_table([*columns, "bandwidth"], [_row(host) for host in survey.hosts])


def _row(host: Facts) -> list[str]:
    links = [link for link in host.links.values() if not link.error]
    broken = len(host.links) - len(links)
    slowest = f"{max(link.round_trip for link in links) * 1e3:.2f} ms" if links else "-"
    pace = f"{min(link.bandwidth for link in links) / 1e6:.0f} MB/s" if links else "-"
    return [
        str(host.node),
        host.host,
        host.address,
        host.versions.get("python", "-"),
        host.versions.get("torch", "-"),
        str(len(host.gpus)),
        str(host.cpus),
        f"{host.memory / 2**30:.0f} GiB",
        f"{host.clock * 1e3:+.0f} ms",
        f"{slowest}{f' ({broken} unreachable)' if broken else ''}",
        pace,
    ]
