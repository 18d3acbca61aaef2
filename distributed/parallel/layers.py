"""Linear layers and models of which each rank of a process group holds a part, for loops of one's own.

The layers have the names, arguments and parameters of Megatron-LM's (Shoeybi et al. 2019): a parameter is a
plain tensor with this rank's part. `Trainer` cuts whole models by itself (``parallel.tensor``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from distributed.communication.broadcast import broadcast_values
from distributed.errors import UserError
from distributed.parallel.collectives import from_partial, from_parts, part_of, use_in_parts
from distributed.parallel.first_step import EqualOnTensorRanks
from distributed.parallel.original_model import OriginalModel
from distributed.parallel.tensor_layers import TensorAxis
from distributed.parallel.tensor_model import cut_model
from distributed.parallel.tensor_plan import declared_plan

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "TensorParallelModel", "build_layer"]


class _Group:
    """A process group in a module: copies of the module share it, and it is not pickled."""

    def __init__(self, group: Any) -> None:
        self.group = group

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def index(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Group:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.group is not None:
            raise UserError(
                "a layer of which each rank holds a part cannot be pickled, because its process group exists"
                " in this process only",
                field="group",
                remedy="Build it on each rank, or save its state_dict(). For Trainer.fit pass the model with"
                " torch.nn.Linear and set parallel.tensor",
            )
        return _Group, (None,)


class _PartOfLinear(nn.Module):
    """The parameters of both layers: this rank's part of those of a `torch.nn.Linear`."""

    _dim: int
    """Dimension of the weight along which it is cut."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        world_size: int | None = None,
        *,
        bias: bool = True,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._ranks = _Group(_own_group(group))
        size = self._ranks.size
        if world_size not in (None, size):
            raise UserError(
                f"the process group has {size} rank{'s' if size > 1 else ''}",
                field="world_size",
                got=world_size,
                allowed=str(size),
                remedy="Leave world_size out, or pass group= with these ranks (torch.distributed.new_group)",
            )
        self.in_features, self.out_features = in_features, out_features
        name = ("out_features", "in_features")[self._dim]
        if getattr(self, name) % size:
            raise UserError(
                f"{size} ranks cannot divide it",
                field=name,
                got=getattr(self, name),
                allowed=f"multiples of {size}",
                remedy="Change the layer, or use a group of another size",
            )
        self._draw(bias, device, dtype)

    def _draw(self, bias: bool, device: Any, dtype: Any) -> None:
        whole = nn.Linear(self.in_features, self.out_features, bias, device, dtype)
        if self._ranks.group is not None and not whole.weight.is_meta:
            broadcast_values(whole.parameters(), self._ranks.group)
        self.weight = nn.Parameter(self._part(whole.weight))
        whole_bias: Tensor | None = whole.bias
        if whole_bias is None:
            self.register_parameter("bias", None)
        else:
            self.bias = nn.Parameter(self._part(whole_bias) if self._dim == 0 else whole_bias.detach())

    def _part(self, whole: Tensor) -> Tensor:
        part = whole.detach().chunk(self._ranks.size, self._dim)[self._ranks.index]
        return part.clone(memory_format=torch.contiguous_format)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share the layer; None for one process."""
        found: dist.ProcessGroup | None = self._ranks.group
        return found

    @property
    def is_part(self) -> bool:
        """Whether the weight is a part of the whole one; `Trainer` trains whole models."""
        return self._ranks.size > 1

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features},"
            f" bias={self.bias is not None}, ranks={self._ranks.size}"
        )


class ColumnParallelLinear(_PartOfLinear):
    """A linear layer of which each of P ranks computes out_features / P outputs. Collective.

    Its values are those of the `torch.nn.Linear` that the first rank of the group would build.

    Args:
        in_features: size of each input, which is whole on every rank.
        out_features: size of the whole output; a multiple of P.
        world_size: P, to check it; None takes the size of `group`.
        gather_output: every rank gets the whole output; False leaves each its own part.
        bias: whether the layer has one.
        group: the P ranks; None is torch's default group, and this process alone where there is none.
        device, dtype: of the parameters.

    Attributes:
        weight: this rank's rows, (out_features / P, in_features).
        bias: this rank's elements, (out_features / P,), or None.

    Raises:
        UserError: the ranks cannot divide out_features, `world_size` is not the group's, or this rank is not
            in the group.
    """

    _dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        world_size: int | None = None,
        *,
        gather_output: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, world_size, **options)
        self.gather_output = gather_output

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features), or this rank's (..., out_features / P). Collective."""
        if not self.is_part:
            return F.linear(x, self.weight, self.bias)
        out = F.linear(use_in_parts(x, self.group), self.weight, self.bias)
        return from_parts(out, self.group, out.dim() - 1) if self.gather_output else out


class RowParallelLinear(_PartOfLinear):
    """A linear layer of which each of P ranks multiplies in_features / P inputs. Collective.

    Its values are those of the `torch.nn.Linear` that the first rank of the group would build.

    Args:
        in_features: size of the whole input; a multiple of P.
        out_features: size of each output, which is whole on every rank.
        world_size: P, to check it; None takes the size of `group`.
        input_is_parallel: the input is this rank's part already, such as the output of a
            `ColumnParallelLinear` without `gather_output`; False takes the part of a whole input.
        bias: whether the layer has one; it is whole on every rank, and added once.
        group: the P ranks; None is torch's default group, and this process alone where there is none.
        device, dtype: of the parameters.

    Attributes:
        weight: this rank's columns, (out_features, in_features / P).
        bias: (out_features,), or None.

    Raises:
        UserError: the ranks cannot divide in_features, `world_size` is not the group's, or this rank is not
            in the group.
    """

    _dim = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        world_size: int | None = None,
        *,
        input_is_parallel: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, world_size, **options)
        self.input_is_parallel = input_is_parallel

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features), or this rank's (..., in_features / P) -> (..., out_features). Collective."""
        if not self.is_part:
            return F.linear(x, self.weight, self.bias)
        part = x if self.input_is_parallel else part_of(x, self.group, x.dim() - 1)
        out = from_partial(F.linear(part, self.weight), self.group)
        return out if self.bias is None else out + self.bias


