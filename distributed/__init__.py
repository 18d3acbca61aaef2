"""Same config, same training: on another backend, another number of ranks, after a crash.

Public names are loaded when first used, so that ``import distributed`` imports no framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from distributed._version import __version__

if TYPE_CHECKING:
    from distributed.callbacks import EarlyStopping
    from distributed.config import DistributedConfig
    from distributed.errors import Preempted, UserError, WorkerError
    from distributed.interfaces.callback import Band, Callback
    from distributed.interfaces.history import History
    from distributed.operations.tuning.tuner import DistributedTuner
    from distributed.trainer import Trainer
    from distributed.trainers import (
        DeepSpeedTrainer,
        FSDPTrainer,
        HorovodTrainer,
        PyTorchDDPTrainer,
        RayTrainer,
        TensorFlowDistributedTrainer,
    )

_HOMES = {
    "Band": "distributed.interfaces.callback",
    "Callback": "distributed.interfaces.callback",
    "DeepSpeedTrainer": "distributed.trainers",
    "DistributedConfig": "distributed.config",
    "DistributedTuner": "distributed.operations.tuning.tuner",
    "EarlyStopping": "distributed.callbacks",
    "FSDPTrainer": "distributed.trainers",
    "History": "distributed.interfaces.history",
    "HorovodTrainer": "distributed.trainers",
    "Preempted": "distributed.errors",
    "PyTorchDDPTrainer": "distributed.trainers",
    "RayTrainer": "distributed.trainers",
    "TensorFlowDistributedTrainer": "distributed.trainers",
    "Trainer": "distributed.trainer",
    "UserError": "distributed.errors",
    "WorkerError": "distributed.errors",
}

__all__ = [
    "Band",
    "Callback",
    "DeepSpeedTrainer",
    "DistributedConfig",
    "DistributedTuner",
    "EarlyStopping",
    "FSDPTrainer",
    "History",
    "HorovodTrainer",
    "Preempted",
    "PyTorchDDPTrainer",
    "RayTrainer",
    "TensorFlowDistributedTrainer",
    "Trainer",
    "UserError",
    "WorkerError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'distributed' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
