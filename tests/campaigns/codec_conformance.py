"""The conformance kit for backends under every gradient codec.

    python -m pytest tests/campaigns/codec_conformance.py

Codecs that send everything keep all contracts; the others those that do not compare trained weights with the
oracle's. CI runs three of them (`tests/contracts/test_codec_conformance.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from distributed.errors import UserError
from distributed.registry.catalog import get_catalog
from distributed.testing.conformance import BackendConformance
from tests.contracts.codec_backends import EVERYTHING, LOSSY, WithCodec, fields


class Lossless(WithCodec, BackendConformance):
    """All contracts; a loss scale is refused."""

    __test__ = False
    sizes = (2, 3)

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_a_claimed_precision_is_used_and_stays_close(self, precision: str) -> None:
        """fp16 needs a loss scale, and codecs that leave out elements cannot send its values."""
        if precision == "bf16":
            super().test_a_claimed_precision_is_used_and_stays_close(precision)
            return
        with pytest.raises(UserError, match="cannot send values of a loss scale"):
            super().test_a_claimed_precision_is_used_and_stays_close(precision)


class Lossy(WithCodec, BackendConformance):
    """What depends on no weight."""

    __test__ = False
    sizes = (2, 3)
    lossy = True


def _class_of(base: type[Any], codec: str, options: Mapping[str, Any]) -> type[Any]:
    name = f"Test{base.__name__}{codec.title().replace('-', '')}"
    return type(
        name,
        (base,),
        {"__test__": True, "__module__": __name__, "options": MappingProxyType(fields(codec, options))},
    )


CLASSES = [_class_of(Lossless, *item) for item in EVERYTHING.items()]
CLASSES += [_class_of(Lossy, *item) for item in LOSSY.items()]
globals().update({kind.__name__: kind for kind in CLASSES})


def test_every_codec_is_here() -> None:
    assert {*LOSSY} == {*get_catalog().codecs}
