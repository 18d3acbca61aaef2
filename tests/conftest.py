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


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster on this host for a module's tests, its CPUs enough for several runs."""
    import logging

    import ray

    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    yield
    ray.shutdown()
