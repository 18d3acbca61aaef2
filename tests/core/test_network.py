"""What a host tells the others of where it is."""

from __future__ import annotations

import pytest

from distributed import network
from distributed.network import address_among


def test_a_host_that_is_loopback_to_itself_tells_the_others_another_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian maps a host's own name to 127.0.1.1; who serves the meeting asks for the way to itself."""
    monkeypatch.setattr(network, "own_addresses", lambda: ["10.0.0.7", "172.17.0.1"])
    monkeypatch.setattr(network, "address_towards", lambda *_: "127.0.0.1")
    assert address_among("head") == "10.0.0.7"
    assert [address_among(own) for own in ("127.0.0.1", "localhost")] == ["127.0.0.1"] * 2
    monkeypatch.setattr(network, "address_towards", lambda *_: "172.17.0.1")
    assert address_among("head") == "172.17.0.1"
    monkeypatch.setattr(network, "own_addresses", list)
    monkeypatch.setattr(network, "address_towards", lambda *_: "127.0.0.1")
    assert address_among("head") == "127.0.0.1"
