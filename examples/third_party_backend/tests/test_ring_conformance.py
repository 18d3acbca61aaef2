"""The contracts, and what the kit cannot know of: the ring itself."""

from __future__ import annotations

from distributed.testing.conformance import BackendConformance


class TestRing(BackendConformance):
    """Also on four ranks: pieces of unequal length travel between neighbours that differ."""

    backend = "ring"
    sizes = (1, 2, 4)
