"""What every test gets."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Before torch is imported: where several processes share the cores, OpenMP's threads mostly wait for one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from distributed.launch.fork_server import ForkServer
from distributed.launch.forked import ADDRESS
from tests.support import tiers
from tests.support.fast import Fast, NeedsMark
from tests.support.forking_python import PRELOAD, write_forking_python
from tests.support.needs import Needs
from tests.support.recorded_times import LongestFirst, Recorder

# Collecting makes a million objects that all stay: walking them takes longer than making them.
gc.disable()

MakeDistribution = Callable[..., Path]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    parser.addoption("--fast", action="store_true", help="Leave out most tests that start processes.")
    parser.addoption("--record-times", type=Path, metavar="FILE", help="Append the seconds of every test.")
    tiers.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugins of the suite."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A shell script starts commands with & so; what the tests start, and interrupt, would ignore it, too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(NeedsMark())
    config.pluginmanager.register(tiers.Tiers(config))
    config.pluginmanager.register(Needs())
    if config.getoption("--fast"):
        config.pluginmanager.register(Fast())
    if hasattr(config, "workerinput"):
        return
    if config.pluginmanager.has_plugin("dsession"):
        config.pluginmanager.register(LongestFirst())
    if path := config.getoption("--record-times"):
        config.pluginmanager.register(Recorder(path))


def pytest_collection_finish() -> None:
    """Exclude what was collected from later garbage collections."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Forks ranks and commands of the tests, which would import torch and the like for seconds."""
    with ForkServer(["distributed.testing.preload:torch_ranks"]) as server:
        yield server


@pytest.fixture(scope="session")
def forking_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An executable that forks, for programs that start Python themselves, in a folder for PATH."""
    return write_forking_python(tmp_path_factory.mktemp("forking"))


@pytest.fixture(scope="session", autouse=True)
def _address_of_the_fork_server(fork_server: ForkServer) -> Iterator[None]:
    """Fixtures of modules, which start processes before a test's own environment is made, find it, too."""
    os.environ[ADDRESS] = fork_server.address
    yield
    del os.environ[ADDRESS]


@pytest.fixture(autouse=True)
def _own_environment(request: pytest.FixtureRequest, fork_server: ForkServer) -> Iterator[None]:
    """Put the environment back: MLflow, for one, exports the store it was last pointed at."""
    before = dict(os.environ)
    if request.node.get_closest_marker("real_start") is None:
        os.environ[ADDRESS] = fork_server.address
    else:
        os.environ.pop(ADDRESS, None)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def ray_cluster(forking_python: Path) -> Iterator[None]:
    """A Ray cluster on this host for a module's tests, its CPUs enough for several runs.

    Its workers are forks: each would import torch, pandas and pyarrow for seconds.
    """
    import logging

    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(forking_python.with_name("ray-python")))
        patch.setenv(PRELOAD, "pandas pyarrow.fs fsspec")
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        patch.setenv("RAY_worker_niceness", "0")
        ray.init(
            address="local",
            num_cpus=16,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    yield
    ray.shutdown()


@pytest.fixture
def make_distribution(tmp_path: Path) -> MakeDistribution:
    """Installs a real, tiny distribution under tmp_path/site and returns that folder."""

    def make(
        name: str, modules: dict[str, str] | None = None, entry_points: str = "", top_level: str = ""
    ) -> Path:
        site = tmp_path / "site"
        info = site / f"{name.replace('-', '_')}-1.2.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(entry_points)
        (info / "top_level.txt").write_text(top_level)
        for module, source in (modules or {}).items():
            (site / f"{module}.py").write_text(source)
        return site

    return make
