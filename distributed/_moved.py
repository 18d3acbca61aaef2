"""Old module paths, kept for one release: each name that is used through them warns and is found."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["MODULES", "NAMES", "RENAMED", "install", "moved_names"]

MODULES = {
    "distributed.accounts": "distributed.resilience.failure_messages",
    "distributed.batch": "distributed.planner.batch",
    "distributed.config.deepspeed": "distributed_backends.deepspeed.native_config",
    "distributed.blame": "distributed.resilience.hang_diagnosis",
    "distributed.bundled": "distributed.commands.bundled",
    "distributed.bundled.digits": "distributed.commands.bundled.digits",
    "distributed.bundled.scaling": "distributed.commands.bundled.random_network",
    "distributed.choice": "distributed.planner.backend_choice",
    "distributed.divergence": "distributed.resilience.divergence",
    "distributed.elastic": "distributed.resilience.elastic",
    "distributed.failures": "distributed.resilience.failure_reports",
    "distributed.garbage": "distributed.system.garbage_collection",
    "distributed.hookspecs": "distributed.registry.hookspecs",
    "distributed.host_watch": "distributed.resilience.host_heartbeat",
    "distributed.joined": "distributed.communication.environment",
    "distributed.journal": "distributed.resilience.phase_journal",
    "distributed.loop": "distributed.training.loop",
    "distributed.membership": "distributed.resilience.elastic_hosts",
    "distributed.mixins": "distributed.training.mixins",
    "distributed.mixins.accumulation": "distributed.training.mixins.accumulation",
    "distributed.mixins.checkpointing": "distributed.training.mixins.checkpointing",
    "distributed.mixins.events": "distributed.training.callback_runner",
    "distributed.mixins.group": "distributed.communication.process_group",
    "distributed.mixins.precision": "distributed.training.mixins.precision",
    "distributed.mixins.recording": "distributed.training.step_records",
    "distributed.mixins.resuming": "distributed.training.resuming",
    "distributed.mixins.streams": "distributed.training.resuming",
    "distributed.mixins.timing": "distributed.training.phase_timers",
    "distributed.mixins.tracking": "distributed.training.mixins.tracking",
    "distributed.mixins.validation": "distributed.training.validation",
    "distributed.network": "distributed.system.addresses",
    "distributed.objective": "distributed.training.objective",
    "distributed.optim": "distributed.training.optimizers",
    "distributed.places": "distributed.planner.hosts",
    "distributed.plan": "distributed.planner.resolve",
    "distributed.plugin_manager": "distributed.registry.catalog",
    "distributed.preemption": "distributed.resilience.preemption",
    "distributed.process_group": "distributed.training.process_group_backend",
    "distributed.rendezvous": "distributed.communication.rendezvous",
    "distributed.seeding": "distributed.training.seeding",
    "distributed.stacks": "distributed.resilience.stack_dumps",
    "distributed.stepper": "distributed.training.manual_step",
    "distributed.supervisor": "distributed.launch.supervisor",
    "distributed.testing.claim_contracts": "distributed.testing.contracts.claim",
    "distributed.testing.diagnosis": "distributed.testing.parity.diagnosis",
    "distributed.testing.failure_contracts": "distributed.testing.contracts.failure",
    "distributed.testing.parity_table": "distributed.testing.parity.table",
    "distributed.testing.plugin": "distributed.testing.pytest_plugin",
    "distributed.testing.pool": "distributed.testing.rank_pool",
    "distributed.testing.problem": "distributed.testing.reference_problem",
    "distributed.testing.run_contracts": "distributed.testing.contracts.run",
    "distributed.testing.saved_state": "distributed.testing.checkpoint_compare",
    "distributed.testing.step_contracts": "distributed.testing.contracts.step",
    "distributed.testing.tensorflow_bench": "distributed.testing.tensorflow_workbench",
    "distributed.testing.torch_bench": "distributed.testing.torch_workbench",
    "distributed.torch_backend": "distributed.training.torch_backend",
    "distributed.torch_framework": "distributed.training.torch_framework",
    "distributed.transport": "distributed.communication.task_file",
    "distributed.tuner": "distributed.operations.tuning.tuner",
    "distributed.watch": "distributed.resilience.rank_monitor",
    "distributed.watcher": "distributed.resilience.monitor_process",
    "distributed.worker": "distributed.launch.rank_process",
    "distributed_backends.deepspeed_backend": "distributed_backends.deepspeed.backend",
    "distributed_backends.fsdp2": "distributed_backends.fsdp.backend",
    "distributed_backends.horovod_torch": "distributed_backends.horovod.backend",
    "distributed_backends.pytorch_ddp": "distributed_backends.ddp.hooks",
    "distributed_backends.ray_launcher": "distributed_backends.ray.launcher",
    "distributed_backends.ray_tune": "distributed_backends.ray.tune.engine",
    "distributed_backends.tensorflow_backend": "distributed_backends.tensorflow.backend",
    "distributed_plugins.monitor": "distributed_plugins.manual_monitors",
    "distributed_plugins.record": "distributed_plugins.run_record",
    "distributed_plugins.sketches": "distributed_plugins.sketch_sync",
}
"""Old module -> where most of its names are now."""

NAMES = {
    "distributed.batch": {"BatchPlan": "distributed.interfaces.plan"},
    "distributed.config.sections": {
        "FSDPSection": "distributed_backends.fsdp.section",
        "HorovodSection": "distributed_backends.horovod.section",
        "RaySection": "distributed_backends.ray.section",
        "TensorFlowSection": "distributed_backends.tensorflow.section",
        "ZeroSection": "distributed_backends.deepspeed.section",
    },
    "distributed.elastic": dict.fromkeys(
        ("claim_directory", "newest_checkpoint"), "distributed.checkpoint.run_directory"
    ),
    "distributed.interfaces.backend": {
        **dict.fromkeys(("BackendSpec", "Capabilities"), "distributed.interfaces.backend_spec"),
        "World": "distributed.interfaces.placement",
    },
    "distributed.joined": {"Joined": "distributed.interfaces.placement"},
    "distributed.launch": {
        **dict.fromkeys(("LocalLauncher", "rank_envs"), "distributed.launch.local_launcher"),
        **dict.fromkeys(("Outcome", "run_script"), "distributed.launch.run"),
        "Rendezvous": "distributed.communication.rendezvous",
    },
    "distributed.plan": {
        **dict.fromkeys(("Facts", "Resources", "RunPlan"), "distributed.interfaces.plan"),
        "visible_gpus": "distributed.system.devices",
    },
    "distributed.stacks": dict.fromkeys(("Process", "children", "look_at"), "distributed.system.processes"),
    "distributed.testing.parity": dict.fromkeys(
        ("DTYPES", "Exercise", "Record", "Side", "parse_side", "record"), "distributed.testing.parity.measure"
    ),
    "distributed.transport": dict.fromkeys(
        ("private_folder", "write_private"), "distributed.system.private_files"
    ),
    "distributed_backends.ddp": {"DDPBackend": "distributed_backends.ddp.backend"},
}
"""Old module, or one that is there still -> names that are elsewhere now, and where."""

RENAMED = {
    "distributed.interfaces.placement": {"Joined": "LauncherEnvironment"},
    "distributed.launch.rank_process": {"RankJob": "RankPayload"},
    "distributed.launch.run": {"Outcome": "RunResult"},
    "distributed.resilience.elastic": {
        "Alone": "SingleHost",
        "Place": "HostSlot",
        "note_restarts": "write_restarts",
        "restarts_of": "read_restarts",
    },
    "distributed.resilience.elastic_hosts": {"Hosts": "ElasticHosts"},
    "distributed.resilience.failure_messages": {"crashed": "describe_crash", "stalled": "describe_stall"},
    "distributed.resilience.hang_diagnosis": {
        "Seen": "RankSnapshot",
        "Verdict": "Diagnosis",
        "Worker": "LoaderWorker",
        "judge": "diagnose",
    },
    "distributed.resilience.host_heartbeat": {"HostWatch": "HostHeartbeat"},
    "distributed.resilience.monitor_process": {
        "Observed": "MonitoredRank",
        "watch_beside": "run_monitor",
    },
    "distributed.resilience.phase_journal": {
        "follow": "instrument",
        "keep": "open_journal",
        "nowhere": "no_op",
        "stop_noting": "freeze_journal",
    },
    "distributed.resilience.preemption": {
        "ask": "record_signal",
        "asked": "received_signal",
        "hearing": "catch_signals",
        "held_back": "signals_blocked",
        "listen": "install_handlers",
    },
    "distributed.resilience.rank_monitor": {"Watch": "RankMonitor"},
    "distributed.resilience.stack_dumps": {"answer": "enable_dumps", "ask": "request_dump"},
    "distributed.system.processes": {"look_at": "process_info"},
}
"""Module -> old name -> new name, for names used through an old module path."""


def moved_names(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of `module`: finds the names that it held before, with a DeprecationWarning."""

    def find(name: str) -> Any:
        home = NAMES.get(module, {}).get(name) or MODULES.get(module)
        if home is None or name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        try:
            new = RENAMED.get(home, {}).get(name, name)
            value = getattr(import_module(home), new)
        except AttributeError:
            raise AttributeError(f"module {module!r} has no attribute {name!r}") from None
        public = "distributed" if name in sys.modules["distributed"].__all__ else home
        warnings.warn(
            f"{module}.{name} has moved: use `from {public} import {new}`. The old path will be removed"
            " in the next release.",
            DeprecationWarning,
            stacklevel=2,
        )
        return value

    return find


class _Finder(MetaPathFinder, Loader):
    """Makes modules for old paths; the last finder to be asked, so that a file always comes first."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        package = any(name.startswith(f"{fullname}.") for name in MODULES)
        return ModuleSpec(fullname, self, is_package=package)

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"The old path of `{MODULES[module.__name__]}`."
        module.__dict__["__getattr__"] = moved_names(module.__name__)


def install() -> None:
    """Let old paths be imported in this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
