"""Shard a model in place by torch's fully_shard, and unshard it again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from distributed.checkpoint.dtensor import whole
from distributed.errors import UserError
from distributed.interfaces.placement import World
from distributed.training.whole_model import copy_with
from distributed_backends.fsdp.deferred_build import deal_out, tensors_of
from distributed_backends.fsdp.section import FSDPSection

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ADDED_BY = ("torch.distributed.fsdp", "distributed.training.gather_order")
"""Modules of the hooks that a sharded model has more than the whole one."""


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
        world: ranks over which the model is sharded.
        built_by_one: whether only rank 0 has the model's data; the others may hold meta tensors.

    Attributes:
        root: root module, through which the model is used.
        group: process group of the ranks that share one copy of the model.
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
        built_by_one: bool = False,
    ) -> None:
        if not built_by_one or world.rank == 0:
            _check_data(model)
        _check_dtypes(model, units)
        for parameter in model.parameters():  # fully_shard takes row-major ones only (torch 2.13)
            parameter.data = parameter.data.contiguous()
        self._device = world.device
        self._before = _Before(model)
        built = {name: tensor.detach() for name, tensor in tensors_of(model)} if built_by_one else {}
        self.replicated = _replicated(model)
        self._mesh = _mesh(section, world)
        self.group: Any = self._mesh.get_group("shard")
        self.root: Any = Root(model)
        options: dict[str, Any] = {
            "mesh": self._mesh if section.replicate > 1 else self._mesh["shard"],
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=_DTYPES.get(section.reduce_dtype or "")),
            "offload_policy": _offload(section, world.device),
            "ignored_params": self.replicated,
        }
        for unit in units:
            fully_shard(unit, reshard_after_forward=section.reshard_after_forward, **options)
        # Backward needs the rest at once: to free it after forward would gather it twice for nothing.
        fully_shard(self.root, reshard_after_forward=False, **options)
        if built_by_one:
            if world.rank > 0 and any(tensor.is_meta for _, tensor in tensors_of(model)):
                self.root.to_empty(device="cpu" if section.cpu_offload else world.device)
                # Memory makes other objects of those that fully_shard left alone.
                self.replicated = _replicated(model)
            deal_out(model, built, world.device)
        for parameter in self.replicated:
            parameter.data = parameter.data.to(world.device)
        self.parameters = {n: p for n, p in model.named_parameters() if p not in self.replicated}
        self._before.copy_attributes()
        self.units = [module for module in self.root.modules() if isinstance(module, FSDPModule)]
        self._used = [False] * len(self.parameters)
        self._fill_gradients()
        self._before.let_go()

    def reshard(self) -> None:
        """Free what a forward without backward left gathered: the model holds DTensors again."""
        for unit in self.units:
            unit.reshard()

    def written(self) -> str | None:
        """Name of a parameter whose gathered values were changed in place, which resharding discards."""
        for part in self._gathered():
            # torch preserves the version when it gathers again.
            if getattr(part, "_unsharded_param", None) is not None and part._unsharded_param._version:
                return next(n for n, p in self.parameters.items() if p is part.sharded_param)
        return None

    def _gathered(self) -> Iterator[Any]:
        """torch's records of the sharded parameters."""
        for unit in self.units:
            group: Any = unit._get_fsdp_state()._fsdp_param_group
            yield from group.fsdp_params if group is not None else ()

    @contextmanager
    def whole_copy(self) -> Iterator[nn.Module]:
        """A copy of the unsharded model. Collective."""
        self.reshard()
        model: nn.Module = self.root.model
        values = {p: whole(p) for p in model.parameters()}
        with self._before.undone():
            unsharded = copy_with(model, values)
        values.clear()
        yield unsharded

    def make_whole(self) -> None:
        """Restore the unsharded model on every rank. Collective."""
        self.reshard()
        self._before.restore()

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
            groups: list[Any] = unit._get_fsdp_state()._fsdp_param_groups
            for group in groups:
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
    def average_replicated(self) -> None:
        """Average the gradients of `replicated` parameters over the ranks. A parameter that no rank used
        keeps None. Collective."""
        found = [p for p in self.root.parameters() if p in self.replicated and p.requires_grad and p.numel()]
        if found:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in found]
            used = [torch.full_like(p, float(p.grad is not None)) for p in found]
            flat = torch.stack([*gradients, *used])
            dist.all_reduce(flat)
            flat /= self._mesh.size()
            for parameter, gradient, share in zip(found, *flat.chunk(2), strict=True):
                parameter.grad = gradient.clone() if share else None


