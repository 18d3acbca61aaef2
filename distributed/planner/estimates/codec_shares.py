"""How many bytes a gradient codec sends, relative to gradients that are sent as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache

from distributed.config.compression import CompressionSection
from distributed.interfaces.codec import DENSE, CodecSpec, dense_bytes

__all__ = ["codec_share"]

_ITEM = 4
"""Bytes of an element of a gradient."""


def codec_share(
    codecs: Mapping[str, CodecSpec], shapes: Iterable[tuple[int, ...]]
) -> Callable[[str, int], float]:
    """``(codec, ranks) ->`` bytes that a rank sends for gradients of `shapes`, relative to dense ones.

    Args:
        codecs: name -> codec, with its default options.
        shapes: of the gradients.
    """
    counted = Counter(shapes)

    @cache
    def share(codec: str, ranks: int) -> float:
        if codec == DENSE or ranks == 1:
            return 1.0
        section, spec = CompressionSection(codec=codec), codecs[codec]
        sent = sum(n * spec.wire_bytes(shape, _ITEM, section, ranks) for shape, n in counted.items())
        dense = sum(n * dense_bytes(shape, _ITEM, ranks) for shape, n in counted.items())
        return sent / dense if dense else 1.0

    return share