class TensorParallelModel(nn.Module):
    """A model that is cut over the ranks of a group, for loops of one's own. Collective.

    All ranks start from the values of the group's first rank. Parameters that are cut become DTensors; the
    others stay whole, and every rank computes their whole gradient. `check_gradients` finds a plan for which
    that is not so. The first forward compares the inputs of the layers that are cut.

    Args:
        model: the whole model, which is cut in place; or a list of layers as of `build_layer`, which are
            called one after the other with ReLU between them, each with its whole output on every rank.
        tensor_parallel_group: the ranks; None is torch's default group.
        tensor_plan: pattern of module names -> word, as ``parallel.tensor_plan``; None takes the model's own
            ``_tp_plan``.

    Raises:
        UserError: there is no group or no plan, or the plan would compute something else.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[Mapping[str, Any] | nn.Module],
        tensor_parallel_group: dist.ProcessGroup | None = None,
        tensor_plan: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        group = _own_group(tensor_parallel_group)
        if group is None:
            raise UserError(
                "there is no process group whose ranks could cut the model between them",
                field="tensor_parallel_group",
                remedy="Call setup_distributed() first, or pass a group. Trainer needs neither: set"
                " parallel.tensor",
            )
        if not isinstance(model, nn.Module):
            layers = [build_layer(layer, f"model[{number}]") for number, layer in enumerate(model)]
            with_relu = [part for layer in layers for part in (nn.ReLU(), layer)][1:]
            model = nn.Sequential(*with_relu)
            tensor_plan = tensor_plan or {str(2 * n): "colwise_gather_output" for n in range(len(layers))}
        self.model = model
        self._equal = EqualOnTensorRanks(_cut(model, group, tensor_plan or {}), model)
        self._compared = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the whole model's. Collective.

        Raises:
            UserError: (the first time) the ranks have different inputs.
        """
        if self._compared:
            return self.model(*args, **kwargs)
        self._compared = True
        with self._equal.inputs():
            return self.model(*args, **kwargs)

    def check_gradients(self) -> None:
        """Compare the gradients of the parameters that are not cut, after the first backward. Collective.

        Raises:
            UserError: each rank has a part of a gradient, or the ranks had different targets.
        """
        self._equal.check_gradients(())


def build_layer(layer: Mapping[str, Any] | nn.Module, field: str) -> nn.Module:
    """A layer from its arguments.

    Args:
        layer: a module, which is taken as it is; or the arguments of the class under ``layer``, without which
            it is `torch.nn.Linear`, or with ``sketch_size`` `distributed_kernels.SKLinear`.
            ``tensor_parallel`` is for the caller.
        field: where it stands, for messages.

    Raises:
        UserError: the class does not take these arguments.
    """
    if isinstance(layer, nn.Module):
        return layer
    kind: Any = layer.get("layer") or _kind(layer)
    given = {name: value for name, value in layer.items() if name not in ("layer", "tensor_parallel")}
    try:
        built: nn.Module = kind(**given)
    except TypeError as error:
        raise UserError(
            f"{getattr(kind, '__name__', kind)} cannot be built with these arguments: {error}",
            field=field,
            got=", ".join(given),
            remedy="Pass in_features and out_features, or the layer itself",
        ) from None
    return built


def _kind(layer: Mapping[str, Any]) -> Any:
    """The kernels are another library, which the core does not import."""
    return import_module("distributed_kernels").SKLinear if "sketch_size" in layer else nn.Linear


def _cut(model: nn.Module, group: Any, plan: Mapping[str, str]) -> TensorAxis:
    if not plan and not declared_plan(model):
        raise UserError(
            "the model has no plan (_tp_plan) of which modules are cut",
            field="tensor_plan",
            got=type(model).__name__,
            remedy="Pass tensor_plan, such as {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}",
        )
    broadcast_values([*model.parameters(), *model.buffers()], group)
    device = next((p.device.type for p in model.parameters()), "cpu")
    axis = TensorAxis(DeviceMesh.from_group(group, device))
    cut_model(model, axis, plan, "TensorParallelModel", dict, OriginalModel(model))
    if axis.partial:
        raise UserError(
            f"each rank would have a part of the gradient of '{min(axis.partial)}', and only Trainer adds"
            " these up",
            field="tensor_plan",
            got="words with _sequence, sequence_parallel or replicated_with_grad_allreduce",
            remedy="Leave these words out, or give Trainer the whole model with parallel.tensor_plan",
        )
    return axis


def _own_group(group: Any) -> Any:
    """`group`, or the default one; None where there is none."""
    if group is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if dist.get_rank(group) < 0:
        raise UserError(
            "this rank is not in the process group",
            field="group",
            got=f"rank {dist.get_rank()}",
            remedy="Make the group on every rank (torch.distributed.new_group), and build the layer on the"
            " ranks of the group alone",
        )
    return group
