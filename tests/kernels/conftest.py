"""What the tests of the kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.gloo_ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four ranks in one process group, started once."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
