"""Every pluggy hook. Hooks are coarse and only register; per-step work is a callback's."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from distributed.config import DistributedConfig
    from distributed.errors import WorkerError
    from distributed.interfaces.backend_spec import BackendSpec
    from distributed.interfaces.callback import Callback
    from distributed.interfaces.codec import CodecSpec
    from distributed.interfaces.history import History
    from distributed.interfaces.plan import RunPlan
    from distributed.interfaces.tracker import TrackerSpec

__all__ = ["PROJECT", "hookimpl", "hookspec"]

PROJECT = "distributed"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def register_backends() -> list[BackendSpec]:  # type: ignore[empty-body]
    """Backends this plugin brings. Import nothing heavy: the class is loaded when chosen."""


@hookspec
def register_sections() -> dict[str, str]:  # type: ignore[empty-body]
    """Sections of the configuration this plugin brings: name -> ``package.module:Class`` of a `Section`.
    The module is imported whenever plugins are listed, so it must import nothing heavy."""


@hookspec
def register_codecs() -> list[CodecSpec]:  # type: ignore[empty-body]
    """Gradient codecs this plugin brings. The class is loaded when a config selects it."""


@hookspec
def register_trackers() -> list[TrackerSpec]:  # type: ignore[empty-body]
    """Trackers this plugin brings. The class is loaded when a config enables it."""


@hookspec
def register_callbacks(config: DistributedConfig) -> list[Callback]:  # type: ignore[empty-body]
    """Callbacks to add to a run under `config`. Called in every rank."""


@hookspec
def register_commands(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add subcommands to the command line: set ``run=callable(args) -> exit code`` as a default."""


@hookspec
def check_plan(plan: RunPlan) -> list[str] | None:
    """Check a plan before any process starts: return notes for the user, or raise UserError to refuse it."""


@hookspec
def on_run_start(plan: RunPlan) -> None:
    """A run is about to start. Called in the process that called `fit`."""


@hookspec
def on_restart(plan: RunPlan, error: WorkerError) -> None:
    """All ranks are about to restart, because of `error`. Called in the caller's process of
    each host; a launcher that restarts ranks itself (Ray) does not call it."""


@hookspec
def on_run_end(plan: RunPlan, history: History | None, error: BaseException | None) -> None:
    """A run is over; `history` is None when it failed, and `error` is the reason. Called in the caller's
    process."""
