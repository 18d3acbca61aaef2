"""Pipeline: the stages of this rank, their schedule, and what they share with the other stages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.errors import UserError
from distributed.interfaces.backend import Window
from distributed.interfaces.task import Task
from distributed.parallel.context_axis import ContextAxis, draws_numbers
from distributed.parallel.cut_check import CutCheck
from distributed.parallel.exact_stages import first_exact
from distributed.parallel.mesh import Mesh
from distributed.parallel.pipeline_checks import begins_to_draw, check_model, own_parameters_alone
from distributed.parallel.pipeline_evaluation import StagedEvaluation
from distributed.parallel.pipeline_layout import Layout, TensorForm, no_equal_layout, read_layouts
from distributed.parallel.pipeline_pieces import batch_tensors, check_inputs, cut_window, rows_of
from distributed.parallel.sample_batch import forward_of, undisturbed
from distributed.parallel.stage_tensors import StageTensors
from distributed.parallel.staged_model import StagedModel
from distributed.planner.pipeline import PipelineShape
from distributed.system.output import print_line
from distributed.training.placeholders import Untouched
from distributed.training.process_group_backend import ProcessGroupBackend
from distributed.training.seeding import numbers_of_rank

if TYPE_CHECKING:
    from distributed.parallel.pipeline_schedule import Schedule

__all__ = ["Pipeline"]


class Pipeline:
    """One rank of a pipeline. Collective.

    Args:
        backend: whose model the ranks divide.
        shape: of the pipeline.
        mesh: the ranks.
        model: whole; ranks other than 0 read no values of it, except for slices.
        task: the training, whose first samples show how the model is called.
        slices: the ranks that hold slices of each sequence, of which stages compute theirs. All ranks have
            the model's values then.

    Attributes:
        stages: the stages of this rank, in order.
        tensors: who holds which tensor of the model.

    Raises:
        UserError: the model cannot be divided exactly.
    """

    def __init__(
        self,
        backend: ProcessGroupBackend,
        shape: PipelineShape,
        mesh: Mesh,
        model: nn.Module,
        task: Task,
        slices: ContextAxis | None = None,
    ) -> None:
        self._backend, self._shape, self._mesh = backend, shape, mesh
        self._group = mesh.group("pipeline")
        self._rank = mesh.coordinates["pipeline"]
        self.stages = shape.stages_of(self._rank)
        self._device = backend.world.device
        self._task, self._slices = task, slices
        self._whole_output: list[Tensor] = []
        self._compare([forward_of(task, model, device=self._device, field=_FIELD, slices=slices)[1]])
        read = partial(self._read, model)
        self._layout, shapes = read() if slices is not None else backend.on_first_rank(read)
        self.tensors = StageTensors(self._layout.stages, shape, mesh, self._device)
        if slices is None:
            self._deal_output(shapes)
        self._staged = StagedModel(model, self._layout, self._device)
        self._evaluation = StagedEvaluation(
            backend, self._staged, shape, self._rank, self._group, self._layout.inputs
        )
        self._schedule: Schedule | None = None
        self._window = Window((), 0)
        self._scale = 1.0
        self._known: Sequence[float | None] = ()
        self._total: Any = 0.0
        self._count: Any = 0
        self._forward_seconds = 0.0
        self._states: dict[tuple[int, int], Any] = {}
        self._draws: bool | None = draws_numbers(model) or None
        self._compared = False

    def _read(self, model: nn.Module) -> tuple[Layout, list[torch.Size]]:
        """A division of `model` that leaves its output as it is, and the shapes of that output. Collective
        over slices of sequences."""
        check_model(model, self._shape, self._backend.config.backend)
        samples = partial(forward_of, self._task, model, field=_FIELD, slices=self._slices)
        # Different samples may call experts of their own.
        (one, sample), (two, _), (call, batch) = samples(1), samples(2, repeated=True), samples(2)
        names, number = self._backend.config.parallel.stages, self._shape.num_stages
        with undisturbed(model), self._backend.autocast():
            check = CutCheck(model, call, _FIELD)
            layouts = read_layouts(model, (one, two), sample, number, names)
            if self._slices is not None:  # which have operations of their own, and so another balance
                layouts = iter(self._backend.broadcast_object(list(layouts)))
            layout = first_exact(model, layouts, call, batch, check, self._agree)
            if layout is not None:
                self._whole_output = check.before
                return layout, [output.shape for output in check.before]
        raise no_equal_layout(number, bool(names))

    def _agree(self, equal: bool) -> bool:
        """Whether `equal` holds for the slices of all ranks. Collective over them."""
        return equal if self._slices is None else self._backend.all_reduce([float(not equal)])[0] == 0.0

    def _deal_output(self, shapes: Sequence[torch.Size]) -> None:
        """Give the output of the whole model to the ranks that compute it in stages. Collective."""
        own: Sequence[Tensor | None] = self._whole_output or [None] * len(shapes)
        last = (self._shape.rank_of(self._shape.num_stages - 1),)
        forms = [torch.empty(shape, dtype=torch.float64, device="meta") for shape in shapes]
        dealt = [self.tensors.deal(full, form, last) for full, form in zip(own, forms, strict=True)]
        self._whole_output = [output.cpu() for output in dealt if output is not None]

    def report(self) -> None:
        """Print which blocks each stage has, and its share of the operations."""
        layout, total = self._layout, sum(self._layout.costs) or 1.0
        stages = []
        for stage, cost in enumerate(layout.costs):
            names = [layout.blocks[index].name for index in layout.blocks_of(stage)]
            shown = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            stages.append(f"{stage}: {shown} ({100 * cost / total:.0f} %)")
        text = ", ".join(stages)
        print_line(f"note: stages of the pipeline, with their share of the operations: {text}", sys.stdout)

    @property
    def sees_loss(self) -> bool:
        """Whether the last stage is on this rank."""
        return self._shape.num_stages - 1 in self.stages

    # -- the model --------------------------------------------------------------------

    def move(self, model: nn.Module) -> None:
        """Move what this rank holds to its device."""
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(self._device))

    def begin(self, model: nn.Module) -> None:
        """Let the forward pass compute one stage at a time. Collective.

        Raises:
            UserError: the stages compute something else than the whole model.
        """
        self._staged.install()
        forward, batch = forward_of(self._task, model, device=self._device, field=_FIELD, slices=self._slices)
        staged = partial(self.evaluate, batch, forward)
        with self._backend.autocast():
            CutCheck(model, staged, _FIELD, self._whole_output).compare(
                self._shape.num_ranks,
                lambda times: max(self._backend.gather_objects(times)),
                self.sees_loss,
            )
        self._whole_output = []

    def remove(self) -> None:
        """Let the model compute as a whole again."""
        self._staged.remove()

    # -- one step ---------------------------------------------------------------------

    def run_window(self, window: Window, scale: float) -> tuple[Any, Any]:
        """Forward and backward of a window: (sum of losses, count) of this rank, zeros without the last
        stage. Collective along the pipeline.

        Args:
            scale: what sums of losses are multiplied by.

        Raises:
            UserError: the window cannot be trained exactly.
        """
        self._window = cut_window(window, self._shape)
        for batch, _ in self._window.micro_batches:
            check_inputs(batch, self._layout.inputs)
        if not self._compared:
            self._compare(micro.batch for micro in window.micro_batches)
            self._compared = True
        self._scale, self._known = scale, self._backend.known_counts(self._window)
        self._total, self._count, self._forward_seconds = 0.0, 0, 0.0
        if self._backend.scaler is not None:
            # It has a scale from its first loss on, and some stages see none.
            self._backend.scaler.scale(torch.zeros((), device=self._device))
        start = perf_counter()
        with self._own_numbers():
            self._steps().run()
        timers = self._backend.timers
        timers.add("forward", self._forward_seconds)
        timers.add("backward", perf_counter() - start - self._forward_seconds)
        self._share_averages()
        return self._total, self._count

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Leave the random numbers that the ranks share, which data may draw, equal on all of them: a stage
        draws for its own layers alone. Collective for the first window."""
        if self._draws:
            with numbers_of_rank(self._rank):
                yield
            return
        before, first = torch.get_rng_state(), self._draws is None
        yield
        drawn = not torch.equal(before, torch.get_rng_state())
        if first:
            self._draws = self._backend.all_reduce([float(drawn)])[0] > 0.0
            torch.set_rng_state(before)
        elif drawn:
            raise begins_to_draw()

    def _share_averages(self) -> None:
        """Give all stages what the last has seen of the loss, which ranks compare. Collective."""
        objective = self._backend.objective
        if objective.weighs_means(self._window.micro_batches[0].batch):
            box = [(objective.averaged_over, objective.averages)]
            last = self._shape.rank_of(self._shape.num_stages - 1)
            dist.broadcast_object_list(box, group=self._group, group_src=last)
            objective.averaged_over, objective.averages = box[0]

    def _steps(self) -> Schedule:
        if self._schedule is None:
            # Imports torch.export, which takes a second.
            from distributed.parallel.pipeline_schedule import Schedule

            forms = [self._staged.form_after(stage) for stage in range(self._shape.num_stages - 1)]
            self._schedule = Schedule(
                self._shape,
                self._rank,
                self._group,
                self._device,
                forms,
                self._compute,
                partial(self.tensors.parameters_of, self._backend.module),
                self._note,
            )
        return self._schedule

    def _note(self, action: str, micro_batch: int, stage: int, peer: int) -> None:
        """Record an action, so that the report of a hang names the rank on the other side."""
        phase, text = _ACTIONS[action]
        timers = self._backend.timers
        timers.enter(phase)
        timers.describe(text.format(micro_batch=micro_batch, stage=stage, peer=peer))
        if action == "backward" and self._slices is not None:
            self._slices.restore(self._states.pop((stage, micro_batch)))

    def _compute(self, stage: int, position: int, received: Tensor | None) -> Tensor:
        """A stage's part of a micro-batch: its loss, or what the next stage receives."""
        start = perf_counter()
        backend, micro = self._backend, self._window.micro_batches[position]
        batch, rows = backend.to_device(micro.batch), rows_of(micro.batch)
        kept = None if micro.num_samples else Untouched(backend.module)
        with backend.autocast(), own_parameters_alone(stage):
            step = (batch, micro.num_samples, self._scale, self._known[position])
            given = self._cut(stage, received, rows)
            found = backend.through(
                f"training of stage {stage}",
                lambda: self._staged.run(stage, given, rows, lambda: backend.step_module.forward(*step)),
            )
        if kept is not None:
            kept.restore()
        if self._slices is not None:
            self._states[stage, position] = self._slices.state()
        if stage == self._shape.num_stages - 1:
            loss, part, number = found
            self._total, self._count = self._total + part, self._count + number
            result: Tensor = loss if backend.scaler is None else backend.scaler.scale(loss)
        else:
            result = _padded(found, self._staged.form_after(stage), self._shape.piece_rows)
        self._forward_seconds += perf_counter() - start
        # Schedules that split backward detach it in place, which a view does not allow (torch 2.13).
        return result.clone() if self._shape.splits_backward and result._is_view() else result

    def _cut(self, stage: int, received: Tensor | None, rows: int) -> Tensor | None:
        if received is None:
            return None
        form: TensorForm = self._staged.form_after(stage - 1)
        return (
            received.narrow(form.axis, 0, form.sized(rows)[form.axis]) if form.axis is not None else received
        )

    def _compare(self, batches: Iterable[Any]) -> None:
        """Raise a UserError if the ranks of the pipeline have different samples. Collective."""
        from distributed.parallel.first_step import differ

        tensors = [tensor for batch in batches for tensor in batch_tensors(batch)]
        if tensors and differ(tensors, self._group):
            raise UserError(
                "the ranks of a pipeline, which share each sample, have different samples. The step was not"
                " taken",
                field="parallel.pipeline",
                got=self._shape.num_ranks,
                allowed="data that is the same on the ranks that share a model",
                remedy="Let no sample depend on the rank (data.per_sample_rng=true for augmentation)",
            )

    def evaluate(self, batch: Any, forward: Callable[[], Any]) -> Any:
        """What `forward` returns, on the rank that has the last stage; see `StagedEvaluation.evaluate`."""
        return self._evaluation.evaluate(batch, forward)


