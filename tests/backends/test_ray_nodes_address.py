"""How the nodes of a Ray cluster in an allocation reach each other."""

from __future__ import annotations

from distributed_backends.ray_nodes import _reachable

from distributed.network import own_addresses


def test_a_host_that_calls_itself_loopback_is_known_by_what_others_reach() -> None:
    """Debian's /etc/hosts has 127.0.1.1 for the host's own name."""
    assert _reachable("10.0.0.7", "127.0.1.1") == "10.0.0.7"
    for own in own_addresses():
        assert _reachable("127.0.1.1", own) == own
    assert _reachable("127.0.1.1", "127.0.1.1") in (own_addresses() or ["127.0.1.1"])
