"""One rank's part of a model that ranks divide, made by the mesh backends' own code under fake tensors.

The process becomes a rank of a group that sends nothing (torch's ``fake`` backend) while facts are recorded,
so that a cut which a backend refuses is refused here, before any rank starts.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.interfaces.task import Task
from distributed.planner.estimates.model_facts import Cut
from distributed.planner.pipeline import PipelineShape, pipeline_shape
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from distributed.training.objective import Objective

__all__ = ["CutOptions", "RankPart", "rank_of_cut"]

_TIMEOUT = 60.0
"""Seconds; nothing is waited for in a group that sends nothing."""
Resize = Callable[[int], Any]
"""Number of samples -> a batch of fake tensors."""
Call = Callable[[nn.Module, Any], Any]
"""(model, batch) -> its output, as a training step calls it."""


@dataclass(frozen=True)
class CutOptions:
    """Fields of ``parallel`` that decide how a cut is made.

    Attributes:
        backend: a backend with the axes of the mesh.
        tensor_plan: `parallel.tensor_plan`.
        context_attention: `parallel.context_attention`.
        stages: `parallel.stages`.
    """

    backend: str = "pytorch-ddp"
    tensor_plan: Mapping[str, str] | None = None
    context_attention: str = "auto"
    stages: tuple[str, ...] = ()


class RankPart:
    """What one rank computes of each micro-batch. This form, of an uncut model, computes all of it.

    Attributes:
        axes: name of a process group -> axis of the mesh; empty without groups.
    """

    def __init__(self) -> None:
        self.axes: dict[str, str] = {}

    def cut(self, task: Task, objective: Objective, resize: Resize, call: Call) -> None:
        """Divide the model of `task` in place."""

    def slice_of(self, batch: Any) -> Any:
        """This rank's slice of each sample."""
        return batch

    def running(self) -> Any:
        """Context of forward and backward."""
        return nullcontext()

    def boundary(self, rows: int) -> tuple[Tensor | None, Tensor | None]:
        """What the stage receives: its input, and the gradient of its output; None of what it has not."""
        return None, None

    def run(self, received: Tensor | None, rows: int, forward: Callable[[], Any]) -> Any:
        """The loss, or the output of a stage that is not the last."""
        return forward()

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights are computed apart from those of activations."""
        return False

    def trained(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters whose gradients the stage computes."""
        return [p for p in model.parameters() if p.requires_grad]


@contextmanager
def rank_of_cut(cut: Cut, options: CutOptions) -> Iterator[RankPart]:
    """Make this process the rank of `cut` that has its stage, without any other rank.

    Raises:
        UserError: the process is a rank of a real group, or the configuration of the cut is refused.
    """
    if cut.ranks == 1:
        yield RankPart()
        return
    plan = _plan_of(cut, options)
    shape = None
    if cut.pipeline > 1:
        shape = pipeline_shape(plan.config, plan.dims, plan.batch)
        _check_stage(cut, shape)
    place = 0 if shape is None else shape.rank_of(cut.stage)
    rank = plan.dims.moved(0, "pipeline", place)
    with _group_that_sends_nothing(rank, plan.dims.world_size), ExitStack() as stack:
        yield _CutPart(cut, plan, shape, rank, stack)


def _plan_of(cut: Cut, options: CutOptions) -> RunPlan:
    given: dict[str, Any] = {
        **({"data": cut.expert, "expert": cut.expert} if cut.expert > 1 else {}),
        **{axis: getattr(cut, axis) for axis in ("tensor", "context", "pipeline") if getattr(cut, axis) > 1},
        **({"schedule": cut.schedule, "stages": options.stages} if cut.pipeline > 1 else {}),
        **({"context_attention": options.context_attention} if cut.context > 1 else {}),
        "tensor_plan": dict(options.tensor_plan or {}),
    }
    config = DistributedConfig(
        backend=options.backend,
        device="cpu",
        num_gpus=cut.ranks,
        batch_size=1,
        gradient_accumulation_steps=4 * cut.pipeline if cut.pipeline > 1 else 1,
        parallel=given,
    )
    return resolve(config, get_catalog(), Facts(train_batch_size=1), Resources())


