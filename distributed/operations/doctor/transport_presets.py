"""Environment variables of NCCL, gloo and libfabric for the hardware of this host, as a table.

`doctor` prints them. No run sets or changes one of them. Their meanings are those of the NCCL User Guide
(``env.rst``, "Environment Variables", and ``networking_troubleshooting.rst``, as of NCCL 2.31), of the EFA
cheat sheet of aws-ofi-nccl (``doc/efa-env-var.md``), and of torch's page on ``torch.distributed``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from distributed.operations.doctor.hardware import HostHardware, Interface

__all__ = ["GUIDE", "PRESETS", "Preset", "chosen_interface"]

GUIDE = "NCCL User Guide, Environment Variables"
_NETWORKING = "NCCL User Guide, Networking Troubleshooting"
_TORCH = "PyTorch, torch.distributed, Common environment variables"
_FAST = 100_000
"""Mbit/s from which NCCL's guide suggests more sockets."""


@dataclass(frozen=True)
class Preset:
    """One variable.

    Attributes:
        value: the value that one would set on a host; empty where the default is right.
        why: one line.
        source: title of the documentation that the line is based on.
    """

    name: str
    value: Callable[[HostHardware], str]
    why: str
    source: str


def chosen_interface(host: HostHardware) -> Interface | None:
    """The interface on which the other hosts are reached: that of the default route, otherwise the fastest
    one of a device that is up; None if there is only loopback."""
    usable = [one for one in host.interfaces if one.up and one.kind in ("ethernet", "infiniband")]
    route = host.interface(host.route)
    if route is not None and route.up and route.kind != "loopback":
        return route
    return max(usable, key=lambda one: (one.kind == "ethernet", one.speed), default=None)


def _interface_name(host: HostHardware) -> str:
    chosen = chosen_interface(host)
    return chosen.name if chosen else ""


def _exact_interface(host: HostHardware) -> str:
    return f"={name}" if host.gpus and (name := _interface_name(host)) else ""


def _adapters(host: HostHardware) -> str:
    """InfiniBand ports, or without one RoCE ports: NCCL should not mix the two."""
    ports = host.active_ports("InfiniBand") or host.active_ports("RoCE")
    return f"={','.join(f'{one.device}:{one.port}' for one in ports)}" if host.gpus and ports else ""


def _disable_rdma(host: HostHardware) -> str:
    """Virtual machines show RoCE devices that are used for Ethernet alone."""
    active = [port for port in host.rdma if port.active and port.link == "RoCE"]
    unusable = host.verbs and active and not host.active_ports("InfiniBand", "RoCE")
    return "1" if host.gpus and unusable else ""


def _gid_index(host: HostHardware) -> str:
    if host.active_ports("InfiniBand") or host.nccl is None or host.nccl >= (2, 21):
        return ""
    found = {port.roce_v2_gid for port in host.active_ports("RoCE")} - {None}
    return str(found.pop()) if host.gpus and len(found) == 1 else ""


def _sockets(host: HostHardware) -> str:
    chosen = chosen_interface(host)
    over_tcp = not host.active_ports("InfiniBand", "RoCE", "EFA")
    return "4" if host.gpus and over_tcp and chosen is not None and chosen.speed >= _FAST else ""


def _threads(host: HostHardware) -> str:
    return str(max(1, host.cores // len(host.gpus))) if host.gpus else ""


PRESETS = (
    Preset(
        "NCCL_SOCKET_IFNAME",
        _exact_interface,
        "interface of the default route; NCCL prefers names that begin with ib and may take one that does not"
        " reach the other hosts",
        GUIDE,
    ),
    Preset(
        "GLOO_SOCKET_IFNAME",
        _interface_name,
        "gloo listens on the address of the host's name, which is often 127.0.1.1",
        _TORCH,
    ),
    Preset(
        "TP_SOCKET_IFNAME",
        _interface_name,
        "for scripts that use torch.distributed.rpc (TensorPipe); runs of this package do not",
        "PyTorch, torch/csrc/distributed/rpc/tensorpipe_agent.cpp",
    ),
    Preset(
        "NCCL_IB_HCA",
        _adapters,
        "the active ports of one link layer; = matches exact names, so that mlx5_1 is not mlx5_10 as well",
        GUIDE,
    ),
    Preset(
        "NCCL_IB_DISABLE",
        _disable_rdma,
        "no active RoCE port has a RoCE v2 GID with an IPv4 address, which NCCL looks for: TCP remains",
        GUIDE,
    ),
    Preset(
        "NCCL_IB_GID_INDEX",
        _gid_index,
        "index of the RoCE v2 GID, for NCCL before 2.21; later ones select it and should not get a value",
        _NETWORKING,
    ),
    Preset(
        "NCCL_SOCKET_NTHREADS",
        _sockets,
        "one TCP connection does not fill 100 Gbit/s; threads times sockets must not exceed 64",
        GUIDE,
    ),
    Preset(
        "NCCL_NSOCKS_PERTHREAD",
        _sockets,
        "one TCP connection does not fill 100 Gbit/s; threads times sockets must not exceed 64",
        GUIDE,
    ),
    Preset(
        "OMP_NUM_THREADS",
        _threads,
        "an equal share of the cores for each GPU's rank; torchrun sets 1, and fit sets the share itself",
        "PyTorch, torch/distributed/run.py",
    ),
)
