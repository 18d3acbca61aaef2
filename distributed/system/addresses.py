"""Addresses and interfaces of this host."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

from distributed.errors import UserError

_ELSEWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737)."""


_MAX_SOCKET_PATH = 107  # of Linux's unix(7), without the final zero


def bind_path(listener: socket.socket, path: Path) -> None:
    """Bind the Unix socket `listener` to `path`, in a temporary folder.

    Raises:
        UserError: `path` is too long for a socket.
    """
    _check_socket(path)
    listener.bind(str(path))


def check_worker_sockets() -> None:
    """Check that workers of a DataLoader can send tensors: sockets of multiprocessing are in TMPDIR.

    Raises:
        UserError: their paths are too long. A worker would print an error, and its reader would wait.
    """
    from torch.multiprocessing import get_sharing_strategy

    if get_sharing_strategy() == "file_descriptor":
        _check_socket(Path(tempfile.gettempdir()) / "pymp-xxxxxxxx" / "listener-xxxxxxxx")


def _check_socket(path: Path) -> None:
    if (length := len(bytes(path))) > _MAX_SOCKET_PATH:
        raise UserError(
            f"the path of a socket is too long: {path}",
            field="TMPDIR",
            got=length,
            allowed=f"at most {_MAX_SOCKET_PATH} bytes",
            remedy="Set TMPDIR to a folder with a shorter path",
        )


def is_own_address(host: str) -> bool:
    """Whether `host` names this machine: only an own address can be bound."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether `host` can only be reached from itself."""
    return host in ("localhost", "::1") or host.startswith("127.")


def loopback_interface() -> str:
    """The name of the loopback interface, for gloo."""
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else next((n for n in names if n.startswith("lo")), names[0])


def address_towards(host: str, port: int = 1) -> str:
    """This host's IPv4 address on the route to `host`. Nothing is sent.

    Raises:
        OSError: there is no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def address_among(host: str, port: int = 1) -> str:
    """This host's IPv4 address for the other hosts of a rendezvous at `host`. Nothing is sent.

    Loopback only if `host` is loopback, because many hosts resolve their own name to 127.0.1.1.

    Raises:
        OSError: there is no route to `host`.
    """
    if is_loopback(host):
        return "127.0.0.1"
    found = address_towards(host, port)
    return address_for_others(found) if is_loopback(found) else found


def address_for_others(otherwise: str) -> str:
    """The address from which this host sends to others; `otherwise` if it has none. Nothing is sent."""
    try:
        return address_towards(_ELSEWHERE)
    except OSError:
        return next(iter(own_addresses()), otherwise)


def free_port() -> int:
    """A port that is currently unused on all interfaces."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def own_addresses() -> list[str]:
    """IPv4 addresses of this host, without loopback."""
    import psutil

    return [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]
