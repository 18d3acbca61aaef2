"""SynchronizeSketches: the frozen matrices of sketched layers stay equal on all ranks."""

from __future__ import annotations

import logging

from distributed.errors import UserError
from distributed.interfaces.callback import Callback, Context

__all__ = ["SynchronizeSketches"]

logger = logging.getLogger("distributed")


class SynchronizeSketches(Callback):
    """Compare the sketches at the start of a run and every `every_n_steps` steps, and give all ranks rank
    0's where they differ, with a warning that names the layers.

    Sketches that come from a seed cannot come apart by training; this is for matrices given by hand, and
    for models that every rank builds by itself. A comparison sends some bytes a layer.

    Args:
        every_n_steps: optimizer steps between comparisons.

    Raises:
        UserError: fewer than one; or (in the run) the ranks' models have different sketched layers.
    """

    all_ranks = True

    def __init__(self, every_n_steps: int = 100) -> None:
        if every_n_steps < 1:
            raise UserError(
                "must be a positive integer", field="every_n_steps", got=every_n_steps, allowed="1 or more"
            )
        self.every_n_steps = every_n_steps

    def on_run_start(self, context: Context) -> None:
        """Compare before the first step."""
        self._synchronize(context)

    def on_step_end(self, context: Context) -> None:
        """Compare when it is time."""
        if context.progress.step % self.every_n_steps == 0:
            self._synchronize(context)

    def _synchronize(self, context: Context) -> None:
        if context.world.size == 1:
            return
        from distributed_kernels.errors import KernelError
        from distributed_kernels.sketching.sketch_sync import synchronize_by

        backend = context.backend
        try:
            differed = synchronize_by(context.model, backend.gather_objects, backend.broadcast_object)
        except KernelError as error:
            raise UserError(str(error)) from error
        if differed and context.world.rank == 0:
            logger.warning(
                "step %d: sketches differed between ranks and are rank 0's now: %s",
                context.progress.step,
                ", ".join(differed),
            )
