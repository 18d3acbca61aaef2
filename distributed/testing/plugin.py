"""The pytest plugin: the ranks that tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from distributed.testing.pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Ranks that stay alive over the whole session; see `distributed.testing.pool.RankPool`."""
    from distributed.testing.pool import RankPool

    pool = RankPool()
    yield pool
    pool.close()