_ACTIONS = {
    "forward": ("forward", "computing micro-batch {micro_batch} in stage {stage}"),
    "backward": ("backward", "computing micro-batch {micro_batch} in stage {stage}"),
    "receive activation": (
        "forward",
        "waiting for the activation of micro-batch {micro_batch} from rank {peer} (stage {stage})",
    ),
    "receive gradient": (
        "backward",
        "waiting for the gradient of micro-batch {micro_batch} from rank {peer} (stage {stage})",
    ),
    "send activation": (
        "forward",
        "sending the activation of micro-batch {micro_batch} to rank {peer} (stage {stage})",
    ),
    "send gradient": (
        "backward",
        "sending the gradient of micro-batch {micro_batch} to rank {peer} (stage {stage})",
    ),
}
"""Action of a schedule -> phase, and the action in words."""
_FIELD = "parallel.pipeline"


def _padded(tensor: Tensor, form: TensorForm, rows: int) -> Tensor:
    """`tensor` in the shape for `rows` samples, filled up with zeros."""
    full = form.sized(rows)
    if form.axis is not None and tensor.shape[form.axis] < full[form.axis]:
        missing = list(full)
        missing[form.axis] -= tensor.shape[form.axis]
        tensor = torch.cat([tensor, tensor.new_zeros(missing)], form.axis)
    return tensor.contiguous()
