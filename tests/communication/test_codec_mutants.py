"""The kit for codecs can fail: every broken codec or exchange turns the test meant for it red."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from distributed.registry.catalog import get_catalog
from distributed.testing.conformance import CodecConformance
from distributed.training.compression import Compression
from tests.communication import test_codecs as sound
from tests.communication.codec_mutants import MUTANTS, CodecMutant

SOUND: dict[str, type[sound.BuiltIn]] = {
    kind.codec: kind for kind in (sound.TestInt8, sound.TestTopK, sound.TestRandomK, sound.TestPowerSGD)
}


@pytest.fixture
def registered(request: pytest.FixtureRequest) -> Iterator[CodecMutant]:
    mutant: CodecMutant = request.param
    codecs = get_catalog().codecs
    codecs[mutant.name] = mutant.spec
    yield mutant
    del codecs[mutant.name]


def run_kit(mutant: CodecMutant, **fields: Any) -> None:
    """The test that is meant to catch the mutant, on 3 ranks, or on those and 2."""
    sizes = (2, 3) if "another_number" in mutant.caught_by else (3,)
    kind = type("Kit", (SOUND[mutant.of],), {"sizes": sizes, **fields})
    getattr(kind(), mutant.caught_by)(*mutant.arguments)


@pytest.mark.parametrize("registered", MUTANTS, ids=lambda mutant: mutant.kind.__name__, indirect=True)
def test_a_mutant_is_caught(registered: CodecMutant) -> None:
    """And its sound form passes the same test."""
    run_kit(registered)
    broken: dict[str, Any] = {"codec": registered.name, "oracle": lambda kit: SOUND[registered.of]().oracle()}
    if issubclass(registered.kind, Compression):
        broken["compression"] = registered.kind
    with pytest.raises(AssertionError):
        run_kit(registered, **broken)


def test_every_test_of_the_kit_has_a_mutant() -> None:
    tests = {name for name in dir(CodecConformance) if name.startswith("test_")}
    assert tests == {mutant.caught_by for mutant in MUTANTS}
