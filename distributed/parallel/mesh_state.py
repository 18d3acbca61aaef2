"""MeshState: a backend whose ranks form a mesh, with its groups and what each rank holds of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distributed.checkpoint.dtensor import is_sharded, local_part, whole
from distributed.checkpoint.torch_state import canonical_name
from distributed.communication.broadcast import broadcast_values
from distributed.interfaces.parallel_dims import DATA_AXES, MODEL_AXES, ParallelDims
from distributed.interfaces.placement import World
from distributed.interfaces.plan import RunPlan
from distributed.parallel.deferred_build import tensors_of
from distributed.parallel.mesh import Mesh, forget_mesh, shared_mesh
from distributed.parallel.original_model import OriginalModel
from distributed.parallel.stage_tensors import WITHIN_STAGE
from distributed.planner.pipeline import PipelineShape, pipeline_shape
from distributed.training.compression import Held
from distributed.training.optimizers import follow_parameters
from distributed.training.process_group_backend import ProcessGroupBackend
from distributed.training.sharded_scaler import ShardedScaler
from distributed.training.whole_model import read_only

if TYPE_CHECKING:
    from distributed.parallel.pipeline import Pipeline

__all__ = ["MeshState"]

_CONTRIBUTE = (*DATA_AXES, "context")
"""Axes along which losses, counts and gradients add up: samples, or slices of them, differ."""
_PARTS = tuple(axis for axis in MODEL_AXES if axis not in _CONTRIBUTE)
"""Axes along which ranks hold different parts of the model."""


class MeshState(ProcessGroupBackend):
    """What a rank of a mesh holds, for checkpoints, callbacks and the end of a run.

    Attributes:
        mesh: the ranks, None if all of them only have different samples.
        original: the model before anything was cut, None if nothing was.
        pipeline: the stages of this rank, None without several.
    """

    mesh: Mesh | None = None
    original: OriginalModel | None = None
    pipeline: Pipeline | None = None
    _shape: PipelineShape | None = None
    _released = False

    def setup(self, plan: RunPlan) -> World:
        several = self.needs_mesh(plan.dims)
        if several:
            self.scaler_class = ShardedScaler
        world = super().setup(plan)
        self._plan, self._joined = plan, plan.joined is not None
        if several:
            timeout = plan.config.collective_timeout
            self.mesh = shared_mesh(plan.dims, world.rank, world.device, timeout, self.all_reduce)
        if plan.dims.pipeline > 1:
            self._shape = pipeline_shape(plan.config, plan.dims, plan.batch)
            self.counts_with_gradients = False  # a stage that sees no loss has no count
        return world

    def take_batch(self, plan: RunPlan) -> None:
        super().take_batch(plan)
        self._plan = plan
        if plan.dims.pipeline > 1:
            self._shape = pipeline_shape(plan.config, plan.dims, plan.batch)

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
        """Process group of the ranks with different samples, or slices of them; None for all, or for this
        rank only where ranks share a model."""
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
        """Process group of the ranks that have the same stages; None for all, or for this rank only."""
        if self.mesh is None or self._shape is None:
            return None
        return self.mesh.group(*WITHIN_STAGE)

    @property
    def count_group(self) -> Any:
        """Process group over which counts are added: as `replica_group`, with all stages; None for all."""
        if self.mesh is None or not self.shares_model:
            return None
        return self.mesh.group("pipeline", *_CONTRIBUTE)

    # -- state ------------------------------------------------------------------------

    @property
    def holders(self) -> tuple[int, int]:
        return (self.world.rank, self.world.size) if self.shares_model else super().holders

    def held(self, name: str) -> bool:
        return self.pipeline is None or self.pipeline.tensors.holds(name)

    def copies(self, name: str, tensor: Tensor) -> tuple[int, int]:
        if self.mesh is None or (self.pipeline is None and not is_sharded(tensor)):
            return super().copies(name, tensor)
        copy, number = self.mesh.copies(tensor)
        if self.pipeline is None:
            return copy, number
        stage, stages = self.pipeline.tensors.copy_of(canonical_name(name))
        return stage * number + copy, stages * number

    def place_of(self, name: str, parameter: Tensor) -> Held:
        if self.mesh is None:
            return super().place_of(name, parameter)
        found = self.mesh.place_of(parameter)
        if self.pipeline is None:
            return found
        stage, stages = self.pipeline.tensors.copy_of(name)
        replica = found.replica
        copies = replace(replica, copy=stage * replica.copies + replica.copy, copies=stages * replica.copies)
        return Held(parameter, copies, found.part, found.parts)

    def leads(self, name: str) -> bool:
        if self.pipeline is None or self.mesh is None:
            return super().leads(name)
        inner = self.mesh.dims.index(self.world.rank, *WITHIN_STAGE)
        return inner == 0 and self.pipeline.tensors.copy_of(name)[0] == 0

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

    def is_expert(self, parameter: Tensor) -> bool:
        """Whether the ranks of the expert axis divide a parameter."""
        return self.mesh is not None and "expert" in self.mesh.axes_of(parameter)

    def whole_model(self) -> AbstractContextManager[nn.Module]:
        if self.original is None:
            return super().whole_model()
        return self.evaluated(read_only(self.original.whole_copy(self._gatherer())))

    def _gatherer(self) -> Callable[[Tensor], Tensor]:
        """What makes a parameter or buffer of the model whole."""
        if self.pipeline is None:
            return whole
        names = {id(tensor): canonical_name(name) for name, tensor in tensors_of(self.module)}
        return partial(self.pipeline.tensors.gather, names=names)

    @torch.no_grad()
    def release(self) -> None:
        super().release()
        if self.original is not None:
            self._restore_model(self.original)
        self._released = True

    def _restore_model(self, original: OriginalModel) -> None:
        cut = dict(self.module.named_parameters())
        if self.pipeline is not None:
            self.pipeline.remove()
        original.restore(self._gatherer())
        follow_parameters(self.optimizer, cut, self.module)
        for name, parameter in self.module.named_parameters():
            self._restore_state(name, parameter)
        self.original = self.pipeline = None

    def _restore_state(self, name: str, parameter: nn.Parameter) -> None:
        """Give the optimizer the whole state of a parameter. Collective."""
        state = self.optimizer.state.get(parameter, {})
        if self.pipeline is not None:
            state = self.pipeline.tensors.gather_state(canonical_name(name), state)
        whole_state = {slot: _whole(value, parameter.device) for slot, value in state.items()}
        if whole_state:
            self.optimizer.state[parameter] = whole_state

    def teardown(self) -> None:
        if self.mesh is not None and self._joined and not self._released:
            forget_mesh(self.mesh)  # the run failed
        super().teardown()

    def share_buffers(self) -> None:
        """Give all ranks that hold the same the buffers of the first of them. Collective."""
        if self.shares_model and self.replica_group is None:
            return  # no other rank has other samples for the same stages
        held = (b for name, b in self.module.named_buffers() if self.held(canonical_name(name)))
        broadcast_values(held, self.replica_group)


def _whole(value: Any, device: torch.device) -> Any:
    return whole(value).to(device) if is_sharded(value) else value
