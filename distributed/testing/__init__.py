"""The conformance kit: the tests that every backend and every codec must pass. Shipped to third parties.

`BackendConformance` and `CodecConformance` are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed.testing.conformance import BackendConformance, CodecConformance

__all__ = ["BackendConformance", "CodecConformance"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from distributed.testing import conformance

    return getattr(conformance, name)
