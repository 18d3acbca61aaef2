"""Shard a model in place by torch's fully_shard, and unshard it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.utils.hooks import RemovableHandle

from distributed.errors import UserError
from distributed.interfaces.placement import World
from distributed.parallel.deferred_build import fill_from_rank_zero, tensors_of
from distributed.parallel.original_model import OriginalModel
from distributed.resilience.divergence import sum_of_bits
from distributed.system.tensors import digest_of
from distributed_backends.fsdp.assigned_data import AssignedData, follow_data
from distributed_backends.fsdp.section import FSDPSection

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Root(nn.Module):
    """Root module: a function called through it finds gathered parameters, as in forward, so that a
    training step may use the model in other ways than calling it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class ShardedModel:
    """Shard `model` in place, each of `units` and the rest by itself.

    Args:
        model: unsharded model, equal on all ranks; its parameters become DTensors sharded by rows.
        units: modules inside it, inner ones first.
        world: this rank.
        mesh: the ranks over which the model is sharded, along the axes data (copies) and shard.
        before: the model before anything was cut.
        built: rank 0's whole tensors by name, if only rank 0 has the model's data and the others may hold
            meta tensors; None if all have it.
        group: the ranks that have the same stages of a pipeline; None without stages.
        is_expert: whether other ranks hold the other parts of a parameter; it is not sharded here.

    Attributes:
        root: root module, through which the model is used.
        parameters: sharded parameters by name.
        units: the modules that gather their parameters, the root included.
        replicated: parameters without a dimension or without elements, which stay on every rank.

    Raises:
        UserError: parameters that are gathered together differ in dtype, or hold no data.
    """

    def __init__(
        self,
        model: nn.Module,
        units: list[nn.Module],
        section: FSDPSection,
        world: World,
        mesh: DeviceMesh,
        before: OriginalModel,
        built: dict[str, Tensor] | None = None,
        group: dist.ProcessGroup | None = None,
        is_expert: Callable[[Tensor], bool] = lambda parameter: False,
    ) -> None:
        # What other stages of a pipeline hold has no data here.
        absent = {p for p in model.parameters() if p.is_meta} if group is not None else set()
        units = [unit for unit in units if not absent.issuperset(unit.parameters())]
        if group is None and (built is None or world.rank == 0):
            _check_data(model)
        _check_dtypes(model, units)
        for parameter in model.parameters():  # fully_shard takes row-major ones only (torch 2.13)
            if parameter not in absent:
                parameter.data = parameter.data.contiguous()
        self._device = world.device
        self._before, self._group = before, group
        self.replicated = _replicated(model) - absent
        kept = absent | {p for p in model.parameters() if is_expert(p)}
        self.root: Any = Root(model)
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": _precisions(section),
            "offload_policy": _offload(section, world.device),
            "ignored_params": self.replicated | kept,
        }
        for unit in units:
            fully_shard(unit, reshard_after_forward=section.reshard_after_forward, **options)
        # Backward needs the rest at once: to free it after forward would gather it twice for nothing.
        fully_shard(self.root, reshard_after_forward=False, **options)
        if built is not None:
            if world.rank > 0 and any(tensor.is_meta for _, tensor in tensors_of(model)):
                self.root.to_empty(device="cpu" if section.cpu_offload else world.device)
                # Memory makes other objects of those that fully_shard left alone.
                self.replicated = _replicated(model)
            fill_from_rank_zero(model, built, world.device)
        for parameter in self.replicated:
            parameter.data = parameter.data.to(world.device)
        left = self.replicated | kept
        self.parameters = {n: p for n, p in model.named_parameters() if p not in left}
        self._before.copy_attributes()
        self.units = [module for module in self.root.modules() if isinstance(module, FSDPModule)]
        self._used = [False] * len(self.parameters)
        self._values: dict[Any, dict[Any, str]] = {}
        self._changed: set[Any] = set()
        self._fill_gradients()
        self._before.let_go()
        follow_data()
        self._num_assigned = AssignedData.count

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModel:
        return self  # hooks of a copied model refer to it

    def reshard(self) -> None:
        """Free what a forward without backward left gathered: the model holds DTensors again."""
        for unit in self.units:
            unit.reshard()

    def take_assigned(self) -> None:
        """Let torch gather what was assigned to ``.data`` of parameters since the last call."""
        if self._num_assigned != AssignedData.count:
            self._num_assigned = AssignedData.count
            self.reshard()
            for part in self._gathered():
                part.reset_sharded_param()

    def gather(self, number: int) -> None:
        """Gather the parameters of one of `units` with the other ranks, as in a forward pass of it."""
        unit: Any = self.units[number]
        unit.unshard()
        if all(group._reshard_after_forward for group in _groups(unit)):
            unit.reshard()

    def watch(self) -> list[RemovableHandle]:
        """Let `written` notice changes by ``.data``, too, which have no version, until these are removed."""
        return [
            handle
            for unit in self.units
            for handle in (
                unit.register_forward_pre_hook(self._note_values),
                unit.register_forward_hook(self._compare_values, prepend=True),  # before it reshards
            )
        ]

    def _note_values(self, unit: Any, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return  # the compiled graph would keep the hook
        parts = [part for group in _groups(unit) for part in group.fsdp_params]
        gathered = [part for part in parts if part.sharded_state == ShardedState.UNSHARDED]
        self._values[unit] = {part: digest_of(sum_of_bits(part._unsharded_param)) for part in gathered}

    def _compare_values(self, unit: Any, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        before = self._values.pop(unit, {})
        self._note_values(unit)
        now = self._values.pop(unit)
        self._changed |= {part for part in before.keys() & now.keys() if before[part] != now[part]}

    def written(self) -> str | None:
        """Name of a parameter whose gathered values were changed in place, which resharding discards."""
        for part in self._gathered():
            if part in self._changed:
                return next(n for n, p in self.parameters.items() if p is part.sharded_param)
            # torch preserves the version when it gathers again.
            if getattr(part, "_unsharded_param", None) is not None and part._unsharded_param._version:
                return next(n for n, p in self.parameters.items() if p is part.sharded_param)
        return None

    def _gathered(self) -> Iterator[Any]:
        """torch's records of the sharded parameters."""
        for unit in self.units:
            for group in _groups(unit):
                yield from group.fsdp_params

    def take_used(self) -> list[bool]:
        """For each of `parameters` whether a backward on this rank gave it a gradient since the last call."""
        used, self._used = self._used, [False] * len(self._used)
        return used

    def _fill_gradients(self) -> None:
        """Reduce zeros for parameters that this rank did not use. FSDP2 leaves them out, so that ranks that
        use different parameters would add gradients of different ones."""
        numbers = {parameter: number for number, parameter in enumerate(self.parameters.values())}
        places = {
            (module, name): numbers[parameter]
            for module in self.root.modules()
            for name, parameter in module._parameters.items()
            if parameter in numbers
        }
        for unit in self.units:
            for group in _groups(unit):
                members = [
                    (places[p._module_info.module, p._module_info.param_name], p) for p in group.fsdp_params
                ]
                group.post_backward = partial(self._reduce, group, members, group.post_backward)

    def _reduce(
        self, group: Any, members: list[tuple[int, Any]], post_backward: Callable[..., None], *args: Any
    ) -> None:
        for number, member in members:
            parameter = getattr(member, "_unsharded_param", None)  # missing before its first gather
            if parameter is None or not parameter.requires_grad:
                continue
            if parameter.grad is not None or member.unsharded_accumulated_grad is not None:
                self._used[number] = True
            elif group.reduce_grads:
                parameter.grad = torch.zeros_like(parameter)
        post_backward(*args)

    @torch.no_grad()
    def average_replicated(self, scale: int) -> None:
        """Average the gradients of `replicated` parameters over the ranks, and multiply them by `scale`. A
        parameter that no rank used keeps None. Collective."""
        found = [p for p in self.root.parameters() if p in self.replicated and p.requires_grad and p.numel()]
        if found:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in found]
            used = [torch.full_like(p, float(p.grad is not None)) for p in found]
            flat = torch.stack([*gradients, *used])
            dist.all_reduce(flat, group=self._group)
            flat /= dist.get_world_size(self._group)
            for parameter, gradient, share in zip(found, *flat.chunk(2), strict=True):
                parameter.grad = gradient * scale if share else None


def _groups(unit: FSDPModule) -> list[Any]:
    """torch's groups of parameters of `unit`: a list since 2.12, one or None before."""
    state: Any = unit._get_fsdp_state()
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return groups


def _offload(section: FSDPSection, device: str) -> OffloadPolicy:
    # Pinned memory speeds up copies to a GPU; without one there is none to be had.
    return CPUOffloadPolicy(pin_memory=device != "cpu") if section.cpu_offload else OffloadPolicy()


def _replicated(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that cannot be cut by rows: without a dimension, or without elements."""
    return {p for p in model.parameters() if p.dim() == 0 or not p.numel()}


def _check_data(model: nn.Module) -> None:
    empty = [name for name, tensor in model.state_dict().items() if getattr(tensor, "is_meta", False)]
    if empty:
        raise UserError(
            f"the model holds no data: {', '.join(empty[:3])} on the meta device",
            field="model",
            got="meta tensors",
            remedy="Build it on the CPU; each rank then keeps only its shard",
        )


def _check_dtypes(model: nn.Module, units: list[nn.Module]) -> None:
    """FSDP reduces the gradients of a unit in one tensor, so they must be of one dtype."""
    taken: set[int] = set()
    for unit in [*units, model]:
        own = {n: p for n, p in unit.named_parameters() if id(p) not in taken and p.dim() and p.requires_grad}
        taken |= {id(p) for p in unit.parameters()}
        dtypes = {str(p.dtype).removeprefix("torch.") for p in own.values()}
        if len(dtypes) > 1:
            raise UserError(
                f"the trainable parameters of {type(unit).__name__} that are gathered together have"
                f" different dtypes ({', '.join(sorted(dtypes))})",
                field="fsdp.wrap",
                remedy="Use one dtype, or name the modules that differ in fsdp.block_classes",
            )


def _precisions(section: FSDPSection) -> MixedPrecisionPolicy:
    """Inputs are left as they are: autocast casts them where an operation asks for it."""
    reduced = section.reduce_dtype or ("fp32" if section.param_dtype else "")
    return MixedPrecisionPolicy(
        param_dtype=_DTYPES.get(section.param_dtype or ""),
        reduce_dtype=_DTYPES.get(reduced),
        cast_forward_inputs=section.param_dtype is None,
    )
