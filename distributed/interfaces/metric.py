"""The metric that decides which epoch is best, and its direction."""

from __future__ import annotations

from collections.abc import Mapping

from distributed.errors import UserError

__all__ = ["larger_is_better", "metric_name"]


def metric_name(
    wanted: str | None, metrics: Mapping[str, float], field: str = "checkpoint.metric"
) -> str | None:
    """The name in `metrics` of the deciding metric; None without one.

    Args:
        wanted: with or without ``val_``; None takes ``val_accuracy`` where there is one, else
            ``val_loss``.
        metrics: metrics of the epoch.
        field: the field that names it.

    Raises:
        UserError: none is called `wanted`.
    """
    if wanted is None:
        return next((name for name in ("val_accuracy", "val_loss") if name in metrics), None)
    found = next((name for name in (wanted, f"val_{wanted}") if name in metrics), None)
    if found is None:
        raise UserError(
            "no such metric was reported this epoch",
            field=field,
            got=wanted,
            allowed=", ".join(sorted(metrics)),
        )
    return found


def larger_is_better(mode: str, name: str) -> bool:
    """Whether a larger value of the metric `name` is better, by ``checkpoint.mode``."""
    return mode == "max" or (mode == "auto" and not ("loss" in name or "error" in name))
