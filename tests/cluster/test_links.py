"""Slow links carry what was sent, and say what they need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import links
from tests.cluster.hosts import Network, can_have_hosts
from tests.cluster.links import LinkError, check_rights, limit_rate, with_delay

needs_hosts = pytest.mark.needs(can_have_hosts())

_SEND = """
import hashlib, socket, sys, time
began = time.monotonic()
peer = socket.create_connection((sys.argv[1], 9999), 20)
print(f"{time.monotonic() - began:.4f}")
data = bytes(range(256)) * 20000
peer.sendall(data); peer.shutdown(socket.SHUT_WR)
print(peer.recv(64).decode() == hashlib.sha256(data).hexdigest())
"""
_RECEIVE = """
import hashlib, socket, sys
server = socket.create_server((sys.argv[1], 9999)); print("listening", flush=True)
peer, _ = server.accept()
found = hashlib.sha256()
while part := peer.recv(1 << 16):
    found.update(part)
peer.sendall(found.hexdigest().encode())
"""


@needs_hosts
def test_a_delayed_link_carries_the_same_bytes(tmp_path: Path) -> None:
    with Network(["n1", "n2"], tmp_path) as network, with_delay(network, "n1", "n2", 0.01) as (here, there):
        assert here != there
        receiver = network["n2"].start(
            [sys.executable, "-c", _RECEIVE, there], stdout=subprocess.PIPE, text=True
        )
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "listening\n"
        sender = network["n1"].start([sys.executable, "-c", _SEND, there], stdout=subprocess.PIPE, text=True)
        seconds, same = sender.communicate(timeout=60)[0].split()
    assert same == "True"
    # Two packets of the connection were under way for 10 ms each: a lower bound whatever the load.
    assert float(seconds) >= 0.02


@needs_hosts
def test_a_rate_is_set_in_the_kernel(tmp_path: Path) -> None:
    with Network(["n1"], tmp_path) as network:
        limit_rate(network["n1"], "100mbit")
        shown = subprocess.run(
            ["tc", "-n", network["n1"].namespace, "qdisc", "show", "dev", "eth0"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        assert "rate 100Mbit" in shown.stdout
        with pytest.raises(LinkError, match="rate"):
            limit_rate(network["n1"], "fast")


def test_without_rights_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "can_have_hosts", lambda: "needs root")
    with pytest.raises(LinkError, match="--cap-add=NET_ADMIN"):
        check_rights()
