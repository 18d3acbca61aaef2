"""Tables of the gradient codecs, from the catalog."""

from __future__ import annotations

from distributed.config.compression import CompressionSection
from distributed.interfaces.codec import dense_bytes
from distributed.registry.catalog import get_catalog
from docs.site.markdown import table

__all__ = ["bytes_table", "codec_backends"]

_SHAPE, _ITEMSIZE = (1024, 1024), 4
_WORLDS = (2, 4, 8)


def bytes_table() -> str:
    """What each rank sends of a float32 gradient of 1024 x 1024 with the default options."""
    options = CompressionSection()
    dense = [dense_bytes(_SHAPE, _ITEMSIZE, world) for world in _WORLDS]
    rows = [["`none`", *(f"{nbytes / 1e6:.3g} MB" for nbytes in dense)]]
    for name, spec in sorted(get_catalog().codecs.items()):
        own = [spec.wire_bytes(_SHAPE, _ITEMSIZE, options, world) for world in _WORLDS]
        cells = [f"{a / 1e6:.3g} MB ({b / a:.3g} x)" for a, b in zip(own, dense, strict=True)]
        rows.append([f"`{name}`", *cells])
    return table(rows, "codec", *(f"{world} ranks" for world in _WORLDS))


def codec_backends(backends: tuple[str, ...]) -> str:
    """Which backends have which codecs."""
    specs = [get_catalog().backends[name] for name in backends]
    rows = [
        [f"`{name}`", *("yes" if codec.exchanges <= s.capabilities.exchanges else "" for s in specs)]
        for name, codec in sorted(get_catalog().codecs.items())
    ]
    return table(rows, "codec", *(f"`{name}`" for name in backends))
