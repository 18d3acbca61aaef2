"""Predicted beside measured for a plan that was tried here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from distributed.errors import UserError
from distributed.interfaces.history import History
from distributed.operations.planning.plan_history import error_text, quantity
from distributed.operations.planning.quantities import seconds_text
from distributed.planner.estimates.comparison import Comparison, compare
from distributed.planner.estimates.search import Ranked

__all__ = ["HEADS", "Verification", "check_steps", "run_fields"]

HEADS = ["", "predicted", "measured", "error"]

_HIDDEN = "less than a rank needs to start"

_PHASES = {
    "compute": ("time_forward", "time_backward"),
    "exposed_communication": ("time_communication",),
    "data": ("time_data",),
    "optimizer": ("time_optimizer",),
}
"""Part of a predicted step -> shares of a log record. Stages of a pipeline wait in forward and backward."""


def check_steps(steps: int) -> None:
    """Check that steps are left to be timed.

    Raises:
        UserError: there are none.
    """
    if steps < 3:
        raise UserError(
            "the first two steps are not timed",
            field="--steps",
            got=steps,
            allowed="3 or more",
            remedy="Train more steps",
        )


def run_fields(steps: int) -> dict[str, Any]:
    """Fields of a run that only measures."""
    return {
        "epochs": 10**6,
        "max_steps": steps,
        "log_every_n_steps": 2,
        "checkpoint_dir": None,
        "resume_from_checkpoint": False,
        "return_weights": "none",
        "mlflow_tracking": False,
        "tensorboard": False,
        "tensorboard_dir": None,
        "tracking.progress": "off",
        "tracking.mlflow_experiment": None,
        "tracking.record_dir": None,
    }


@dataclass(frozen=True)
class Verification:
    """What a trial of a plan showed.

    Attributes:
        row: the plan, with its predictions.
        history: of the trial.
        peak: bytes of the rank that needed most in a second trial, on CPU; None where it was not measured.
        hidden: whether it was not because a rank needed more before its first step.
        unmeasured: another reason why it was not on CPU, as a clause; empty without.
        notes: why the trial may be slower than the prediction.
    """

    row: Ranked
    history: History
    peak: int | None = None
    hidden: bool = False
    unmeasured: str = ""
    notes: tuple[str, ...] = ()

    @property
    def comparisons(self) -> list[Comparison]:
        """Step time and memory."""
        planned = {"step_seconds": self.row.time.total, "memory_bytes": self.row.memory.live}
        step, memory = compare(planned, self.history.logs, self.history.batch["global_batch_size"])
        if self.peak is not None:  # copies that collectives make are tensors of the host like all others
            memory = replace(memory, predicted=float(self.row.memory.total), measured=float(self.peak))
        return [step, memory]

    def rows(self) -> Iterator[list[str]]:
        """Cells below `HEADS`: the step, its parts where they are known, and the memory."""
        step, memory = self.comparisons
        yield [step.what, *_cells(step)]
        for part, measured in self._parts(step.measured):
            yield [f"  {part.replace('_', ' ')}", seconds_text(getattr(self.row.time, part)), measured, ""]
        predicted, measured, error = _cells(memory)
        yield [memory.what, predicted, _HIDDEN if self.hidden else measured, error]

    def _parts(self, seconds: float | None) -> Iterator[tuple[str, str]]:
        logs = self.history.logs[1:] or self.history.logs
        for part, names in _PHASES.items():
            shares = [sum(log[name] for name in names) for log in logs if all(name in log for name in names)]
            yield part, seconds_text(median(shares) * seconds) if shares and seconds else "not measured"


def _cells(comparison: Comparison) -> list[str]:
    if comparison.error is None:
        return [quantity(comparison, comparison.predicted), error_text(comparison), ""]
    texts = [quantity(comparison, value) for value in (comparison.predicted, comparison.measured)]
    return [*texts, error_text(comparison)]
