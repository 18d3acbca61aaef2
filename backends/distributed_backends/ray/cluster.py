"""Connect to the Ray cluster of a run: a connected one, one at an address, or a new one for the run."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray

from distributed.errors import UserError
from distributed.interfaces.plan import RunPlan
from distributed.system.processes import environment
from distributed_backends.ray.allocation import NICENESS
from distributed_backends.ray.section import RaySection

_PATIENCE = 10.0
"""Time for an answer from an address, in seconds."""
_CLIENT_PATIENCE = 60.0
"""Time in which Ray's client server has to start its process for this client, in seconds."""
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def address_of(section: RaySection) -> str | None:
    """Address of the run's cluster; None for one on this host, or the one already connected."""
    return None if ray.is_initialized() else section.address or os.environ.get("RAY_ADDRESS")


@contextmanager
def connected(
    section: RaySection, num_cpus: int, resources: Mapping[str, float] | None = None
) -> Iterator[None]:
    """Connect to Ray, and disconnect or stop the cluster afterwards.

    Args:
        num_cpus: minimum number of CPUs declared by a cluster started here.
        resources: other resources declared by such a cluster.

    Raises:
        UserError: no cluster answers at the address, or its Ray version differs.
    """
    if ray.is_initialized():
        _check_same(section.address)
        yield
        return
    address = address_of(section)
    try:
        if address is None:
            _start(num_cpus, dict(resources or {}))
        else:
            _join(address)
        yield
    finally:
        ray.shutdown()


def _check_same(address: str | None) -> None:
    here = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", here) and not (address or "").startswith("ray://"):
        raise UserError(
            f"this process is already connected to the Ray cluster at {here}",
            field="ray.address",
            got=address,
            remedy="Leave it out, or call ray.shutdown() first",
        )


def _start(num_cpus: int, resources: dict[str, float]) -> None:
    # Some of Ray's servers listen on every interface regardless; the token that every client needs
    # since 2.60 keeps other users out.
    nice = os.environ.get(NICENESS, "0")
    with environment({"RAY_USAGE_STATS_ENABLED": "0", NICENESS: nice}):
        ray.init(
            address="local",
            num_cpus=max(num_cpus, len(os.sched_getaffinity(0))),
            resources=resources or None,
            include_dashboard=False,
            **_QUIET,
        )


def _join(address: str) -> None:
    tried = _await_answer(address)
    deadline = time.monotonic() + _CLIENT_PATIENCE
    while True:
        try:
            ray.init(address=address, **_QUIET)
        except ConnectionAbortedError as error:
            # The client server starts a process for each client. On a busy node it is not there in time, and
            # it may abort in gRPC's fork handlers (ray-project/ray#63202).
            if time.monotonic() > deadline:
                raise UserError(
                    f"Ray's client server could not start a process for this client: {error}",
                    field="ray.address",
                    got=address,
                    remedy="Start the head node with GRPC_ENABLE_FORK_SUPPORT=0 in its environment, without"
                    " which such processes abort now and then, or use HOST:PORT on a host of the cluster",
                ) from None
        except Exception as error:  # noqa: BLE001
            # Ray raises whatever its parts raise: ConnectionError, RuntimeError (another version), ...
            raise _unanswered(address, f"{tried}: {type(error).__name__}: {error}") from None
        else:
            return


def _await_answer(address: str) -> str:
    """Return the address that answered within `_PATIENCE` seconds. Ray's own attempts take minutes."""
    place = address.removeprefix("ray://")
    if place == "auto":
        from ray._private.services import canonicalize_bootstrap_address

        try:
            place = canonicalize_bootstrap_address("auto") or ""
        except Exception as error:  # noqa: BLE001 - no address, which raises various errors
            place = f" ({error})"
        if ":" not in place or " " in place:
            raise _unanswered(address, "this host's record of running clusters, which names none")
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(
            "not an address of a Ray cluster",
            field="ray.address",
            got=address,
            allowed="auto, HOST:PORT of the head node (6379), ray://HOST:PORT of its client server (10001)",
        )
    deadline = time.monotonic() + _PATIENCE
    reason = _reach(host.strip("[]"), int(port), deadline) or _shake_hands(place, deadline)
    if reason:
        raise _unanswered(address, f"{place} for {_PATIENCE:g} s: {reason}")
    return place


def _reach(host: str, port: int, deadline: float) -> str | None:
    reason = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), timeout=left).close()
            return None
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))
    return reason


def _shake_hands(place: str, deadline: float) -> str | None:
    """Error unless a gRPC server listens there, as far as a plain-text connection can detect it."""
    if importlib.util.find_spec("grpc") is None or os.environ.get("RAY_USE_TLS") == "1":
        return None
    import grpc  # type: ignore[import-untyped]

    channel = grpc.insecure_channel(place)
    try:
        grpc.channel_ready_future(channel).result(timeout=max(1.0, deadline - time.monotonic()))
    except grpc.FutureTimeoutError:
        return "the server there does not speak gRPC"
    finally:
        channel.close()
    return None


def _unanswered(address: str, tried: str) -> UserError:
    return UserError(
        f"no Ray cluster answers; tried {tried}",
        field="ray.address",
        got=address,
        remedy="Start one (ray start --head), check the address, or leave it out for a cluster on this host",
    )


def needs_of(plan: RunPlan) -> dict[str, float]:
    """Resources that Ray reserves for each rank."""
    section = RaySection.of(plan.config)
    gpus = {"GPU": 1.0} if plan.device == "cuda" else {}
    return {"CPU": section.num_cpus_per_rank, **gpus, **section.resources}


def check_resources(plan: RunPlan) -> None:
    """Refuse ranks that do not fit into the empty cluster: Ray would wait forever.

    Raises:
        UserError: names the missing and the existing resources.
    """
    if _limits():
        return
    needs = {name: amount for name, amount in needs_of(plan).items() if amount}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(_fit(node, needs) for node in nodes) if needs else plan.world_size
    if room < min(plan.counts, default=plan.world_size) or len(nodes) < plan.config.num_nodes:
        each = ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
        has = "; ".join(_contents(node) for node in nodes)
        raise UserError(
            f"the Ray cluster has resources for {room} of {plan.world_size} ranks of {each} each,"
            f" and {len(nodes)} of {plan.config.num_nodes} nodes: it has {has}",
            field="num_gpus",
            got=plan.world_size,
            allowed=f"at most {room} ranks on at most {len(nodes)} nodes",
            remedy="Use fewer ranks, lower ray.num_cpus_per_rank, or add nodes",
        )


def _fit(node: Mapping[str, float], needs: Mapping[str, float]) -> int:
    return min(int(node.get(name, 0.0) / amount + 1e-9) for name, amount in needs.items())


def _contents(node: Mapping[str, float]) -> str:
    found = {n: a for n, a in node.items() if ":" not in n and "memory" not in n}
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(found.items())) or "nothing"


def num_gpus(or_to_come: bool) -> int:
    """GPUs that the cluster has.

    Args:
        or_to_come: count those that an autoscaler may add, as for a run that sets its number of ranks.
    """
    here = int(ray.cluster_resources().get("GPU", 0))
    return max(here, int(_limits().get("GPU", 0))) if or_to_come else here


def _limits() -> Mapping[str, int]:
    """Maximum resources with an autoscaler; empty without one."""
    from ray._private.state import state

    return (state.get_max_resources_from_cluster_config() or {}) if is_local() else {}


def is_local() -> bool:
    """Whether this process itself is on the cluster, not behind Ray's client server."""
    return not ray.util.client.ray.is_connected()
