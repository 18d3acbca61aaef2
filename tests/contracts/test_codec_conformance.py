"""The kit with gradient codecs: all contracts where a codec sends everything, most where it does not.

`tests/campaigns/codec_conformance.py` has the other codecs, and more ranks.
"""

from __future__ import annotations

from distributed.testing.conformance import BackendConformance
from distributed.testing.contracts.refusal import RefusalContracts
from distributed.testing.contracts.step import StepContracts
from tests.contracts.codec_backends import EVERYTHING, LOSSY, WithCodec, fields


class TestEverythingByTopK(WithCodec, StepContracts, RefusalContracts):
    """Steps and refusals as without a codec."""

    sizes = (2,)
    options = fields("top-k", EVERYTHING["top-k"])


class TestInt8(WithCodec, BackendConformance):
    """Each element is rounded."""

    sizes = (3,)
    options = fields("int8", LOSSY["int8"])
    lossy = True


class TestTopK(WithCodec, BackendConformance):
    """Most elements wait for a later step."""

    sizes = (2,)
    options = fields("top-k", LOSSY["top-k"])
    lossy = True
