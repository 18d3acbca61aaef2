"""A progress bar on a terminal; elsewhere one line per epoch."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from distributed.config import DistributedConfig
from distributed.interfaces.callback import Band, Callback, Context
from distributed.registry.hookspecs import hookimpl
from distributed.system.output import tolerated

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

__all__ = ["ProgressBar", "register_callbacks"]

# Drawing holds the interpreter for about half a millisecond, in which no step can start.
REFRESHES_PER_SECOND = 2


@hookimpl
def register_callbacks(config: DistributedConfig) -> list[Callback]:
    """The progress bar, unless `tracking.progress` is ``off``."""
    return [ProgressBar(config.tracking.progress)] if config.tracking.progress != "off" else []


class ProgressBar(Callback):
    """Epoch, step, loss, speed and remaining time on standard error, on rank 0.

    It moves at log steps and is redrawn by a thread, so that a training step pays nothing.

    Args:
        mode: ``auto`` draws on a terminal, and elsewhere prints one line per epoch; ``on``
            draws wherever standard error leads.
    """

    band = Band.TRACK

    def __init__(self, mode: Literal["auto", "on"] = "auto") -> None:
        self.mode = mode
        self._console: Console | None = None
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def on_run_start(self, context: Context) -> None:
        """Draw the empty bar, when there is something to draw on."""
        drawn = random.getstate()
        from rich.console import Console

        random.setstate(drawn)  # rich draws a number when it is imported, which training would draw elsewhere
        self._console = Console(
            stderr=True, force_terminal=True if self.mode == "on" else None, highlight=False, soft_wrap=True
        )
        if self._console.is_terminal:
            self._bar = _bar(self._console)
            self._task = self._bar.add_task(
                _epoch(context.progress.epoch),
                completed=context.progress.step,
                total=context.total_steps,
                figures="",
            )
            self._bar.start()

    def on_log(self, context: Context, metrics: Mapping[str, float]) -> None:
        """Move the bar; its thread draws it."""
        if self._bar is None or self._task is None:
            return
        shown = [f"loss {metrics['loss']:.4g}"] if "loss" in metrics else []
        if "samples_per_second" in metrics:
            shown.append(f"{metrics['samples_per_second']:.0f} samples/s")
        self._bar.update(
            self._task,
            completed=context.progress.step,
            description=_epoch(context.progress.epoch),
            figures="  ".join(shown),
        )

    def on_epoch_end(self, context: Context, metrics: Mapping[str, float]) -> None:
        """Print one line with the epoch's metrics, above the bar where there is one."""
        if self._console is None:
            return
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=context.progress.step)
        figures = [f"{name} {value:.4g}" for name, value in metrics.items() if _is_figure(name, value)]
        epoch = _epoch(metrics.get("epoch", context.progress.epoch))
        with tolerated(sys.stderr):
            self._console.print("  ".join([epoch, f"step {context.progress.step}", *figures]), markup=False)

    on_incomplete_epoch = on_epoch_end

    def on_run_end(self, context: Context, status: str) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=context.progress.step)
            self._bar.stop()
        self._bar = self._console = None


def _bar(console: Console) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=REFRESHES_PER_SECOND,
        # What the user prints goes above the bar, but not into it when it leads to a file.
        redirect_stdout=sys.stdout.isatty(),
    )


def _epoch(index: float) -> str:
    """Epochs are counted from 0, as in the history and in every record."""
    return f"epoch {index:.0f}"


def _is_figure(name: str, value: object) -> bool:
    return name not in {"epoch", "step"} and isinstance(value, int | float)
