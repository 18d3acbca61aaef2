"""A Ray cluster inside an allocation of nodes, as a batch script starts it.

    python -m distributed_backends.ray.allocation start --meet HOST --port P --num-gpus 4 --num-cpus 32
    python -m distributed_backends.ray.allocation run --meet HOST --port P --num-nodes 2 -- COMMAND ...

`start` runs once on every node and stays; the host called like `--meet` is the head. `run` waits until all
nodes are there, then becomes COMMAND. Without `--meet` it waits for those of the cluster at ``RAY_ADDRESS``,
which a job of Ray's has.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module

from distributed.errors import UserError
from distributed.system.addresses import address_for_others, address_towards, free_port, is_loopback

NICENESS = "RAY_worker_niceness"
"""Ray's variable for the priority of its workers, 15 by default: ranks would wait for any other process."""

_PATIENCE = 300.0
"""Default time for all nodes to join, in seconds."""
_LONGEST = 24
"""Letters of a folder in which the paths of Ray's sockets, 80 letters more, are still short enough."""


def main(words: Sequence[str] | None = None) -> int:
    """Start this node's part of the cluster, or run a command on the whole cluster."""
    parser = argparse.ArgumentParser(prog="python -m distributed_backends.ray.allocation")
    actions = parser.add_subparsers(dest="action", required=True)
    start = actions.add_parser("start", help="Run this node's part of the cluster until it is stopped.")
    start.add_argument("--num-cpus", type=int, required=True)
    start.add_argument("--num-gpus", type=int, required=True)
    run = actions.add_parser("run", help="Wait for all nodes, then run a command.")
    run.add_argument("--num-nodes", type=int, required=True)
    run.add_argument("--patience", type=float, default=_PATIENCE, help="Seconds to wait for the nodes.")
    run.add_argument("command", nargs="+")
    for action in (start, run):
        ours = action is start
        action.add_argument("--meet", required=ours, help="Host of the head, by the scheduler's name.")
        action.add_argument("--port", type=int, required=ours)
    args = parser.parse_args(words)
    try:
        return _start(args) if args.action == "start" else _run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _start(args: argparse.Namespace) -> int:
    """Become ``ray start --block``, which ends with the step."""
    # The scheduler's warning is for the driver, and would end every process of Ray's.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    own = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    head = _ip(args.meet)
    address, here = f"{head}:{args.port}", _reachable(_ip(own), head)
    if "RAY_TMPDIR" not in os.environ:
        os.environ["RAY_TMPDIR"] = _own_folder()
    os.environ.setdefault(NICENESS, "0")
    # This server is not used here, and on its usual port two jobs on a host would collide.
    client = f"--ray-client-server-port={free_port()}"
    place = ["--head", f"--port={args.port}", client, "--include-dashboard=false"]
    where = place if own == args.meet else [f"--address={address}"]
    sizes = [f"--num-cpus={args.num_cpus}", f"--num-gpus={args.num_gpus}"]
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    os.execv(sys.executable, [*ray, *where, *sizes, f"--node-ip-address={here}"])


def _own_folder() -> str:
    """A folder for Ray's own files. Its default folder has a file of the host's first user, which other
    users cannot write."""
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="ray-", dir=usual if len(usual) <= _LONGEST else "/tmp")


def _run(args: argparse.Namespace) -> int:
    """Become the command when all nodes are there; it finds the cluster by ``RAY_ADDRESS``."""
    address = _address(args)
    missing = _await_nodes(address, args.num_nodes, args.patience)
    if missing:
        raise UserError(
            f"{missing} of {args.num_nodes} Ray nodes did not join within {args.patience:g} s",
            field="--num-nodes",
            got=args.num_nodes,
            remedy="See the output of their launcher: the job step, or `ray monitor cluster.yaml`",
        )
    os.environ["RAY_ADDRESS"] = address
    os.execvp(args.command[0], args.command)


def _address(args: argparse.Namespace) -> str:
    if args.meet is not None and args.port is not None:
        head = _ip(args.meet)
        return f"{_reachable(head, head)}:{args.port}"
    known = os.environ.get("RAY_ADDRESS")
    if not known:
        raise UserError(
            "no cluster given: RAY_ADDRESS is not set",
            field="--meet",
            remedy="Give --meet and --port, or run this in a Ray job",
        )
    return known


def _await_nodes(address: str, number: int, patience: float) -> int:
    """Number of the `number` nodes still missing after `patience` seconds; 0 as soon as all are there."""
    # Ray has no public way to ask that is not a client of the cluster; its own tools take this one.
    client = import_module("ray._raylet").GcsClient
    deadline, alive = time.monotonic() + patience, 0
    while time.monotonic() < deadline:
        try:
            nodes = client(address=address).get_all_node_info(timeout=5.0).values()
            alive = sum(1 for node in nodes if node.state == 0)
        except Exception:  # noqa: BLE001 - the head is not up yet, which raises various errors
            alive = 0
        if alive >= number:
            return 0
        time.sleep(0.5)
    return number - alive


def _reachable(address: str, head: str) -> str:
    """`address`, or how other hosts reach this one: many hosts call themselves 127.0.1.1 in /etc/hosts."""
    if not is_loopback(address):
        return address
    if not is_loopback(head):
        return address_towards(head)
    return address_for_others(address)


def _ip(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        raise UserError(
            "no such host",
            field="host",
            got=host,
            remedy="Every node must resolve its own name and that of the first one",
        ) from None


if __name__ == "__main__":
    sys.exit(main())