def _check_stage(cut: Cut, shape: PipelineShape) -> None:
    if not 0 <= cut.stage < shape.num_stages:
        raise UserError(
            "the pipeline has no stage of this index",
            field="stage",
            got=cut.stage,
            allowed=f"0 to {shape.num_stages - 1}",
            remedy="Give the index of one of its stages",
        )


@contextmanager
def _group_that_sends_nothing(rank: int, size: int) -> Iterator[None]:
    if dist.is_initialized():
        raise UserError(
            "facts about a divided model are collected in a process of its own, and this process is a rank of"
            " a group",
            field="model",
            got=f"rank {dist.get_rank()} of {dist.get_world_size()}",
            allowed="a process without a process group",
            remedy="Collect them before the group is made, or after it is destroyed",
        )
    # Registers the backend, and what collectives return for fake tensors.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch replaces it, to name the rank
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with warnings.catch_warnings():
            # Only real groups have limits of time.
            warnings.filterwarnings("ignore", "Set timeout is now only supported")
            yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


class _CutPart(RankPart):
    """The part of a rank of `cut`.

    Args:
        cut: of the model.
        plan: of a run with these axes.
        shape: of the pipeline; None without.
        rank: this one.
        stack: undoes at the end what is changed outside of the model.
    """

    def __init__(
        self, cut: Cut, plan: RunPlan, shape: PipelineShape | None, rank: int, stack: ExitStack
    ) -> None:
        super().__init__()
        # Imports torch's tensor parallelism, which takes a while.
        from distributed.parallel.mesh import Mesh
        from distributed.parallel.stage_tensors import WITHIN_STAGE

        self._cut, self._plan, self._shape, self._stack = cut, plan, shape, stack
        self._mesh = Mesh(plan.dims, rank, "cpu", _TIMEOUT)
        self._slices: Any = None
        self._tensor: Any = None
        self._staged: Any = None
        self._tensors: Any = None
        self._mesh.group(*WITHIN_STAGE)  # now, because a mesh has values
        for axis in ("tensor", "context", "pipeline"):
            group = self._mesh.group(axis)
            if group is not None:
                self.axes[group.group_name] = axis
        if self._mesh.experts is not None:
            self.axes[self._mesh.experts.get_group().group_name] = "expert"

    # -- the model, in the order of MeshBackend.place ---------------------------------

    def cut(self, task: Task, objective: Objective, resize: Resize, call: Call) -> None:
        from distributed.parallel.context_check import check_objective
        from distributed.parallel.original_model import OriginalModel

        model: nn.Module = task.model
        original = OriginalModel(model)
        if self._cut.context > 1:
            check_objective(task, objective)
            self._divide_sequences(model)
        layout = None
        if self._shape is not None:
            layout = self._read_stages(model, resize, call)
        if self._cut.expert > 1:
            self._divide_experts(model, original)
        if self._cut.tensor > 1:
            self._cut_layers(model, original, objective, partial(call, model, self.slice_of(resize(2))))
        if layout is not None:
            self._drop_other_stages(model, layout)

    def _divide_sequences(self, model: nn.Module) -> None:
        from distributed.parallel.context_axis import ContextAxis, attention_of

        group, index = self._mesh.group("context"), self._mesh.coordinates["context"]
        self._slices = ContextAxis(attention_of(model, self._plan), group, index, self._cut.context)
        self._stack.callback(self._slices.release)

    def _read_stages(self, model: nn.Module, resize: Resize, call: Call) -> Any:
        from distributed.parallel.pipeline_checks import check_model
        from distributed.parallel.pipeline_layout import read_layouts
        from distributed.parallel.sample_batch import undisturbed

        assert self._shape is not None
        check_model(model, self._shape, self._plan.config.backend)
        one, two = (self.slice_of(resize(number)) for number in (1, 2))
        names, number = self._plan.config.parallel.stages, self._shape.num_stages
        with undisturbed(model), self._over_slices(training=False):
            forwards = partial(call, model, one), partial(call, model, two)
            # A backend tries others if this one changes the output, which only values show.
            return next(read_layouts(model, forwards, one, number, names))

    def _divide_experts(self, model: nn.Module, original: Any) -> None:
        from distributed.parallel.expert_layers import check_experts, divide_experts

        layers = check_experts(model, self._cut.expert)
        assert self._mesh.experts is not None
        divide_experts(layers, self._mesh.experts, original)

    def _cut_layers(
        self, model: nn.Module, original: Any, objective: Objective, forward: Callable[[], Any]
    ) -> None:
        from distributed.parallel.automatic_pairs import find_pairs
        from distributed.parallel.tensor_layers import TensorAxis
        from distributed.parallel.tensor_model import cut_model

        maths = torch.backends.mha
        self._stack.callback(maths.set_fastpath_enabled, maths.get_fastpath_enabled())
        maths.set_fastpath_enabled(False)
        self._tensor = TensorAxis(self._mesh.submesh("tensor"))
        self._tensor.joins_vocabulary = objective.takes_parts_of_classes
        config = self._plan.config
        pairs = partial(find_pairs, model, forward)
        cut_model(model, self._tensor, config.parallel.tensor_plan, config.backend, pairs, original)

    def _drop_other_stages(self, model: nn.Module, layout: Any) -> None:
        from distributed.parallel.stage_tensors import StageTensors
        from distributed.parallel.staged_model import StagedModel

        assert self._shape is not None
        self._tensors = StageTensors(layout.stages, self._shape, self._mesh, "cpu")
        self._tensors.drop(model)
        self._staged = StagedModel(model, layout, "cpu")
        self._staged.install()
        self._stack.callback(self._staged.remove)

    # -- a micro-batch ----------------------------------------------------------------

    def slice_of(self, batch: Any) -> Any:
        return batch if self._slices is None else self._slices.cut(batch)

    def _over_slices(self, training: bool) -> Any:
        return nullcontext() if self._slices is None else self._slices.over_slices(training)

    @contextmanager
    def running(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._tensor is not None and self._tensor.joins_vocabulary:
                from torch.distributed.tensor.parallel import loss_parallel

                stack.enter_context(loss_parallel())
            stack.enter_context(self._over_slices(training=True))
            yield

    def boundary(self, rows: int) -> tuple[Tensor | None, Tensor | None]:
        if self._staged is None or self._shape is None:
            return None, None
        stage, last = self._cut.stage, self._shape.num_stages - 1
        return (
            self._tensor_after(stage - 1, rows).requires_grad_() if stage else None,
            self._tensor_after(stage, rows) if stage < last else None,
        )

    def _tensor_after(self, stage: int, rows: int) -> Tensor:
        form = self._staged.form_after(stage)
        return torch.empty(form.sized(rows), dtype=form.dtype)

    def run(self, received: Tensor | None, rows: int, forward: Callable[[], Any]) -> Any:
        if self._staged is None:
            return forward()
        found = self._staged.run(self._cut.stage, received, rows, forward)
        # As `Pipeline._compute` does, because torch detaches it in place.
        return found.clone() if self.splits_backward and found._is_view() else found

    @property
    def splits_backward(self) -> bool:
        return self._shape is not None and self._shape.splits_backward

    def trained(self, model: nn.Module) -> list[nn.Parameter]:
        if self._tensors is None:
            return super().trained(model)
        found: list[nn.Parameter] = self._tensors.parameters_of(model, self._cut.stage)
        return found
