"""Checks of the transports: the hardware found, variables for it, and variables that contradict it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from functools import cache

from distributed.operations.doctor import Finding
from distributed.operations.doctor.hardware import HostHardware, read_hardware
from distributed.operations.doctor.transport_conflicts import CONFLICTS
from distributed.operations.doctor.transport_presets import PRESETS

_SMALL = 2**30
"""Bytes of /dev/shm that NCCL's guide proposes for a container."""


@cache
def _this_host() -> HostHardware:
    return read_hardware()


def transports(host: HostHardware | None = None) -> Iterator[Finding]:
    """The GPUs, links and interfaces that were found, and what a container hides from them."""
    host = host or _this_host()
    yield Finding("transports", "ok", _describe(host))
    if host.rdma and not host.verbs:
        message = f"{len(host.rdma)} RDMA port(s), but no /dev/infiniband/uverbs*"
        remedy = (
            "In a container: --device=/dev/infiniband --ulimit memlock=-1; else load the driver ib_uverbs"
        )
        yield Finding("RDMA", "warn", message, remedy)
    if host.container and len(host.gpus) > 1 and host.shared_memory < _SMALL:
        message = f"/dev/shm has {host.shared_memory >> 20} MiB; NCCL may not start"
        yield Finding(
            "NCCL shared memory", "warn", message, "--shm-size=1g --ulimit memlock=-1, or --ipc=host"
        )
    if host.wsl and len(host.gpus) > 1:
        message = "WSL with several GPUs, on which NCCL has not been tested with this package"
        remedy = "Run `doctor` with its all-reduce first; communication_backend: gloo is the alternative"
        yield Finding("WSL", "warn", message, remedy)


def presets(
    host: HostHardware | None = None, environment: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """The variables that one would set on this host. Nothing sets them."""
    for name, value, why, source in wanted(host):
        now = environment.get(name)
        state = "unset now" if now is None else "set" if now == value else f"set to {now} now"
        yield Finding(f"preset {name}", "ok", f"{value} ({state}): {why} [{source}]")


def conflicts(
    host: HostHardware | None = None, environment: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """The variables that are set and contradict the hardware."""
    host = host or _this_host()
    for conflict in CONFLICTS:
        for name in conflict.names:
            if (
                problem := conflict.finds(environment[name], host, environment)
                if environment.get(name)
                else ""
            ):
                status = "error" if conflict.error else "warn"
                yield Finding(name, status, f"{environment[name]}: {problem}", conflict.remedy)  # type: ignore[arg-type]


def wanted(host: HostHardware | None = None) -> list[tuple[str, str, str, str]]:
    """(variable, value, why, source) of each preset that applies to this host."""
    host = host or _this_host()
    return [(one.name, value, one.why, one.source) for one in PRESETS if (value := one.value(host))]


def export_lines(host: HostHardware | None = None) -> list[str]:
    """The presets as lines of a shell script."""
    return [
        line
        for name, value, why, source in wanted(host)
        for line in (f"# {why} [{source}]", f"export {name}={shlex.quote(value)}")
    ]


def _describe(host: HostHardware) -> str:
    links = {True: "NVLink", False: "PCIe", None: "links unknown"}[host.nvlink]
    gpus = f"{len(host.gpus)} GPU(s){f', {links}' if len(host.gpus) > 1 else ''}"
    ports = [
        f"{port.device}:{port.port} {port.link}{'' if port.active else ' (not active)'}" for port in host.rdma
    ]
    lines = [
        f"{one.name}{f' {one.speed / 1000:g} Gbit/s' if one.speed else ''}{'' if one.up else ' (down)'}"
        for one in host.interfaces
        if one.kind != "virtual" or one.name == host.route
    ]
    where = [word for word, here in (("a container", host.container), ("WSL", host.wsl)) if here]
    parts = [gpus if host.gpus else "no GPU", *ports, *lines, *where]
    return ", ".join(parts)
