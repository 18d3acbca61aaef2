"""The kit against a backend named on the command line.

::

    pytest --pyargs distributed.testing --distributed-backend NAME
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from distributed.config import parse_assignments
from distributed.errors import UserError
from distributed.registry.catalog import get_catalog, require
from distributed.testing.conformance import BackendConformance
from distributed.testing.rank_pool import RankPool


class Settings(NamedTuple):
    """Values of the options: see `Suite` for the names."""

    backend: str
    sizes: tuple[int, ...]
    options: dict[str, Any]
    pooled: bool


def settings(config: pytest.Config) -> Settings:
    """Read the options.

    Raises:
        UserError: no backend is named, none is called that, or it is not installed.
    """
    name = config.getoption("--distributed-backend")
    if not name:
        raise UserError(
            "the conformance kit needs a backend to test",
            field="--distributed-backend",
            allowed=", ".join(sorted(get_catalog().backends)),
            remedy="pytest --pyargs distributed.testing --distributed-backend NAME",
        )
    spec = get_catalog().backend(name)
    require(spec.requires, f"backend '{name}'", spec.install_hint)
    ranks = config.getoption("--distributed-ranks")
    usual = "1,2,3" if spec.capabilities.multi_process else "1"
    options = parse_assignments(config.getoption("--distributed-set"))
    return Settings(
        name, _numbers(ranks or usual), options, not config.getoption("--distributed-own-launcher")
    )


def _numbers(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise UserError(
            "not numbers of ranks", field="--distributed-ranks", got=text, allowed="e.g. 2 or 1,2,4"
        )
    return tuple(int(word) for word in words)


class TestNamedBackend(BackendConformance):
    """The contracts, for the backend named on the command line."""

    @pytest.fixture(autouse=True)
    def _use_pool(self, rank_pool: RankPool, pytestconfig: pytest.Config) -> None:
        self.pool = rank_pool
        found = settings(pytestconfig)
        self.backend, self.sizes = found.backend, found.sizes
        self.options, self.pooled = found.options, found.pooled
