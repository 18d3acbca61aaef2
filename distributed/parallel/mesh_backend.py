"""MeshBackend: a process-group backend whose ranks may share a model, along the axes of a mesh."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.checkpoint.dtensor import cut_like, is_sharded, local_part
from distributed.communication.broadcast import broadcast_values
from distributed.communication.wire import GroupWire, Wire
from distributed.interfaces.backend import StepResult, Window
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.interfaces.task import Task
from distributed.parallel import expert_layers
from distributed.parallel.asynchronous import overlapped_collectives
from distributed.parallel.automatic_pairs import find_pairs
from distributed.parallel.context_axis import ContextAxis, attention_of, draws_numbers
from distributed.parallel.context_check import check_objective, check_slices, check_whole_model
from distributed.parallel.cut_check import CutCheck
from distributed.parallel.deferred_build import build_without_data, tensors_of
from distributed.parallel.first_step import EqualOnTensorRanks
from distributed.parallel.gradient_reducer import GradientReducer, build_reducer
from distributed.parallel.mesh import Mesh
from distributed.parallel.mesh_state import MeshState
from distributed.parallel.original_model import OriginalModel
from distributed.parallel.sample_batch import forward_of, is_short
from distributed.parallel.tensor_layers import TensorAxis
from distributed.parallel.tensor_model import check_optimizer, cut_model, report
from distributed.system.output import print_line
from distributed.training.gradient_scaling import group_by_dtype

if TYPE_CHECKING:
    from distributed.parallel.pipeline import Pipeline

__all__ = ["MeshBackend"]

_MATHS = torch.backends.mha
_NOT_COMPARED = (
    "note: the output of the cut model was not compared with that of the whole model, because there was no"
    " forward pass of the first samples to compare"
)


class MeshBackend(MeshState):
    """The base of backends that train along the axes of ``parallel``; without such an axis as its base.

    A subclass reduces gradients over the ranks with different samples (`reduce_gradients`); this class does
    what all of them share: it cuts the model over the axes of the mesh before `place_parts` of the subclass,
    counts each element once in the norm, and reports each sample once.

    Attributes:
        built_by_one: whether only rank 0 has the model's values when it is placed.
        values: these, by name, on rank 0 until the other ranks have theirs; empty elsewhere.
    """

    _axis: TensorAxis | None = None
    _context: ContextAxis | None = None
    _compared = False
    _first: EqualOnTensorRanks | None = None
    _partial: tuple[nn.Parameter, ...] = ()
    built_by_one = False

    def __init__(self) -> None:
        super().__init__()
        self._settings = ExitStack()
        self.values: dict[str, Tensor] = {}

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
        if self.mesh is not None:
            held = ((name, p) for name, p in self.module.named_parameters() if not p.is_meta)
            self._copies = {p: self.copies(name, p)[1] for name, p in held}
        if self.pipeline is not None:
            self.pipeline.tensors.share(self.module)
        for group in self.optimizer.param_groups:
            # One kernel cannot take parameters of several meshes, or of one and of none, together.
            mixed = float(len({getattr(p, "device_mesh", None) for p in group["params"]}) > 1)
            # Settings are equal on all ranks, also where stages hold other parameters.
            if (self.all_reduce([mixed])[0] if self.pipeline is not None else mixed) > 0:
                group.update({flag: False for flag in ("foreach", "fused") if flag in group})

    def cut(self, model: nn.Module) -> None:
        """Cut `model` in place over the axes expert and tensor, if there are any. Collective."""
        self._divide_sequences(model)
        dims = self.mesh.dims if self.mesh is not None else ParallelDims()
        if dims.expert == dims.tensor == 1:
            return
        if self.original is None:
            self.remember(model)
        if dims.expert > 1:
            self._divide_experts(model)
        if dims.tensor > 1:
            self._cut_layers(model)

    def _divide_sequences(self, model: nn.Module) -> None:
        if self._context is None and self.mesh is not None and self.mesh.dims.context > 1:
            self._context = self._slices_of(model, self.mesh)

    def _divide_experts(self, model: nn.Module) -> None:
        assert self.mesh is not None
        assert self.mesh.experts is not None
        assert self.original is not None
        size = self.mesh.dims.expert
        layers = expert_layers.check_experts(model, size)
        check = None if self.built_by_one else self._cut_check(model, "parallel.expert")
        expert_layers.divide_experts(layers, self.mesh.experts, self.original)
        if self.world.rank == 0:
            expert_layers.report(layers, model, size)
        self._compare(check, size, model)

    def _cut_layers(self, model: nn.Module) -> None:
        assert self.mesh is not None
        assert self.original is not None
        self._settings.callback(_MATHS.set_fastpath_enabled, _MATHS.get_fastpath_enabled())
        _MATHS.set_fastpath_enabled(False)  # it reads weights without calling the layers
        self._axis = TensorAxis(self.mesh.submesh("tensor"))
        if self.config.compile != "none" and self.world.device.startswith("cuda"):
            self._settings.enter_context(overlapped_collectives(self._axis.group))
        check = None if self.built_by_one else self._cut_check(model, "parallel.tensor")
        given, pairs = self.config.parallel.tensor_plan, partial(self._pairs, model)
        names, found = cut_model(model, self._axis, given, self.config.backend, pairs, self.original)
        if self.world.rank == 0:
            report(model, names, found)
        self._compare(check, self._axis.size, model)

    def _compare(self, check: CutCheck | None, size: int, model: nn.Module) -> None:
        """Compare the cut model with the whole one where all ranks can; else report that. Collective."""
        if check is not None:
            model.to(self.world.device)  # where its parts are already
        if self.all_reduce([float(check is None)])[0] == 0.0:
            assert check is not None
            check.compare(size, lambda times: self.all_reduce([times])[0] / self.world.size)
        elif self.world.rank == 0 and self.pipeline is None:  # which compares its stages
            print_line(_NOT_COMPARED, sys.stdout)

    def _slices_of(self, model: nn.Module, mesh: Mesh) -> ContextAxis:
        dims, rank = mesh.dims, self.world.rank
        place = mesh.group("context"), dims.index(rank, "context"), dims.context
        return ContextAxis(attention_of(model, self._plan), *place, draws=draws_numbers(model))

    def remember(self, model: nn.Module) -> None:
        """Keep what `release` restores of `model`, which is equal on all ranks from here on. Collective."""
        if self._joined and not self.built_by_one:
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
        return self.on_first_rank(lambda: find_pairs(model, forward_of(self._task, model)[0]))

    @property
    def builds_on_one(self) -> bool:
        """Whether rank 0 alone builds the model of a factory with values. Stages of slices of sequences are
        read by all ranks."""
        return self.has_stages and self._plan.dims.context == 1

    def build(self, model: Any) -> nn.Module:
        self.built_by_one = self.builds_on_one and not isinstance(model, nn.Module)
        if self.built_by_one and self.world.rank > 0:
            return build_without_data(model, self.config.seed)
        return super().build(model)

    def place(self, model: nn.Module) -> nn.Module:
        first = self.built_by_one and self.world.rank == 0
        self.values = {name: tensor.detach() for name, tensor in tensors_of(model)} if first else {}
        self.read_stages(model)
        self.cut(model)
        if self.pipeline is not None:
            self.pipeline.tensors.drop(model)
            if self.built_by_one:
                self._hooks.follow(self.pipeline.tensors.deal_out(model, self.values))
                self.values = {}
        model = self.place_parts(model)
        if self.pipeline is not None:
            self.pipeline.begin(model)
            self.free_gathered()
        self.settle()
        return model

    def place_parts(self, model: nn.Module) -> nn.Module:
        """Apply the levers to what this rank holds of `model`, and move it to its device, or shard it."""
        if self.pipeline is None:
            return super().place(model)
        self.apply_levers(model)
        self.pipeline.move(model)
        return model

    def read_stages(self, model: nn.Module) -> None:
        """Divide `model` into the stages of a pipeline, if there is one. Collective."""
        if self._shape is None or self.mesh is None:
            return
        if self.original is None:
            self.remember(model)
        # Imported only where it is needed.
        from distributed.parallel.pipeline import Pipeline

        self._divide_sequences(model)
        if self._context is not None and not self._compared:
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
        parameters = list(parameters)
        # Tokens of all ranks that divide the experts have contributed to an expert's gradient already.
        experts = [p for _, p in parameters if self.is_expert(p)]
        wires: dict[nn.Parameter, Wire | None] = {}
        if experts and self.mesh is not None:
            wires = dict.fromkeys(experts, _wire_to(self.mesh.same_experts))
        # All ranks, where each of them holds the whole model.
        wire = _wire_to(self.replica_group if self.shares_model else dist.group.WORLD)
        return build_reducer(self, parameters, wire, self.config.find_unused_parameters, wires)

    def reduce_gradients(self) -> None:
        """Called at the end of a window: leave in ``.grad`` what the ranks with different samples add up to.
        Collective. Nothing to do where backward has done it."""

    def run_window(self, window: Window) -> tuple[Any, Any]:
        if not self.shares_model:
            seen = super().run_window(window)
            self.count_first()
            self.reduce_gradients()
            return seen
        inputs = self._first.inputs() if self._first is not None else nullcontext()
        window = self._own_slices(window)
        with inputs, self._loss_of_parts(), self._over_slices(training=True):
            seen = super().run_window(window)
        if self.pipeline is not None:
            if self._count is not None and self.compression is None:
                self.add_count(self._count)
            self.add_shared(self.pipeline)
        self.count_first()
        self.reduce_gradients()
        if self._axis is not None:
            self._sum_partial(self._axis)
        return seen if self._reports else (0.0, 0)

    @property
    def repeats_windows(self) -> bool:  # type: ignore[override]
        return not self.shares_model

    @property
    def copies_in_evaluation(self) -> bool:
        return self.mesh is not None and self.mesh.dims.expert > 1

    @property
    def loads_ahead(self) -> bool:
        # Pieces of a micro-batch and slices of its sequences are made of it on the host.
        return super().loads_ahead and self.pipeline is None and self._context is None

    def add_shared(self, pipeline: Pipeline) -> None:
        """Add up the gradients of parameters that several stages use. Collective."""
        pipeline.tensors.add_shared(lambda name, parameter: parameter.grad is not None)

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
        square: Tensor | None = None
        by_copies: dict[int, list[Tensor]] = {}
        for parameter in self._parameters:
            if parameter.grad is not None:
                by_copies.setdefault(self._copies[parameter], []).append(local_part(parameter.grad))
        for copies, parts in by_copies.items():
            for alike in group_by_dtype(parts):
                norms = torch.stack(torch._foreach_norm(alike)).to(self.world.device, torch.float64)
                addend = norms.square().sum()
                addend = addend if copies == 1 else addend / copies
                square = addend if square is None else square + addend
        if square is None:
            square = torch.zeros((), dtype=torch.float64, device=self.world.device)
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

    def release(self) -> None:
        if self._context is not None:
            self._context.release()
            self._context = None
        super().release()
        self._axis = None

    def teardown(self) -> None:
        if self.pipeline is not None:
            self.pipeline.remove()  # a run that failed was not released
        if self._context is not None:
            self._context.release()
        self._settings.close()  # torch's, which this run had changed
        super().teardown()


def _wire_to(group: Any) -> Wire | None:
    return None if group is None else GroupWire(group)
