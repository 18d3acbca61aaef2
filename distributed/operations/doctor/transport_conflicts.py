"""Environment variables that contradict the hardware of this host, or that should not be kept set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from distributed.operations.doctor.hardware import HostHardware
from distributed.operations.doctor.transport_presets import GUIDE, chosen_interface

__all__ = ["CONFLICTS", "Conflict"]


@dataclass(frozen=True)
class Conflict:
    """A value that is wrong on some hosts.

    Attributes:
        names: variables to which the same check applies.
        finds: function of value, host and environment that returns what is wrong; empty if nothing is.
        remedy: what to do.
        error: whether the ranks of several hosts cannot connect, or NCCL does not start.
    """

    names: tuple[str, ...]
    finds: Callable[[str, HostHardware, Mapping[str, str]], str]
    remedy: str
    error: bool = False


def _selected(value: str, existing: list[str], exact: bool) -> tuple[list[str], list[str]]:
    """(names that NCCL's or gloo's filter `value` selects, its entries that match none). The syntax is that
    of ``NCCL_SOCKET_IFNAME`` and ``NCCL_IB_HCA``: ``^`` excludes, ``=`` matches whole names."""
    excludes, exact = value.startswith("^"), exact or value.lstrip("^").startswith("=")
    entries = [entry.partition(":")[0] for entry in value.lstrip("^=").split(",") if entry]

    def matches(name: str, entry: str) -> bool:
        return name == entry if exact else name.startswith(entry)

    matched = [name for name in existing if any(matches(name, entry) for entry in entries)]
    if excludes:
        return [name for name in existing if name not in matched], []
    return matched, [entry for entry in entries if not any(matches(name, entry) for name in existing)]


def _unknown_interface(value: str, host: HostHardware, exact: bool) -> str:
    names = [one.name for one in host.interfaces]
    selected, unmatched = _selected(value, names, exact)
    if unmatched or not selected:
        return f"no interface {', '.join(unmatched) or value} on this host; there are {', '.join(names)}"
    return ""


def _nccl_interface(value: str, host: HostHardware, _: Mapping[str, str]) -> str:
    return _unknown_interface(value, host, exact=False)


def _gloo_interface(value: str, host: HostHardware, _: Mapping[str, str]) -> str:
    return _unknown_interface(value, host, exact=True)


def _unreachable(value: str, host: HostHardware, _: Mapping[str, str]) -> str:
    names = [one.name for one in host.interfaces]
    selected = [host.interface(name) for name in _selected(value, names, exact=False)[0]]
    if not selected or value.startswith("^") or chosen_interface(host) is None:
        return ""
    bad = [
        f"{one.name} is {'down' if not one.up else one.kind}"
        for one in selected
        if one is not None
        and (not one.up or one.kind == "loopback" or one.name.startswith(("docker", "veth")))
    ]
    return f"{', '.join(bad)}: other hosts cannot be reached through it" if len(bad) == len(selected) else ""


def _unknown_adapter(value: str, host: HostHardware, _: Mapping[str, str]) -> str:
    names = sorted({port.device for port in host.rdma})
    selected, unmatched = _selected(value, names, exact=False)
    if unmatched or not selected:
        return f"no RDMA device {', '.join(unmatched) or value}; there are {', '.join(names) or 'none'}"
    return ""


def _without_rdma(value: str, host: HostHardware, _: Mapping[str, str]) -> str:
    ports = host.active_ports("InfiniBand", "RoCE")
    found = f"{len(ports)} active {ports[0].link} port(s) are not used" if ports else ""
    return found if value == "1" else ""


def _without_p2p(value: str, host: HostHardware, env: Mapping[str, str]) -> str:
    level = env.get("NCCL_P2P_LEVEL", "").upper() == value.upper() == "LOC"
    return "GPUs with NVLink do not use it" if host.nvlink and (value == "1" or level) else ""


def _without_shared_memory(value: str, host: HostHardware, _: Mapping[str, str]) -> str:
    several = len(host.gpus) > 1 and not host.nvlink
    return "GPUs without a direct path send through the network" if value == "1" and several else ""


def _gid_index(_: str, host: HostHardware, __: Mapping[str, str]) -> str:
    if host.nccl is not None and host.nccl >= (2, 21):
        return f"NCCL {host.nccl[0]}.{host.nccl[1]} selects the GID itself, per device"
    return ""


def _without_gpu_direct(value: str, host: HostHardware, _: Mapping[str, str]) -> str:
    off = value.upper() in ("LOC", "0") and host.gpus and host.active_ports("InfiniBand", "RoCE")
    return "GPUDirect RDMA is off although there are RDMA ports" if off else ""


def _forced(value: str, host: HostHardware, _: Mapping[str, str]) -> str:
    return f"forced to {value} for every size and number of ranks" if host.gpus else ""


def _removed(_: str, __: HostHardware, ___: Mapping[str, str]) -> str:
    return "NCCL has not read it since 2.5"


def _too_many_sockets(value: str, _: HostHardware, env: Mapping[str, str]) -> str:
    other = env.get("NCCL_SOCKET_NTHREADS", "1")
    if not (value.isdigit() and other.isdigit()) or int(value) * int(other) <= 64:
        return ""
    return f"{other} threads times {value} sockets are more than 64"


def _verbose(value: str, _: HostHardware, __: Mapping[str, str]) -> str:
    return f"{value} logs from every rank" if value.upper() in ("INFO", "TRACE") else ""


def _other_provider(value: str, host: HostHardware, _: Mapping[str, str]) -> str:
    efa = [port for port in host.rdma if port.link == "EFA"]
    return f"libfabric uses {value} although there is an EFA device" if efa and value != "efa" else ""


def _deprecated(_: str, __: HostHardware, ___: Mapping[str, str]) -> str:
    return "torch has renamed it, and warns"


_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")

CONFLICTS = (
    Conflict(_INTERFACES[:1], _nccl_interface, "Name one of them, as =eth0", error=True),
    Conflict(_INTERFACES[1:], _gloo_interface, "Name one of them: a prefix is not enough", error=True),
    Conflict(_INTERFACES, _unreachable, "On one host this works; for several, name an interface that is up"),
    Conflict(("NCCL_IB_HCA",), _unknown_adapter, "Name one of them, as =mlx5_0:1, or unset it", error=True),
    Conflict(("NCCL_IB_DISABLE",), _without_rdma, "Unset it, unless the fabric is known to be broken"),
    Conflict(("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"), _without_p2p, "Unset it"),
    Conflict(("NCCL_SHM_DISABLE",), _without_shared_memory, "Unset it, and enlarge /dev/shm in a container"),
    Conflict(("NCCL_IB_GID_INDEX",), _gid_index, "Unset it (NCCL User Guide, Networking Troubleshooting)"),
    Conflict(("NCCL_NET_GDR_LEVEL",), _without_gpu_direct, "Unset it: NCCL selects the distance"),
    Conflict(("NCCL_ALGO", "NCCL_PROTO"), _forced, f"Unset it ({GUIDE}): it is for debugging"),
    Conflict(("NCCL_TREE_THRESHOLD",), _removed, "Unset it; NCCL selects the algorithm by size"),
    Conflict(("NCCL_NSOCKS_PERTHREAD",), _too_many_sockets, "Lower one of the two", error=True),
    Conflict(("NCCL_DEBUG",), _verbose, "Unset it, or set WARN, when the problem is solved"),
    Conflict(("FI_PROVIDER",), _other_provider, "Unset it: aws-ofi-nccl selects efa"),
    Conflict(
        ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG", "NCCL_ENABLE_TIMING"),
        _deprecated,
        "Put TORCH_ before the name, or unset it",
    ),
)
