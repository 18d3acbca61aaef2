"""Same config, same training: on another backend, another number of ranks, after a crash.

Public names are loaded when first used, so that ``import distributed`` imports no framework.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

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
    from distributed.launch.model_file import async_checkpoint
    from distributed.launch.own_engine import DeepSpeedDilatedAttentionEngine
    from distributed.launch.own_loop import cleanup_distributed, setup_distributed, setup_horovod
    from distributed.launch.split_settings import split_settings
    from distributed.operations.bench.profile import profile_communication, profile_communication_overhead
    from distributed.operations.tuning.tuner import DistributedTuner
    from distributed.parallel.layers import ColumnParallelLinear, RowParallelLinear, TensorParallelModel
    from distributed.parallel.microbatches import MicrobatchPipelineTrainer
    from distributed.planner.estimates.quick_answers import (
        choose_parallelism_strategy,
        estimate_memory,
        predict_memory,
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

_NAMES = {
    "distributed.callbacks": ("EarlyStopping",),
    "distributed.communication.custom_communication": ("CustomCommunication",),
    "distributed.communication.manual_compression": (
        "GradientCompression",
        "compress_gradient",
        "random_sparse",
    ),
    "distributed.launch.model_file": ("async_checkpoint",),
    "distributed.config": ("DistributedConfig", "Section"),
    "distributed.errors": ("Preempted", "UserError", "WorkerError"),
    "distributed.interfaces.backend": ("Backend", "MicroBatch", "StepResult", "Window"),
    "distributed.interfaces.backend_spec": ("BackendSpec", "Capabilities"),
    "distributed.interfaces.callback": ("Band", "Callback"),
    "distributed.interfaces.history": ("History",),
    "distributed.interfaces.launcher": ("Launcher",),
    "distributed.interfaces.placement": ("World",),
    "distributed.interfaces.tracker": ("Tracker", "TrackerSpec"),
    "distributed.launch.own_engine": ("DeepSpeedDilatedAttentionEngine",),
    "distributed.launch.own_loop": ("cleanup_distributed", "setup_distributed", "setup_horovod"),
    "distributed.launch.split_settings": ("split_settings",),
    "distributed.operations.bench.profile": ("profile_communication", "profile_communication_overhead"),
    "distributed.operations.tuning.tuner": ("DistributedTuner",),
    "distributed.planner.estimates.quick_answers": (
        "choose_parallelism_strategy",
        "estimate_memory",
        "predict_memory",
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
_KERNELS = (
    "BlockSparseRingDistributedDilatedAttention",
    "DistributedImprovedMultiheadDilatedAttention",
    "DistributedMultiheadDilatedAttention",
    "DistributedSketchedModel",
    "PipelineParallelSketchedModel",
    "RingDistributedDilatedAttention",
    "SKLinear",
    "TensorParallelSKLinear",
    "create_distributed_model",
)
_ELSEWHERE = {
    "distributed_kernels": _KERNELS,
    "distributed_plugins.manual_monitors": (
        "DistributedMetricsCollector",
        "PerformanceMonitor",
        "monitor_memory",
    ),
}
"""Public names of our other packages, which guides to distributed training use: found here as well."""

_REPLACED = {
    **dict.fromkeys(
        ("allreduce_example", "allgather_example", "broadcast_example"),
        "Call setup_distributed(), then torch.distributed.all_reduce, all_gather or broadcast",
    ),
    "create_dataloader": "Give Trainer.fit a torch DataLoader: it divides the samples between the ranks",
    "train_distributed": "Trainer.fit starts the ranks and trains",
    "profile_training_step": "Set profile.enabled=true: a trace and a table of each rank",
    "gpipe_forward": "Set parallel.pipeline and parallel.schedule=gpipe, or call"
    " MicrobatchPipelineTrainer(model, num_microbatches).forward_backward_pipeline() in one process",
    "MixedPrecision": "FSDPTrainer(mixed_precision=) takes torch.distributed.fsdp.MixedPrecision",
}
"""Names of guides to distributed training that are no names of ours -> what to do instead."""

_HOMES = {name: home for home, names in (*_NAMES.items(), *_ELSEWHERE.items()) for name in names}

__all__ = [
    "AdvancedDistributedTrainer",
    "Backend",
    "BackendSpec",
    "Band",
    "Callback",
    "Capabilities",
    "ColumnParallelLinear",
    "CustomCommunication",
    "DeepSpeedDilatedAttentionEngine",
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
    "async_checkpoint",
    "choose_parallelism_strategy",
    "cleanup_distributed",
    "compress_gradient",
    "estimate_memory",
    "hookimpl",
    "plan",
    "predict_memory",
    "profile_communication",
    "profile_communication_overhead",
    "random_sparse",
    "scaling_efficiency",
    "setup_distributed",
    "setup_horovod",
    "split_settings",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        advice = _advice(name)
        # `from distributed import name` would replace the text of an AttributeError by one of its own.
        if advice and sys._getframe(1).f_code.co_name == "_handle_fromlist":
            raise ImportError(f"distributed has no {name}.{advice}", name="distributed")
        raise AttributeError(f"module 'distributed' has no attribute {name!r}{advice and '.' + advice}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def _advice(name: str) -> str:
    """Advice for a name that is none, after a space; empty for other attributes and modules."""
    if name in _REPLACED:
        return f" {_REPLACED[name]}."
    if name.startswith("_") or find_spec(f"distributed.{name}") is not None:
        return ""
    from distributed.errors import did_you_mean

    return did_you_mean(name, [*_HOMES, *_REPLACED])


def __dir__() -> list[str]:
    return sorted(__all__)
