"""MeshBackend: a process-group backend whose ranks may share a model, along the axes of a mesh."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.checkpoint.dtensor import cut_like, is_sharded, local_part, whole
from distributed.communication.broadcast import broadcast_values
from distributed.interfaces.backend import StepResult, Window
from distributed.interfaces.parallel_dims import DATA_AXES, MODEL_AXES, ParallelDims
from distributed.interfaces.placement import World
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.task import Task
from distributed.parallel.asynchronous import overlap_collectives
from distributed.parallel.automatic_pairs import find_pairs
from distributed.parallel.context_axis import ContextAxis, attention_of, draws_numbers
from distributed.parallel.context_check import check_objective, check_slices
from distributed.parallel.cut_check import CutCheck
from distributed.parallel.first_step import EqualOnTensorRanks
from distributed.parallel.gradient_reducer import GradientReducer
from distributed.parallel.mesh import Mesh
from distributed.parallel.original_model import OriginalModel
from distributed.parallel.sample_batch import forward_of, is_short
from distributed.parallel.tensor_layers import TensorAxis
from distributed.parallel.tensor_model import check_optimizer, cut_model, report
from distributed.system.output import print_line
from distributed.training.optimizers import follow_parameters
from distributed.training.process_group_backend import ProcessGroupBackend
from distributed.training.sharded_scaler import ShardedScaler
from distributed.training.step_module import StepModule
from distributed.training.whole_model import read_only

__all__ = ["MeshBackend"]

_CONTRIBUTE = (*DATA_AXES, "context")
"""Axes along which losses, counts and gradients add up: samples, or slices of them, differ."""
_PARTS = tuple(axis for axis in MODEL_AXES if axis not in _CONTRIBUTE)
"""Axes along which ranks hold different parts of the model."""
_MATHS = torch.backends.mha
_NOT_COMPARED = (
    "note: the output of the cut model was not compared with that of the whole model, because there was no"
    " forward pass of the first samples to compare (docs/tensor-parallelism.md)"
)


class MeshBackend(ProcessGroupBackend):
    """The base of backends that train along the axes of ``parallel``; without such an axis as its base.

    A subclass reduces gradients over the ranks with different samples (`reduce_gradients`); this class does
    what all of them share: it cuts the model over the tensor axis before `place` of the subclass, counts each
    element once in the norm and in checkpoints, and reports each sample once.

    Attributes:
        mesh: the ranks, None if all of them only have different samples.
        original: the model before anything was cut, None if nothing was.
    """

    mesh: Mesh | None = None
    original: OriginalModel | None = None
    _axis: TensorAxis | None = None
    _context: ContextAxis | None = None
    _compared = False
    _first: EqualOnTensorRanks | None = None
    _fast_path: bool | None = None
    _partial: tuple[nn.Parameter, ...] = ()

    def setup(self, plan: RunPlan) -> World:
        several = self.needs_mesh(plan.dims)
        if several:
            self.scaler_class = ShardedScaler
        world = super().setup(plan)
        self._plan, self._joined = plan, plan.joined is not None
        if several:
            self.mesh = Mesh(plan.dims, world.rank, world.device, plan.config.collective_timeout)
        return world

    def needs_mesh(self, dims: ParallelDims) -> bool:
        """Whether there is more than ranks with different samples and copies of the model."""
        return dims.model_parallel_size > 1

    @property
    def shares_model(self) -> bool:
        """Whether several ranks have the same samples."""
        return self.world.model_parallel_size > 1

    @property
    def replica_group(self) -> Any:
        """Process group of the ranks with different samples, or slices of them; None for all."""
        several = self.mesh is not None and self.shares_model
        return self.mesh.group(*_CONTRIBUTE) if self.mesh is not None and several else None

    @property
    def num_contributors(self) -> int:
        return self.world.data_parallel_size if self.mesh is None else self.mesh.dims.size(*_CONTRIBUTE)

    # -- the model --------------------------------------------------------------------

    def prepare(self, task: Task) -> None:
        self._task = task
        super().prepare(task)
        if self._context is not None:
            check_objective(task, self.objective)
        if self._axis is not None:
            check_optimizer(self.optimizer, self.config.backend)
            self._axis.joins_vocabulary = self.objective.takes_parts_of_classes
            names = self._axis.partial
            self._partial = tuple(p for n, p in self.module.named_parameters() if n in names)
            self._first = EqualOnTensorRanks(self._axis, self.module, self._is_cut)
        self._cut_optimizer_state()
        for group in self.optimizer.param_groups:
            # One kernel cannot take parameters of several meshes, or of one and of none, together.
            if len({getattr(p, "device_mesh", None) for p in group["params"]}) > 1:
                group.update({flag: False for flag in ("foreach", "fused") if flag in group})

    def cut(self, model: nn.Module, built_by_one: bool = False) -> None:
        """Cut `model` in place over the tensor axis, if there is one. Collective.

        Args:
            built_by_one: only rank 0 has the model's values.
        """
        if self.mesh is not None and self.mesh.dims.context > 1:
            self._context = self._slices_of(model, self.mesh)
        if self.mesh is None or self.mesh.dims.tensor == 1:
            return
        if self.original is None:
            self.remember(model, built_by_one)
        assert self.original is not None
        self._fast_path = _MATHS.get_fastpath_enabled()
        _MATHS.set_fastpath_enabled(False)  # it reads weights without calling the layers
        self._axis = TensorAxis(self.mesh.submesh("tensor"))
        if self.config.compile != "none" and self.world.device.startswith("cuda"):
            overlap_collectives(self._axis.group)
        check = None if built_by_one else self._cut_check(model)
        given, pairs = self.config.parallel.tensor_plan, partial(self._pairs, model)
        names, found = cut_model(model, self._axis, given, self.config.backend, pairs, self.original)
        if self.world.rank == 0:
            report(model, names, found)
        if self.all_reduce([float(check is None)])[0] == 0.0:
            assert check is not None
            check.compare(self._axis.size, lambda times: self.all_reduce([times])[0] / self.world.size)
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

    def _cut_check(self, model: nn.Module) -> CutCheck | None:
        """None for data and models with which no forward pass is possible here and now."""
        try:
            forward, batch = forward_of(self._task, model)
            return CutCheck(model, forward) if is_short(model, batch) else None
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
        self.cut(model)
        placed = super().place(model)
        self.settle()
        return placed

    def settle(self) -> None:
        """Once the model is cut: give the parameters in their places the attributes of the original ones."""
        if self.original is not None:
            self.original.copy_attributes()
            self.original.let_go()

    def _cut_optimizer_state(self) -> None:
        """Cut the state of an optimizer that an earlier fit used, which is of whole parameters."""
        for parameter, state in self.optimizer.state.items():
            for slot, value in state.items():
                if is_sharded(parameter) and isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[slot] = cut_like(parameter, value)

    # -- one step ---------------------------------------------------------------------

    def reducer_of(self, step: StepModule) -> GradientReducer:
        """Adds the gradients of `step` over the ranks with different samples."""
        names = {p: name for name, p in step.named_parameters() if p.requires_grad}
        limit = self.config.bucket_cap_mb * 2**20
        return GradientReducer(names, self.replica_group, limit, self.config.find_unused_parameters)

    def reduce_gradients(self) -> None:
        """Called at the end of a window: leave in ``.grad`` what the ranks with different samples add up to.
        Collective. Nothing to do where backward has done it."""

    def run_window(self, window: Window) -> tuple[Any, Any]:
        if self._axis is None and self._context is None:
            return super().run_window(window)
        inputs = self._first.inputs() if self._first is not None else nullcontext()
        window = self._own_slices(window)
        with inputs, self._loss_of_parts(), self._over_slices(training=True):
            seen = super().run_window(window)
        self.reduce_gradients()
        if self._axis is not None:
            self._sum_partial(self._axis)
        return seen if self._reports else (0.0, 0)

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
        return self.replica_set[0] == 0

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
            self._first = None
        return super().optimizer_step(max_norm, want_norm)

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
        for parameter in self._parameters:
            if parameter.grad is not None:
                by_copies.setdefault(self.mesh.copies(parameter)[1], []).append(local_part(parameter.grad))
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

    # -- state ------------------------------------------------------------------------

    @property
    def holders(self) -> tuple[int, int]:
        return (self.world.rank, self.world.size) if self.shares_model else super().holders

    def copies(self, tensor: Tensor) -> tuple[int, int]:
        return super().copies(tensor) if self.mesh is None else self.mesh.copies(tensor)

    def replicated(self) -> Mapping[str, Any] | None:
        """Trained parameters, of which a rank may hold a part."""
        trained = ((name, p) for name, p in self.module.named_parameters() if p.requires_grad)
        return {name: local_part(p).detach() for name, p in trained}

    @property
    def replica_set(self) -> tuple[int, int]:
        if self.mesh is None:
            return 0, 1
        return self.mesh.dims.index(self.world.rank, *_PARTS), self.mesh.dims.size(*_PARTS)

    def whole_model(self) -> AbstractContextManager[nn.Module]:
        return super().whole_model() if self.original is None else read_only(self.original.whole_copy())

    @torch.no_grad()
    def release(self) -> None:
        super().release()
        if self._context is not None:
            self._context.release()
            self._context = None
        if self.original is None:
            return
        cut = dict(self.module.named_parameters())
        self.original.restore()
        self.original = self._axis = None
        follow_parameters(self.optimizer, cut, self.module)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter, {})
                for slot, value in state.items():
                    if is_sharded(value):
                        state[slot] = whole(value).to(parameter.device)

    def teardown(self) -> None:
        if self._fast_path is not None:
            _MATHS.set_fastpath_enabled(self._fast_path)
            self._fast_path = None
        super().teardown()
