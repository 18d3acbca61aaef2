"""Twenty of the generated modules; the whole campaign is `python -m tests.campaigns.generated_modules`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest

from distributed.testing.rank_pool import RankPool
from tests.campaigns.generated_modules import try_all

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with closing(RankPool()) as ranks:
        yield ranks


@pytest.mark.parametrize("backend", ["serial", "ddp 2", "fsdp 2", "zero 2", "horovod 2"])
def test_a_module_is_trained_exactly_or_refused(
    backend: str, pool: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    found: Counter[str] = Counter()
    assert try_all(backend, 20, 0, pool, found) == 0, capsys.readouterr().err
    assert found["exact"] >= 5
