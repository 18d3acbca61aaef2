"""Models of other libraries train as in plain PyTorch under each backend, or are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from distributed.testing.rank_pool import RankPool
from tests.campaigns.backends import BACKENDS
from tests.campaigns.zoo.entry import compare
from tests.campaigns.zoo.table import ENTRIES

pytestmark = pytest.mark.slow

PADDED = ["GPT-2", "Llama", "Llama, gradient checkpointing", "BERT, masked words", "T5"]
"""Models of transformers with ragged samples: no training_step, within 1e-6 of plain PyTorch."""
OTHERS = [("serial", name) for name in ENTRIES if name not in PADDED]
OTHERS += [("fsdp 2", name) for name in ENTRIES if name not in PADDED]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with closing(RankPool()) as ranks:
        yield ranks


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PADDED)
def test_padded_text_needs_no_training_step(name: str, backend: str, pool: RankPool) -> None:
    assert ENTRIES[name].lines == 0
    found = compare(ENTRIES[name], backend, pool)
    assert found.refused is None
    assert found.distance is not None
    assert found.distance < 1e-6
    assert found.moved > 1e-2


@pytest.mark.parametrize(("backend", "name"), OTHERS)
def test_a_model_is_trained_exactly_or_refused(backend: str, name: str, pool: RankPool) -> None:
    found = compare(ENTRIES[name], backend, pool)
    assert found.passes(ENTRIES[name]), found
