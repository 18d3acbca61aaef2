"""Layers whose experts are divided over the ranks of the expert axis.

A layer of experts is found by two methods, or by the plan that a model of Hugging Face brings:

- ``expert_parameters() -> names`` of the parameters whose first dimension counts experts, and
  ``set_expert_group(group)``, after which each of them holds this rank's rows, and `forward` exchanges tokens
  over the group;
- ``_ep_plan`` with the word ``moe_tp_experts`` for a module that is called with (tokens, index, weights) and
  has stacked weights and `num_experts`. Its tokens are exchanged here (`expert_exchange`), and its own
  `forward` computes those of this rank's experts.

In both cases the parameters become DTensors, as those of every layer that ranks divide, and `forward` finds
this rank's rows in their places.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from distributed.errors import UserError
from distributed.parallel.expert_exchange import compute_elsewhere
from distributed.parallel.original_model import OriginalModel
from distributed.parallel.tensor_plan import generic_name, translated
from distributed.system.output import print_line

__all__ = ["ExpertLayer", "check_experts", "divide_experts", "expert_layers", "report"]

_WORD = "moe_tp_experts"


@dataclass(frozen=True)
class ExpertLayer:
    """A layer of experts.

    Attributes:
        name: of the module.
        module: it.
        parameters: names, in the module, of the parameters whose first dimension counts experts.
        num_experts: number of experts, over all ranks.
        exchanges: whether it exchanges tokens by itself.
    """

    name: str
    module: nn.Module
    parameters: tuple[str, ...]
    num_experts: int
    exchanges: bool


def expert_layers(model: nn.Module) -> list[ExpertLayer]:
    """The layers of `model` whose experts can be divided.

    Raises:
        UserError: a layer's parameters do not all count the same experts.
    """
    found = []
    planned = _planned(model)
    for name, module in model.named_modules():
        if hasattr(module, "set_expert_group") and hasattr(module, "expert_parameters"):
            found.append(_layer(name, module, tuple(module.expert_parameters()), True))
        elif any(pattern.fullmatch(name) for pattern in planned):
            found.append(_layer(name, module, tuple(n for n, _ in module.named_parameters()), False))
    return found


def check_experts(model: nn.Module, size: int) -> list[ExpertLayer]:
    """The layers whose experts `size` ranks divide.

    Raises:
        UserError: there is none, or the ranks do not divide them.
    """
    layers = expert_layers(model)
    if not layers:
        raise UserError(
            "no layer of the model has experts that ranks can divide: none has the methods"
            " expert_parameters and set_expert_group, and the model brings no _ep_plan",
            field="parallel.expert",
            got=size,
            allowed="1",
            remedy="Use distributed_kernels.MoELayer or a model of transformers with an expert plan such as"
            " Mixtral, or leave parallel.expert out",
        )
    for layer in layers:
        if layer.num_experts % size:
            divisors = [n for n in range(1, layer.num_experts + 1) if layer.num_experts % n == 0]
            raise UserError(
                f"'{layer.name}' has {layer.num_experts} experts, which {size} ranks cannot divide",
                field="parallel.expert",
                got=size,
                allowed=", ".join(map(str, divisors)),
                remedy="Choose one of these, or another number of experts",
            )
    return layers


def divide_experts(layers: list[ExpertLayer], mesh: DeviceMesh, original: OriginalModel) -> None:
    """Leave on each rank of `mesh` its consecutive experts of each layer. Names stay. Collective.

    Args:
        mesh: the ranks that hold different experts, one dimension.
        original: the model before, which is given what has to be undone.
    """
    for layer in layers:
        module: Any = layer.module
        whole = {name: module.get_parameter(name) for name in layer.parameters}
        with original.watched(module):
            if layer.exchanges:
                module.set_expert_group(mesh.get_group())
            else:
                module.num_experts = layer.num_experts // mesh.size()
        for name, parameter in whole.items():
            _put(module, name, _divided(layer, name, parameter, mesh))
        compute = module.forward
        if not layer.exchanges:
            compute = partial(compute_elsewhere, compute, layer.name, layer.num_experts, mesh.get_group())
        vars(module)["forward"] = partial(_with_own_rows, compute, module, layer.parameters)


def report(layers: list[ExpertLayer], model: nn.Module, size: int) -> None:
    """Print how the experts of `model` are divided."""
    total = sum(p.numel() for p in model.parameters())
    experts = sum(layer.module.get_parameter(name).numel() for layer in layers for name in layer.parameters)
    held = ", ".join(sorted({f"{layer.num_experts // size} of {layer.num_experts}" for layer in layers}))
    names = ", ".join(sorted({generic_name(layer.name) for layer in layers}))
    print_line(
        f"note: expert parallelism leaves {held} experts on a rank, in {names}; experts are"
        f" {100 * experts / total:.0f} % of the parameters",
        sys.stdout,
    )


def _planned(model: nn.Module) -> list[re.Pattern[str]]:
    """Names of modules that a plan of Hugging Face calls experts."""
    for prefix, module in model.named_modules():
        plan: Any = getattr(module, "_ep_plan", None)
        if isinstance(plan, Mapping) and plan:
            start = f"{prefix}." if prefix else ""
            patterns = [f"{start}{pattern}" for pattern, word in plan.items() if word == _WORD]
            return [re.compile(translated(pattern)) for pattern in patterns]
    return []


def _layer(name: str, module: nn.Module, parameters: tuple[str, ...], exchanges: bool) -> ExpertLayer:
    sizes = {n: tuple(module.get_parameter(n).shape) for n in parameters}
    numbers = {shape[0] if shape else 0 for shape in sizes.values()}
    if not exchanges:
        numbers.add(getattr(module, "num_experts", 0))
    if len(numbers) != 1:
        raise UserError(
            f"the parameters of '{name}' do not all have one row for each expert",
            field="parallel.expert",
            got=", ".join(f"{n} {shape}" for n, shape in sizes.items()) or "no parameter",
            allowed="stacked weights of shape (num_experts, ...)",
            remedy="Stack the experts' weights (docs/experts.md), or leave parallel.expert out",
        )
    return ExpertLayer(name, module, parameters, numbers.pop(), exchanges)


def _divided(layer: ExpertLayer, name: str, whole: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    rows = layer.num_experts // mesh.size()
    own = layer.module.get_parameter(name).detach() if layer.exchanges else _rows_of(whole.detach(), mesh)
    if own.shape != (rows, *whole.shape[1:]):
        raise UserError(
            f"set_expert_group of '{layer.name}' has left other experts on this rank than its own",
            field="parallel.expert",
            got=f"{name} {tuple(own.shape)}",
            allowed=f"{(rows, *whole.shape[1:])}",
            remedy="Keep num_experts / ranks consecutive experts (docs/experts.md)",
        )
    stride = whole.detach().contiguous().stride()
    cut = DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=stride)
    return nn.Parameter(cut, requires_grad=whole.requires_grad)


def _rows_of(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    return whole.chunk(mesh.size())[mesh.get_local_rank()].clone()


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, last = name.rpartition(".")
    module.get_submodule(path).register_parameter(last, parameter)


def _with_own_rows(
    compute: Callable[..., Any], module: nn.Module, names: tuple[str, ...], *args: Any, **kwargs: Any
) -> Any:
    with _own_rows(module, names):
        return compute(*args, **kwargs)


@contextmanager
def _own_rows(module: nn.Module, names: tuple[str, ...]) -> Iterator[None]:
    """Within the block, `module` has this rank's rows in the places of its DTensors, for autograd too."""
    kept = []
    for name in names:
        path, _, last = name.rpartition(".")
        table: dict[str, Any] = module.get_submodule(path)._parameters
        kept.append((table, last, table[last]))
        table[last] = table[last].to_local()
    try:
        yield
    finally:
        for table, last, parameter in kept:
            table[last] = parameter
