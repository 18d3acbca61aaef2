"""torch.profiler around a few steps of every rank: a chrome trace and a table."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed.config import DistributedConfig
from distributed.config.sections import ProfileSection
from distributed.interfaces.callback import Band, Callback, Context
from distributed.registry.hookspecs import hookimpl

__all__ = ["Profiler", "register_callbacks"]

logger = logging.getLogger("distributed")

WARMUP_STEPS = 1
TABLE_ROWS = 50


@hookimpl
def register_callbacks(config: DistributedConfig) -> list[Callback]:
    """The profiler, when `profile.enabled`."""
    return [Profiler(config.profile)] if config.profile.enabled else []


class Profiler(Callback):
    """Skip `skip_steps`, warm up for one step, record `steps`, then detach.

    Writes ``trace_rank<r>.json`` (for chrome://tracing or Perfetto) and ``table_rank<r>.txt``
    into `output_dir`, each whole or not at all. A run too short to fill the record writes
    the recorded steps, if any, and logs a warning.
    """

    band = Band.TRACK
    all_ranks = True

    def __init__(self, section: ProfileSection) -> None:
        self.section = section
        self._profile: Any = None
        self._rank = 0
        self._num_steps = 0

    def on_run_start(self, context: Context) -> None:
        """Start the profiler's schedule."""
        from torch import profiler

        self._rank, self._num_steps = context.world.rank, 0
        self._profile = profiler.profile(
            schedule=profiler.schedule(
                wait=self.section.skip_steps, warmup=WARMUP_STEPS, active=self.section.steps, repeat=1
            ),
            on_trace_ready=self._write,
            record_shapes=True,
        )
        self._profile.start()

    def on_step_end(self, context: Context) -> None:
        """Advance the profiler by a step."""
        if self._profile is None:
            return
        self._num_steps += 1
        self._profile.step()
        if self._num_steps == self._needed():
            self._stop()

    def on_run_end(self, context: Context, status: str) -> None:
        """Write what there is when the run was too short."""
        if self._profile is None:
            return
        recorded = max(0, self._num_steps - self.section.skip_steps - WARMUP_STEPS)
        if recorded == 0:
            self._profile.on_trace_ready = None  # do not write an empty trace
        self._stop()
        logger.warning(
            "profile: %d of %d steps were recorded on rank %d: the run took %d optimizer steps, and"
            " %d are needed (profile.skip_steps=%d, one to warm up, profile.steps=%d)",
            recorded,
            self.section.steps,
            self._rank,
            self._num_steps,
            self._needed(),
            self.section.skip_steps,
            self.section.steps,
        )

    def _needed(self) -> int:
        return self.section.skip_steps + WARMUP_STEPS + self.section.steps

    def _stop(self) -> None:
        self._profile.stop()
        self._profile = None

    def _write(self, profile: Any) -> None:
        folder = Path(self.section.output_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _atomically(folder / f"trace_rank{self._rank}.json", profile.export_chrome_trace)
            table = _table(profile)
            _atomically(folder / f"table_rank{self._rank}.txt", lambda path: Path(path).write_text(table))
        except OSError as error:
            logger.warning("profile: nothing could be written to %s: %s", folder, error)


def _table(profile: Any) -> str:
    averages = profile.key_averages()
    on_device = any(event.self_device_time_total for event in averages)
    order = "self_device_time_total" if on_device else "self_cpu_time_total"
    return str(averages.table(sort_by=order, row_limit=TABLE_ROWS))


def _atomically(target: Path, write: Callable[[str], object]) -> None:
    """Let `write` fill a private file beside `target`, then put it in place."""
    part = target.with_name(f".{target.stem}.part{target.suffix}")
    try:
        os.close(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
        write(str(part))
        part.chmod(0o600)  # the trace's writer may have made a file of its own
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
