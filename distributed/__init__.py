"""Same config, same training: on another backend, another number of ranks, after a crash.

Public names are loaded when first used, so that ``import distributed`` imports no framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from distributed._moved import install
from distributed._version import __version__

if TYPE_CHECKING:
    from distributed.callbacks import EarlyStopping
    from distributed.communication.custom_communication import CustomCommunication
    from distributed.communication.manual_compression import (
        GradientCompression,
        compress_gradient,
        random_sparse,
    )
    from distributed.config import DistributedConfig, Section
    from distributed.errors import Preempted, UserError, WorkerError
    from distributed.interfaces.backend import Backend, MicroBatch, StepResult, Window
    from distributed.interfaces.backend_spec import BackendSpec, Capabilities
    from distributed.interfaces.callback import Band, Callback
    from distributed.interfaces.history import History
    from distributed.interfaces.launcher import Launcher
    from distributed.interfaces.placement import World
    from distributed.interfaces.tracker import Tracker, TrackerSpec
    from distributed.launch.own_loop import cleanup_distributed, setup_distributed, setup_horovod
    from distributed.operations.bench.profile import profile_communication, profile_communication_overhead
    from distributed.operations.tuning.tuner import DistributedTuner
    from distributed.parallel.layers import ColumnParallelLinear, RowParallelLinear, TensorParallelModel
    from distributed.parallel.microbatches import MicrobatchPipelineTrainer
    from distributed.planner.estimates.quick_answers import (
        choose_parallelism_strategy,
        estimate_memory,
        scaling_efficiency,
    )
    from distributed.planning import plan
    from distributed.rank_trainers import (
        AdvancedDistributedTrainer,
        DistributedTrainer,
        HybridParallelTrainer,
        OverlappedTrainer,
    )
    from distributed.registry.hookspecs import hookimpl
    from distributed.trainer import Trainer
    from distributed.trainers import (
        DeepSpeedTrainer,
        FSDPTrainer,
        HorovodTrainer,
        PyTorchDDPTrainer,
        RayTrainer,
        ShardingStrategy,
        TensorFlowDistributedTrainer,
    )
    from distributed.training.process_group_backend import ProcessGroupBackend
    from distributed.training.torch_backend import StepModule, TorchBackend

install()

_NAMES = {
    "distributed.callbacks": ("EarlyStopping",),
    "distributed.communication.custom_communication": ("CustomCommunication",),
    "distributed.communication.manual_compression": (
        "GradientCompression",
        "compress_gradient",
        "random_sparse",
    ),
    "distributed.config": ("DistributedConfig", "Section"),
    "distributed.errors": ("Preempted", "UserError", "WorkerError"),
    "distributed.interfaces.backend": ("Backend", "MicroBatch", "StepResult", "Window"),
    "distributed.interfaces.backend_spec": ("BackendSpec", "Capabilities"),
    "distributed.interfaces.callback": ("Band", "Callback"),
    "distributed.interfaces.history": ("History",),
    "distributed.interfaces.launcher": ("Launcher",),
    "distributed.interfaces.placement": ("World",),
    "distributed.interfaces.tracker": ("Tracker", "TrackerSpec"),
    "distributed.launch.own_loop": ("cleanup_distributed", "setup_distributed", "setup_horovod"),
    "distributed.operations.bench.profile": ("profile_communication", "profile_communication_overhead"),
    "distributed.operations.tuning.tuner": ("DistributedTuner",),
    "distributed.planner.estimates.quick_answers": (
        "choose_parallelism_strategy",
        "estimate_memory",
        "scaling_efficiency",
    ),
    "distributed.planning": ("plan",),
    "distributed.parallel.layers": ("ColumnParallelLinear", "RowParallelLinear", "TensorParallelModel"),
    "distributed.parallel.microbatches": ("MicrobatchPipelineTrainer",),
    "distributed.rank_trainers": (
        "AdvancedDistributedTrainer",
        "DistributedTrainer",
        "HybridParallelTrainer",
        "OverlappedTrainer",
    ),
    "distributed.registry.hookspecs": ("hookimpl",),
    "distributed.trainer": ("Trainer",),
    "distributed.trainers": (
        "DeepSpeedTrainer",
        "FSDPTrainer",
        "HorovodTrainer",
        "PyTorchDDPTrainer",
        "RayTrainer",
        "ShardingStrategy",
        "TensorFlowDistributedTrainer",
    ),
    "distributed.training.process_group_backend": ("ProcessGroupBackend",),
    "distributed.training.torch_backend": ("StepModule", "TorchBackend"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = [
    "AdvancedDistributedTrainer",
    "Backend",
    "BackendSpec",
    "Band",
    "Callback",
    "Capabilities",
    "ColumnParallelLinear",
    "CustomCommunication",
    "DeepSpeedTrainer",
    "DistributedConfig",
    "DistributedTrainer",
    "DistributedTuner",
    "EarlyStopping",
    "FSDPTrainer",
    "GradientCompression",
    "History",
    "HorovodTrainer",
    "HybridParallelTrainer",
    "Launcher",
    "MicroBatch",
    "MicrobatchPipelineTrainer",
    "OverlappedTrainer",
    "Preempted",
    "ProcessGroupBackend",
    "PyTorchDDPTrainer",
    "RayTrainer",
    "RowParallelLinear",
    "Section",
    "ShardingStrategy",
    "StepModule",
    "StepResult",
    "TensorFlowDistributedTrainer",
    "TensorParallelModel",
    "TorchBackend",
    "Tracker",
    "TrackerSpec",
    "Trainer",
    "UserError",
    "Window",
    "WorkerError",
    "World",
    "__version__",
    "choose_parallelism_strategy",
    "cleanup_distributed",
    "compress_gradient",
    "estimate_memory",
    "hookimpl",
    "plan",
    "profile_communication",
    "profile_communication_overhead",
    "random_sparse",
    "scaling_efficiency",
    "setup_distributed",
    "setup_horovod",
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
