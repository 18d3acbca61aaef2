"""Seeds derived from other numbers."""

from __future__ import annotations

import hashlib

__all__ = ["mix"]


def mix(*numbers: int | str) -> int:
    """A 63-bit seed that depends on every one of `numbers` and their order."""
    text = ",".join(str(number) for number in numbers).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
