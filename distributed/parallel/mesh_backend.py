"""MeshBackend: a process-group backend whose ranks may share a model, along the axes of a mesh."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.checkpoint.dtensor import cut_like, is_sharded, local_part, whole
from distributed.checkpoint.torch_state import canonical_name
from distributed.communication.broadcast import broadcast_values
from distributed.interfaces.backend import StepResult, Window
from distributed.interfaces.parallel_dims import AXES, DATA_AXES, MODEL_AXES, ParallelDims
from distributed.interfaces.placement import World
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.task import Task
from distributed.parallel import expert_layers
from distributed.parallel.asynchronous import overlapped_collectives
from distributed.parallel.automatic_pairs import find_pairs
from distributed.parallel.context_axis import ContextAxis, attention_of, draws_numbers
from distributed.parallel.context_check import check_objective, check_slices, check_whole_model
from distributed.parallel.cut_check import CutCheck
from distributed.parallel.first_step import EqualOnTensorRanks
from distributed.parallel.gradient_reducer import GradientReducer
from distributed.parallel.mesh import Mesh
from distributed.parallel.original_model import OriginalModel
from distributed.parallel.sample_batch import forward_of, is_short
from distributed.parallel.tensor_layers import TensorAxis
from distributed.parallel.tensor_model import check_optimizer, cut_model, report
from distributed.planner.pipeline import PipelineShape, pipeline_shape
from distributed.system.output import print_line
from distributed.training.optimizers import follow_parameters
from distributed.training.process_group_backend import ProcessGroupBackend
from distributed.training.sharded_scaler import ShardedScaler
from distributed.training.whole_model import read_only

if TYPE_CHECKING:
    from distributed.parallel.pipeline import Pipeline

__all__ = ["MeshBackend"]

_CONTRIBUTE = (*DATA_AXES, "context")
"""Axes along which losses, counts and gradients add up: samples, or slices of them, differ."""
_PARTS = tuple(axis for axis in MODEL_AXES if axis not in _CONTRIBUTE)
"""Axes along which ranks hold different parts of the model."""
_MATHS = torch.backends.mha
_NOT_COMPARED = (
    "note: the output of the cut model was not compared with that of the whole model, because there was no"
    " forward pass of the first samples to compare"
)


class MeshBackend(ProcessGroupBackend):
    """The base of backends that train along the axes of ``parallel``; without such an axis as its base.

    A subclass reduces gradients over the ranks with different samples (`reduce_gradients`); this class does
    what all of them share: it cuts the model over the tensor axis before `place` of the subclass, counts each
    element once in the norm and in checkpoints, and reports each sample once.

    Attributes:
        mesh: the ranks, None if all of them only have different samples.
        original: the model before anything was cut, None if nothing was.
        pipeline: the stages of this rank, None without several.
    """

    mesh: Mesh | None = None
    original: OriginalModel | None = None
    pipeline: Pipeline | None = None
    _axis: TensorAxis | None = None
    _context: ContextAxis | None = None
    _compared = False
    _first: EqualOnTensorRanks | None = None
    _partial: tuple[nn.Parameter, ...] = ()
    _shape: PipelineShape | None = None

    def __init__(self) -> None:
        super().__init__()
        self._settings = ExitStack()

    def setup(self, plan: RunPlan) -> World:
        several = self.needs_mesh(plan.dims)
        if several:
            self.scaler_class = ShardedScaler
        world = super().setup(plan)
        self._plan, self._joined = plan, plan.joined is not None
        if several:
            self.mesh = Mesh(plan.dims, world.rank, world.device, plan.config.collective_timeout)
        if plan.dims.pipeline > 1:
            self._shape = pipeline_shape(plan.config, plan.dims, plan.batch)
            self.counts_with_gradients = False  # a stage that sees no loss has no count
        return world

    def needs_mesh(self, dims: ParallelDims) -> bool:
        """Whether there is more than ranks with different samples and copies of the model."""
        return dims.model_parallel_size > 1 or dims.expert > 1

    @property
    def shares_model(self) -> bool:
        """Whether ranks divide a model between them."""
        experts = self.mesh is not None and self.mesh.dims.expert > 1
        return self.world.model_parallel_size > 1 or experts

    @property
    def replica_group(self) -> Any:
        """Process group of the ranks with different samples, or slices of them; None for all."""
        several = self.mesh is not None and self.shares_model
        return self.mesh.group(*_CONTRIBUTE) if self.mesh is not None and several else None

    @property
    def num_contributors(self) -> int:
        return self.world.data_parallel_size if self.mesh is None else self.mesh.dims.size(*_CONTRIBUTE)

    @property
    def cut_into(self) -> tuple[int, int]:
        pieces = 1 if self._shape is None else self._shape.pieces
        return pieces, 1 if self.mesh is None else self.mesh.dims.context

    @property
    def has_stages(self) -> bool:
        """Whether ranks have different stages of a pipeline."""
        return self._shape is not None

    @property
    def stage_group(self) -> Any:
        """Process group of the ranks that have the same stages; None for all."""
        if self.mesh is None or self._shape is None:
            return None
        return self.mesh.group(*(axis for axis in AXES if axis != "pipeline"))

    @property
    def count_group(self) -> Any:
        """Process group over which counts are added: as `replica_group`, with all stages; None for all."""
        if self.mesh is None or not self.shares_model:
            return None
        return self.mesh.group("pipeline", *_CONTRIBUTE)

    # -- the model --------------------------------------------------------------------

    def prepare(self, task: Task) -> None:
        self._task = task
        super().prepare(task)
        if self._shape is not None:
            self.objective.pieces = self._shape.pieces
        if self._context is not None:
            check_objective(task, self.objective)
        dims = self.mesh.dims if self.mesh is not None else ParallelDims()
        for axis in ("expert", "tensor"):
            if dims.size(axis) > 1:
                check_optimizer(self.optimizer, f"parallel.{axis}", dims.size(axis))
        if self._axis is not None:
            self._axis.joins_vocabulary = self.objective.takes_parts_of_classes
            names = self._axis.partial
            self._partial = tuple(p for n, p in self.module.named_parameters() if n in names)
            self._first = EqualOnTensorRanks(self._axis, self.module, self._is_cut)
        self._cut_optimizer_state()
        for group in self.optimizer.param_groups:
            # One kernel cannot take parameters of several meshes, or of one and of none, together.
            mixed = float(len({getattr(p, "device_mesh", None) for p in group["params"]}) > 1)
            # Settings are equal on all ranks, also where stages hold other parameters.
            if (self.all_reduce([mixed])[0] if self.pipeline is not None else mixed) > 0:
                group.update({flag: False for flag in ("foreach", "fused") if flag in group})

    def cut(self, model: nn.Module, built_by_one: bool = False) -> None:
        """Cut `model` in place over the axes expert and tensor, if there are any. Collective.

        Args:
            built_by_one: only rank 0 has the model's values.
        """
        self._divide_sequences(model)
        dims = self.mesh.dims if self.mesh is not None else ParallelDims()
        if dims.expert == dims.tensor == 1:
            return
        if self.original is None:
            self.remember(model, built_by_one)
        if dims.expert > 1:
            self._divide_experts(model, built_by_one)
        if dims.tensor > 1:
            self._cut_layers(model, built_by_one)

    def _divide_sequences(self, model: nn.Module) -> None:
        if self._context is None and self.mesh is not None and self.mesh.dims.context > 1:
            self._context = self._slices_of(model, self.mesh)

    def _divide_experts(self, model: nn.Module, built_by_one: bool) -> None:
        assert self.mesh is not None
        assert self.mesh.experts is not None
        assert self.original is not None
        size = self.mesh.dims.expert
        layers = expert_layers.check_experts(model, size)
        check = None if built_by_one else self._cut_check(model, "parallel.expert")
        expert_layers.divide_experts(layers, self.mesh.experts, self.original)
        if self.world.rank == 0:
            expert_layers.report(layers, model, size)
        self._compare(check, size)

    def _cut_layers(self, model: nn.Module, built_by_one: bool) -> None:
        assert self.mesh is not None
        assert self.original is not None
        self._settings.callback(_MATHS.set_fastpath_enabled, _MATHS.get_fastpath_enabled())
        _MATHS.set_fastpath_enabled(False)  # it reads weights without calling the layers
        self._axis = TensorAxis(self.mesh.submesh("tensor"))
        if self.config.compile != "none" and self.world.device.startswith("cuda"):
            self._settings.enter_context(overlapped_collectives(self._axis.group))
        check = None if built_by_one else self._cut_check(model, "parallel.tensor")
        given, pairs = self.config.parallel.tensor_plan, partial(self._pairs, model)
        names, found = cut_model(model, self._axis, given, self.config.backend, pairs, self.original)
        if self.world.rank == 0:
            report(model, names, found)
        self._compare(check, self._axis.size)

    def _compare(self, check: CutCheck | None, size: int) -> None:
        """Compare the cut model with the whole one where all ranks can; else report that. Collective."""
        if self.all_reduce([float(check is None)])[0] == 0.0:
            assert check is not None
            check.compare(size, lambda times: self.all_reduce([times])[0] / self.world.size)
        elif self.world.rank == 0:
            print_line(_NOT_COMPARED, sys.stdout)

    def _slices_of(self, model: nn.Module, mesh: Mesh) -> ContextAxis:
        dims, rank = mesh.dims, self.world.rank
        place = mesh.group("context"), dims.index(rank, "context"), dims.context
        return ContextAxis(attention_of(model, self._plan), *place, draws=draws_numbers(model))

    def remember(self, model: nn.Module, built_by_one: bool) -> None:
        """Keep what `release` restores of `model`, which is equal on all ranks from here on. Collective."""
        if self._joined and not built_by_one:
            # Ranks that we started have the same weights; others built their own.
            broadcast_values([*model.parameters(), *model.buffers()])
        self.original = OriginalModel(model)

    def _cut_check(self, model: nn.Module, field: str) -> CutCheck | None:
        """None for data and models with which no forward pass is possible here and now."""
        try:
            forward, batch = forward_of(self._task, model)
            return CutCheck(model, forward, field) if is_short(model, batch) else None
        except Exception:  # noqa: BLE001 - what is wrong with the model or its data is raised in training
            return None

    def with_shared_statistics(self, model: nn.Module) -> nn.Module:
        """`model` with BatchNorm over the ranks with different samples, if `sync_batchnorm` asks for it."""
        if not self.config.sync_batchnorm or self.world.data_parallel_size == 1:
            return model
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model, self.replica_group)
        return converted

    def _is_cut(self, parameter: Tensor) -> bool:
        """Whether the tensor axis cuts a parameter."""
        return self.mesh is not None and "tensor" in self.mesh.axes_of(parameter)

    def _pairs(self, model: nn.Module) -> Mapping[str, str]:
        """Pairs of linear layers as rank 0 finds them, whose model has values. Collective."""
        found: Any = None
        if self.world.rank == 0:
            try:
                found = find_pairs(model, forward_of(self._task, model)[0])
            except Exception as error:  # noqa: BLE001 - raised on all ranks
                found = error
        found = self.broadcast_object(found)
        if isinstance(found, BaseException):
            raise found
        pairs: Mapping[str, str] = found
        return pairs

    def place(self, model: nn.Module) -> nn.Module:
        self.read_stages(model)
        self.cut(model)
        if self.pipeline is None:
            model = super().place(model)
        else:
            self.pipeline.drop(model)
            self.apply_levers(model)
            self.pipeline.move(model)
            self.pipeline.begin(model)
        self.settle()
        return model

    def read_stages(self, model: nn.Module, built_by_one: bool = False) -> None:
        """Divide `model` into the stages of a pipeline, if there is one. Collective."""
        if self._shape is None or self.mesh is None:
            return
        if self.original is None:
            self.remember(model, built_by_one)
        # Imported only where it is needed.
        from distributed.parallel.pipeline import Pipeline, check_data

        self._divide_sequences(model)
        if self._context is not None and not self._compared:
            check_data(self._task)
            check_whole_model(model, self._task, self._context, self.all_reduce)
            self._compared = True
        self.pipeline = Pipeline(self, self._shape, self.mesh, model, self._task, self._context)
        if self.world.rank == 0:
            self.pipeline.report()

    def settle(self) -> None:
        """Once the model is cut: give the parameters in their places the attributes of the original ones."""
        if self.original is not None:
            self.original.copy_attributes()
            self.original.let_go()

    def _cut_optimizer_state(self) -> None:
        """Cut the state of an optimizer that an earlier fit used, which is of whole parameters."""
        for parameter, state in self.optimizer.state.items():
            if parameter.is_meta:
                state.clear()  # another stage has it
            for slot, value in state.items():
                if is_sharded(parameter) and isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[slot] = cut_like(parameter, value)

    # -- one step ---------------------------------------------------------------------

    def reducer_of(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> GradientReducer:
        """Adds the gradients of the trainable ones of `parameters` over the ranks that hold copies of them
        and have different samples."""
        names = {p: name for name, p in parameters if p.requires_grad and not p.is_meta}
        # Tokens of all ranks that divide the experts have contributed to an expert's gradient already.
        experts = [p for p in names if self.is_expert(p)]
        groups = dict.fromkeys(experts, self.mesh.same_experts) if experts and self.mesh is not None else {}
        limit, find_unused = self.config.bucket_cap_mb * 2**20, self.config.find_unused_parameters
        return GradientReducer(names, self.replica_group, limit, find_unused, groups)

    def is_expert(self, parameter: Tensor) -> bool:
        """Whether the ranks of the expert axis divide a parameter."""
        return self.mesh is not None and "expert" in self.mesh.axes_of(parameter)

    def reduce_gradients(self) -> None:
        """Called at the end of a window: leave in ``.grad`` what the ranks with different samples add up to.
        Collective. Nothing to do where backward has done it."""

    def run_window(self, window: Window) -> tuple[Any, Any]:
        if not self.shares_model:
            seen = super().run_window(window)
            self.reduce_gradients()
            return seen
        inputs = self._first.inputs() if self._first is not None else nullcontext()
        window = self._own_slices(window)
        with inputs, self._loss_of_parts(), self._over_slices(training=True):
            seen = super().run_window(window)
        if self.pipeline is not None:
            if self._count is not None:
                self.add_count(self._count)
            self.add_shared(self.pipeline)
        self.reduce_gradients()
        if self._axis is not None:
            self._sum_partial(self._axis)
        return seen if self._reports else (0.0, 0)

    def add_shared(self, pipeline: Pipeline) -> None:
        """Add up the gradients of parameters that several stages use. Collective."""
        pipeline.add_shared(lambda name, parameter: parameter.grad is not None)

    def run_micro_batches(
        self, window: Window, scale: float, known: Sequence[float | None]
    ) -> tuple[Any, Any]:
        if self.pipeline is None:
            return super().run_micro_batches(window, scale, known)
        with self._hooks.held_back():
            return self.pipeline.run_window(window, scale)

    def _own_slices(self, window: Window) -> Window:
        """`window`, or this rank's slices of its sequences. Collective for the first window."""
        if self._context is None:
            return window
        if not self._compared:
            check_slices(self, self._context, window.micro_batches[0].batch)
            self.free_gathered()
            self._compared = True
        return self._context.cut_window(window)

    def _over_slices(self, training: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._context is None else self._context.over_slices(training)

    def free_gathered(self) -> None:
        """Free copies of parameters that were gathered for a forward pass, where there are any."""

    def _loss_of_parts(self) -> AbstractContextManager[Any]:
        if self._axis is None or not self._axis.joins_vocabulary:
            return nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()

    @property
    def _reports(self) -> bool:
        """Whether this rank is the one, of those with the same samples, that reports what it sees."""
        if self.mesh is None or not self.shares_model:
            return True
        if self.pipeline is not None and not self.pipeline.sees_loss:
            return False
        return self.mesh.coordinates["tensor"] == 0

    @torch.no_grad()
    def _sum_partial(self, axis: TensorAxis) -> None:
        """Add up gradients to which each rank of the tensor axis has contributed a part. Collective."""
        gradients = [local_part(p.grad) for p in self._partial if p.grad is not None]
        if gradients:
            flat = torch._utils._flatten_dense_tensors(gradients)
            dist.all_reduce(flat, group=axis.group)
            torch._foreach_copy_(gradients, list(torch._utils._unflatten_dense_tensors(flat, gradients)))

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        if self._first is not None:
            self._first.check_gradients(self._partial)
        result = super().optimizer_step(max_norm, want_norm)
        if not result.skipped:  # an overflow leaves nothing to compare
            self._first = None
        return result

    def gradients(self) -> list[Tensor]:
        gradients = super().gradients()
        return gradients if self.mesh is None else [local_part(gradient) for gradient in gradients]

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        if self.mesh is None:
            return super().gradient_norm()
        # An element that several ranks hold counts on each by its share: the ranks add up to the norm.
        square = torch.zeros((), dtype=torch.float64, device=self.world.device)
        by_copies: dict[int, list[Tensor]] = {}
        names = {p: name for name, p in self.module.named_parameters()}
        for parameter in self._parameters:
            if parameter.grad is not None:
                number = self.copies(names[parameter], parameter)[1]
                by_copies.setdefault(number, []).append(local_part(parameter.grad))
        for copies, parts in by_copies.items():
            for norm in torch._foreach_norm(parts):
                square += norm.to(square).square() / copies
        dist.all_reduce(square)
        return square.sqrt()

    def evaluate_window(self, window: Window) -> dict[str, tuple[Any, Any]]:
        window = self._own_slices(window)
        with self._over_slices(training=False):
            found = super().evaluate_window(window)
        return found if self._reports else {}

    def evaluate(self, batch: Any, num_samples: int) -> dict[str, Any]:
        if self.pipeline is None:
            return super().evaluate(batch, num_samples)
        return self.pipeline.evaluate(batch, partial(super().evaluate, batch, num_samples)) or {}

    def share_buffers(self) -> None:
        """Give all ranks that hold the same the buffers of the first of them. Collective."""
        broadcast_values(self.module.buffers(), self.replica_group)

    # -- state ------------------------------------------------------------------------

    @property
    def holders(self) -> tuple[int, int]:
        return (self.world.rank, self.world.size) if self.shares_model else super().holders

    def held(self, name: str) -> bool:
        return self.pipeline is None or self.pipeline.holds(name)

    def copies(self, name: str, tensor: Tensor) -> tuple[int, int]:
        if self.mesh is None or (self.pipeline is None and not is_sharded(tensor)):
            return super().copies(name, tensor)
        copy, number = self.mesh.copies(tensor)
        if self.pipeline is None:
            return copy, number
        stage, stages = self.pipeline.copy_of(canonical_name(name))
        return stage * number + copy, stages * number

    def leads(self, name: str) -> bool:
        if self.pipeline is None or self.mesh is None:
            return super().leads(name)
        inner = self.mesh.dims.index(self.world.rank, *(axis for axis in AXES if axis != "pipeline"))
        return inner == 0 and self.pipeline.copy_of(name)[0] == 0

    def replicated(self) -> Mapping[str, Any] | None:
        """Trained parameters, of which a rank may hold a part; without experts that no other rank holds."""
        copied = self._copied_experts
        trained = ((name, p) for name, p in self.module.named_parameters() if p.requires_grad)
        held = ((name, p) for name, p in trained if not p.is_meta and (copied or not self.is_expert(p)))
        return {name: local_part(p).detach() for name, p in held}

    @property
    def _copied_experts(self) -> bool:
        """Whether several ranks with different samples, or slices of them, hold the same experts."""
        dims = self.mesh.dims if self.mesh is not None else ParallelDims()
        return dims.expert > 1 and dims.copies_of_experts > 1

    @property
    def replica_set(self) -> tuple[int, int]:
        if self.mesh is None:
            return 0, 1
        axes = (*_PARTS, "expert") if self._copied_experts else _PARTS
        return self.mesh.dims.index(self.world.rank, *axes), self.mesh.dims.size(*axes)

    def whole_model(self) -> AbstractContextManager[nn.Module]:
        if self.original is None:
            return super().whole_model()
        return read_only(self.original.whole_copy(self._gatherer()))

    def _gatherer(self) -> Callable[[Tensor], Tensor]:
        """What makes a parameter of the model whole."""
        if self.pipeline is None:
            return whole
        self.pipeline.gather_buffers(self.module)
        names = {id(p): canonical_name(name) for name, p in self.module.named_parameters()}
        return partial(self.pipeline.gather, names=names)

    @torch.no_grad()
    def release(self) -> None:
        super().release()
        if self._context is not None:
            self._context.release()
            self._context = None
        if self.original is None:
            return
        cut = dict(self.module.named_parameters())
        if self.pipeline is not None:
            self.pipeline.remove()
        self.original.restore(self._gatherer())
        follow_parameters(self.optimizer, cut, self.module)
        for name, parameter in self.module.named_parameters():
            self._restore_state(name, parameter)
        self.original = self._axis = self.pipeline = None

    def _restore_state(self, name: str, parameter: nn.Parameter) -> None:
        """Give the optimizer the whole state of a parameter. Collective."""
        state = self.optimizer.state.get(parameter, {})
        if self.pipeline is not None:
            state = self.pipeline.gather_state(canonical_name(name), state)
        whole_state = {slot: _whole(value, parameter.device) for slot, value in state.items()}
        if whole_state:
            self.optimizer.state[parameter] = whole_state

    def teardown(self) -> None:
        if self.pipeline is not None:
            self.pipeline.remove()  # a run that failed was not released
        self._settings.close()  # torch's, which this run had changed
        super().teardown()


def _whole(value: Any, device: torch.device) -> Any:
    return whole(value).to(device) if is_sharded(value) else value
