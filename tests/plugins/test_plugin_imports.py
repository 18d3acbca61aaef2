"""Plugins are found through their entry points, and importing them brings no framework."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest

pytestmark = pytest.mark.starts_processes

SCRIPT = """
    import sys
    from distributed.config import DistributedConfig
    from distributed.tracking import trackers
    from distributed.training import phase_timers
    from distributed.registry.catalog import build_catalog
    from importlib.metadata import entry_points
    import distributed_plugins.manual_monitors
    catalog = build_catalog(found=entry_points(group="distributed.plugins"))
    config = DistributedConfig(
        mlflow_tracking=True, tensorboard=True, profile={"enabled": True}, tracking={"progress": "on"}
    )
    callbacks = [c for found in catalog.manager.hook.register_callbacks(config=config) for c in found]
    contexts = trackers.capture_contexts(config, catalog)
    print(catalog.broken, contexts)
    print(sorted(spec.name for spec in catalog.trackers if spec.enabled(config)))
    print(sorted(type(callback).__name__ for callback in callbacks))
    heavy = {"torch", "mlflow", "tensorboard", "tensorflow", "numpy", "rich", "psutil", "sqlalchemy"}
    print(sorted(heavy & set(sys.modules)))
"""


def test_plugins_register_without_importing_a_framework():
    command = [sys.executable, "-c", dedent(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "[] {}",
        "['mlflow', 'tensorboard']",
        "['Profiler', 'ProgressBar']",
        "[]",
    ]
