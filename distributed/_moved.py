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


def _moves(old: str, new: str, modules: str) -> dict[str, str]:
    """``{old.a: new.b}`` for each word ``a=b`` of `modules`; a word alone keeps its name."""
    pairs = (word.split("=") for word in modules.split())
    return {f"{old}.{pair[0]}": f"{new}.{pair[-1]}" for pair in pairs}


MODULES = {
    **_moves("distributed", "distributed.commands", "bundled"),
    **_moves("distributed", "distributed.communication", "joined=environment rendezvous transport=task_file"),
    **_moves("distributed", "distributed.launch", "supervisor worker=rank_process"),
    **_moves("distributed", "distributed.operations.tuning", "tuner"),
    **_moves("distributed", "distributed.planner", "batch choice=backend_choice places=hosts plan=resolve"),
    **_moves("distributed", "distributed.registry", "hookspecs plugin_manager=catalog"),
    **_moves(
        "distributed",
        "distributed.resilience",
        "accounts=failure_messages blame=hang_diagnosis divergence elastic failures=failure_reports "
        "host_watch=host_heartbeat journal=phase_journal membership=elastic_hosts preemption "
        "stacks=stack_dumps watch=rank_monitor watcher=monitor_process",
    ),
    **_moves("distributed", "distributed.system", "garbage=garbage_collection network=addresses"),
    **_moves(
        "distributed",
        "distributed.training",
        "loop mixins objective optim=optimizers process_group=process_group_backend seeding "
        "stepper=manual_step torch_backend torch_framework",
    ),
    **_moves("distributed.bundled", "distributed.commands.bundled", "digits scaling=random_network"),
    **_moves("distributed.config", "distributed_backends.deepspeed", "deepspeed=native_config"),
    **_moves("distributed.mixins", "distributed.communication", "group=process_group"),
    **_moves(
        "distributed.mixins",
        "distributed.training",
        "events=callback_runner recording=step_records resuming streams=resuming timing=phase_timers "
        "validation",
    ),
    **_moves(
        "distributed.mixins",
        "distributed.training.mixins",
        "accumulation checkpointing precision tracking",
    ),
    **_moves(
        "distributed.testing",
        "distributed.testing",
        "plugin=pytest_plugin pool=rank_pool problem=reference_problem saved_state=checkpoint_compare "
        "tensorflow_bench=tensorflow_workbench torch_bench=torch_workbench",
    ),
    **_moves(
        "distributed.testing",
        "distributed.testing.contracts",
        "claim_contracts=claim failure_contracts=failure run_contracts=run step_contracts=step",
    ),
    **_moves("distributed.testing", "distributed.testing.parity", "diagnosis parity_table=table"),
    **_moves(
        "distributed_backends",
        "distributed_backends",
        "deepspeed_backend=deepspeed.backend fsdp2=fsdp.backend horovod_torch=horovod.backend "
        "pytorch_ddp=ddp.hooks ray_launcher=ray.launcher ray_tune=ray.tune.engine "
        "tensorflow_backend=tensorflow.backend",
    ),
    **_moves(
        "distributed_plugins",
        "distributed_plugins",
        "monitor=manual_monitors record=run_record sketches=sketch_sync",
    ),
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
    "distributed.training.torch_backend": {"alike": "group_by_dtype"},
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


class _Callable(ModuleType):
    """An old module whose name is a public function now: the import sets it as that attribute."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return sys.modules["distributed"].__getattr__(self.__name__.rpartition(".")[2])(*args, **kwargs)


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
        package, _, name = module.__name__.rpartition(".")
        if package == "distributed" and name in sys.modules["distributed"].__all__:
            module.__class__ = _Callable


def install() -> None:
    """Let old paths be imported in this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
