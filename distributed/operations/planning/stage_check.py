"""Whether stages compute what the whole model does: found with values, once for each number of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from distributed.errors import UserError
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.task import Task
from distributed.operations.planning.private_copies import private_copies
from distributed.parallel.cut_check import CutCheck
from distributed.parallel.exact_stages import first_exact
from distributed.parallel.pipeline_layout import no_equal_layout, read_layouts
from distributed.parallel.sample_batch import forward_of, is_short, undisturbed
from distributed.planner.pipeline import pipeline_shape

__all__ = ["StageCheck"]

_FIELD = "parallel.pipeline"


class StageCheck:
    """Divides the model as a run does before its first step, in this process.

    Args:
        task: with loss and training step, of which copies are called.
        model: whole; it is called, and left as it was.
        batch: first samples, which show how long a forward pass takes.

    Attributes:
        is_possible: whether the model has values, and a forward pass is short.
    """

    def __init__(self, task: Task, model: nn.Module, batch: object) -> None:
        self._model, self._found = model, dict[tuple[int, tuple[str, ...]], UserError | None]()
        has_values = not any(tensor.is_meta for tensor in model.state_dict().values())
        self.is_possible = has_values and is_short(model, batch)
        self._task = task

    def __call__(self, plan: RunPlan) -> None:
        """Compare the output of the stages of `plan` with that of the whole model.

        Raises:
            UserError: no division into so many stages leaves it as it is.
        """
        if plan.dims.pipeline == 1 or not self.is_possible:
            return
        number = pipeline_shape(plan.config, plan.dims, plan.batch).num_stages
        key = number, tuple(plan.config.parallel.stages)
        if key not in self._found:
            self._found[key] = self._compare(*key)
        error = self._found[key]
        if error is not None:
            raise error

    def _compare(self, number: int, names: tuple[str, ...]) -> UserError | None:
        """Why the model cannot be divided; None if it can."""
        model = self._model
        try:
            samples = partial(forward_of, self._own_task(), model, field=_FIELD)
            (one, sample), (two, _), (call, batch) = samples(1), samples(2, repeated=True), samples(2)
            with undisturbed(model):
                check = CutCheck(model, call, _FIELD)
                layouts = read_layouts(model, (one, two), sample, number, names)
                if first_exact(model, layouts, call, batch, check) is None:
                    return no_equal_layout(number, bool(names))
        except UserError as error:
            return error
        return None

    def _own_task(self) -> Task:
        """The task with copies of its loss and training step, which may have a state."""
        model, task = self._model, self._task
        memo = {id(part): part for part in (*model.modules(), *model.parameters(), *model.buffers())}
        loss_fn, step = private_copies((task.loss_fn, task.training_step), memo, _shared)
        return replace(task, model=model, loss_fn=loss_fn, training_step=step)


def _shared(tensor: Tensor) -> Tensor:
    return tensor
