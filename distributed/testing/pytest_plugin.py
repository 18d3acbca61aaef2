"""The pytest plugin: the ranks that tests share, and the options of the kit's own run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from distributed.testing.rank_pool import RankPool

# What fails inside the contracts is shown with its values, as in a test file.
pytest.register_assert_rewrite(
    *(f"distributed.testing.contracts.{name}" for name in ("step", "run", "claim", "failure", "codec")),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of ``pytest --pyargs distributed.testing``."""
    group = parser.getgroup("distributed", "conformance of a backend: --pyargs distributed.testing")
    group.addoption("--distributed-backend", metavar="NAME", help="Backend to run the kit against.")
    group.addoption(
        "--distributed-ranks",
        metavar="N,N",
        help="Numbers of ranks to try. Default: 1,2,3, or 1 for a backend that is one process.",
    )
    group.addoption(
        "--distributed-set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="Configuration field for every run of the kit. Repeatable.",
    )
    group.addoption(
        "--distributed-own-launcher",
        action="store_true",
        help="Start new ranks for every run, as a user's does, instead of sharing them.",
    )


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Ranks that stay alive over the whole session; see `distributed.testing.rank_pool.RankPool`."""
    from distributed.testing.rank_pool import RankPool

    pool = RankPool()
    yield pool
    pool.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Report a wrong option once, instead of failing every test with it.

    Raises:
        pytest.UsageError: the kit's own tests were collected, and no usable backend was named.
    """
    modules = {item.module.__name__ for item in items if isinstance(item, pytest.Function)}
    if "distributed.testing.test_conformance" in modules:
        from distributed.errors import UserError
        from distributed.testing.test_conformance import settings

        try:
            settings(config)
        except UserError as error:
            raise pytest.UsageError(str(error)) from None
