"""What the tests in a browser share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.browser.browser import MISSING, Browser, started


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One headless Chromium for all tests; they are skipped where there is none, and fail where CI is set."""
    if MISSING:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(MISSING)
    with started() as browser:
        yield browser
