"""What every test gets."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from distributed.fork_server import ADDRESS, ForkServer


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Forks ranks and commands of the tests, which would import torch and the like for seconds."""
    with ForkServer(["distributed.testing.preload:torch_ranks"]) as server:
        yield server


@pytest.fixture(autouse=True)
def _own_environment(request: pytest.FixtureRequest, fork_server: ForkServer) -> Iterator[None]:
    """Put the environment back: MLflow, for one, exports the store it was last pointed at."""
    before = dict(os.environ)
    if request.node.get_closest_marker("real_start") is None:
        os.environ[ADDRESS] = fork_server.address
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
