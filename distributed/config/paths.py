"""Which places are folders of a host."""

from __future__ import annotations

__all__ = ["is_object_store", "local_path"]


def local_path(place: str | None) -> str | None:
    """`place` as a path of a host, ``file://`` taken off; None for an object store's URL, and for None."""
    scheme, is_url, path = (place or "").partition("://")
    if not is_url:
        return place
    return path if scheme.lower() in ("file", "local") else None


def is_object_store(place: str | None) -> bool:
    """Whether `place` is a URL of something that is no folder."""
    return place is not None and local_path(place) is None
