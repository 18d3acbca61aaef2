"""Clusters: daemons, jobs and hosts start every process for real."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _address_of_the_fork_server() -> None:
    """A rank that is forked elsewhere would not belong to the job or the host that started it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test in this folder is one about starting."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("real_start")
