"""Addresses of a host and of its sockets."""

from __future__ import annotations

import multiprocessing.process
import socket
import tempfile
from multiprocessing.connection import Listener
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from distributed.errors import UserError
from distributed.system import addresses
from distributed.system.addresses import address_among, bind_path, check_worker_sockets

LOOPBACK = "127.0.0.1"


@pytest.mark.parametrize(
    ("towards", "elsewhere", "own", "expected"),
    [
        ("172.17.0.1", "10.0.0.7", [], "172.17.0.1"),
        # Debian maps a host's own name to 127.0.1.1; who serves the meeting asks for the way to itself.
        (LOOPBACK, "10.0.0.7", ["192.168.122.1", "10.0.0.7"], "10.0.0.7"),
        (LOOPBACK, None, ["10.0.0.7", "172.17.0.1"], "10.0.0.7"),
        (LOOPBACK, None, [], LOOPBACK),
    ],
)
def test_the_address_that_a_host_tells_the_others(
    towards: str, elsewhere: str | None, own: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def way(host: str, port: int = 1) -> str:
        if host == "head":
            return towards
        if elsewhere is None:
            raise OSError("no default route")
        return elsewhere

    monkeypatch.setattr(addresses, "address_towards", way)
    monkeypatch.setattr(addresses, "own_addresses", lambda: own)
    assert address_among("head") == expected
    assert [address_among(name) for name in (LOOPBACK, "localhost")] == [LOOPBACK] * 2


@pytest.mark.parametrize("length", [108, 150])
def test_a_socket_whose_path_is_too_long(tmp_path: Path, length: int) -> None:
    path = Path(f"{tmp_path}/".ljust(length, "x"))
    with socket.socket(socket.AF_UNIX) as listener, pytest.raises(UserError) as caught:
        bind_path(listener, path)
    text = f"TMPDIR: the path of a socket is too long: {path}. Got {length}. Allowed: at most 107 bytes. Set"
    assert str(caught.value).startswith(text)


def test_the_longest_path_of_a_socket() -> None:
    with TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as listener:
        path = Path(f"{folder}/".ljust(107, "x"))
        bind_path(listener, path)
        assert path.is_socket()


def test_room_for_the_sockets_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """multiprocessing's own listener shows which folders have a path that is too long."""
    for length in (75, 76):
        folder = tmp_path / ("x" * (length - len(bytes(tmp_path)) - 1))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.setitem(multiprocessing.process.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]
        if length == 75:
            Listener(family="AF_UNIX").close()
            check_worker_sockets()
        else:
            with pytest.raises(OSError, match="too long"):
                Listener(family="AF_UNIX")
            with pytest.raises(UserError, match="TMPDIR: the path of a socket is too long"):
                check_worker_sockets()
