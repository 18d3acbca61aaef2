"""What a host tells the others of where it is."""

from __future__ import annotations

import pytest

from distributed.system import addresses
from distributed.system.addresses import address_among

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
