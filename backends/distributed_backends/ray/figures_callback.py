"""Report metrics to Ray: to Ray Train from its workers, to Ray Tune from a trial that trains itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from distributed.interfaces.callback import Band, Callback, Context


def in_worker() -> bool:
    """Whether this process is a worker of Ray Train."""
    if "ray.train" not in sys.modules:
        return False
    from ray.train.v2._internal.execution.train_fn_utils import get_train_fn_utils

    try:
        return bool(get_train_fn_utils().is_distributed())
    except RuntimeError:
        return False


def in_trial() -> bool:
    """Whether this process runs a function trial of Ray Tune."""
    if "ray.tune" not in sys.modules:
        return False
    from ray.tune.trainable.trainable_fn_utils import _in_tune_session

    return bool(_in_tune_session())


def reporter(ours: bool) -> RayReport | None:
    """The callback for this process.

    Args:
        ours: whether the run's backend is ``ray``. A trial reports no other run, because its function
            may train several models.
    """
    if in_worker():
        from ray import train

        return RayReport(train.report)
    if ours and in_trial():
        from ray import tune

        return RayReport(tune.report)
    return None


class RayReport(Callback):
    """Report every epoch's metrics. Ray Train waits until all ranks have.

    Args:
        report: function that is called with ``{name: number}``.
    """

    band = Band.TRACK
    all_ranks = True

    def __init__(self, report: Callable[[dict[str, Any]], None]) -> None:
        self.report = report

    def on_epoch_end(self, context: Context, metrics: Mapping[str, float]) -> None:
        """Report the epoch's training and validation metrics, equal on all ranks.

        A validation metric is also reported by its name without ``val_``: a search that optimizes
        ``accuracy``, as `train_fn` returns it, ends where a report is without it.
        """
        short = {name.removeprefix("val_"): value for name, value in metrics.items() if "val_" in name}
        self.report({**short, **metrics})

    on_incomplete_epoch = on_epoch_end
