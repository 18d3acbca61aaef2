"""What the tests in a browser share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.browser import MISSING, Browser, started
from tests.support.needs import leave_out


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One headless Chromium for all tests; they are skipped where there is none, and fail where CI is set."""
    if MISSING:
        leave_out(MISSING)
    with started() as browser:
        yield browser