class _Before:
    """Snapshot of a module tree before fully_shard, which cannot be undone by torch."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, type(module), set(vars(module))) for module in model.modules()]
        self._parameters = [
            (module, name, p, _real(p.device))
            for module, _, _ in self._modules
            for name, p in _own(module._parameters)
        ]
        self._buffers = [
            (module, name, _real(b.device))
            for module, _, _ in self._modules
            for name, b in _own(module._buffers)
        ]
        self._added: list[tuple[nn.Module, set[str]]] = []

    def copy_attributes(self) -> None:
        """Copy the attributes of the original parameters to those in their place."""
        for module, name, parameter, _ in self._parameters:
            vars(module._parameters[name]).update(vars(parameter))

    @torch.no_grad()
    def let_go(self) -> None:
        """Once sharded: note what was added, and free the whole parameters' memory."""
        self._added = [(module, set(vars(module)) - keys) for module, _, keys in self._modules]
        for module, name, parameter, _ in self._parameters:
            if module._parameters[name] is not parameter:
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Within the block, modules have the classes, hooks and attributes of before; parameters stay cut."""
        kinds = [type(module) for module, _, _ in self._modules]
        tables = [
            (table, OrderedDict(table))
            for module, _, _ in self._modules
            for name, table in vars(module).items()
            if "_hooks" in name and isinstance(table, OrderedDict)
        ]
        taken = [(m, {key: vars(m).pop(key) for key in added if key in vars(m)}) for m, added in self._added]
        for module, kind, _ in self._modules:
            module.__class__ = kind
            _remove_hooks(module)
        try:
            yield
        finally:
            for (module, _, _), kind in zip(self._modules, kinds, strict=True):
                module.__class__ = kind
            for table, entries in tables:
                table.clear()
                table.update(entries)
            for module, values in taken:
                vars(module).update(values)

    @torch.no_grad()
    def restore(self) -> None:
        """The same parameter objects, filled; the same classes and hooks. Collective."""
        full: dict[int, nn.Parameter] = {}
        for module, name, parameter, device in self._parameters:
            current: Any = module._parameters[name]
            if id(parameter) not in full:
                full[id(parameter)] = _filled(parameter, whole(current).detach().to(device))
            module._parameters[name] = full[id(parameter)]
        for module, name, device in self._buffers:
            buffer = module._buffers[name]
            module._buffers[name] = None if buffer is None else buffer.to(device)
        for module, kind, _ in self._modules:
            module.__class__ = kind
            _module_state_mapping.pop(module, None)
            _remove_hooks(module)
        for module, added in self._added:
            for key in added:
                vars(module).pop(key, None)


def _real(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device


def _filled(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """`parameter` holding `data`; another in its place where it came without memory."""
    if parameter.is_meta:
        filled = nn.Parameter(data, parameter.requires_grad)
        vars(filled).update(vars(parameter))
        return filled
    parameter.data, parameter.grad = data, None
    return parameter


def _own(tensors: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, tensor) for name, tensor in tensors.items() if tensor is not None]


def _remove_hooks(module: nn.Module) -> None:
    """Remove the hooks of a sharded model, recognized by their module."""
    tables = {name: table for name, table in vars(module).items() if isinstance(table, OrderedDict)}
    for name, table in tables.items():
        if not name.endswith("_hooks"):
            continue
        for key, hook in list(table.items()):
            function = getattr(hook, "hook", hook)
            if str(getattr(function, "__module__", "")).startswith(_ADDED_BY):
                for same in (name, f"{name}_with_kwargs", f"{name}_always_called"):
                    getattr(module, same, {}).pop(key, None)


def _mesh(section: FSDPSection, world: World) -> DeviceMesh:
    kind = world.device.partition(":")[0]
    if section.replicate == 1:
        return init_device_mesh(kind, (world.size,), mesh_dim_names=("shard",))
    shape = (section.replicate, world.size // section.replicate)
    return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))


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
