"""What every test gets."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """Put the environment back: MLflow, for one, exports the store it was last pointed at."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
