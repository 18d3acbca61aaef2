"""Cut a model in place over the ranks of the tensor axis."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from distributed.checkpoint.dtensor import is_sharded
from distributed.errors import UserError
from distributed.parallel.original_model import OriginalModel
from distributed.parallel.tensor_layers import TensorAxis, apply_word
from distributed.parallel.tensor_plan import check_cuts, declared_plan, generic_name, read_plan, tied_places
from distributed.system.output import print_line
from distributed.training.model_traits import HOOKED, SPARSE, refuse

__all__ = ["check_optimizer", "cut_model", "report"]

_CANNOT = {
    HOOKED: "tensor parallelism would not call it, because it replaces parameters by parts",
    SPARSE: "tensor parallelism cuts dense gradients",
}


def cut_model(
    model: nn.Module,
    axis: TensorAxis,
    given: Mapping[str, str],
    backend: str,
    find_pairs: Callable[[], Mapping[str, str]],
    original: OriginalModel,
) -> tuple[list[str], bool]:
    """Cut the modules that the plan names. All names stay; tied weights stay tied.

    Args:
        model: whole, and the same on all ranks.
        given: ``parallel.tensor_plan``.
        backend: its name, for messages.
        find_pairs: finds pairs of linear layers, for a model without a plan.
        original: the model before.

    Returns:
        Names of the modules that are cut, and whether they are pairs that were found.

    Raises:
        UserError: the plan would train something else, or there is nothing that can be cut.
    """
    refuse(model, backend, _CANNOT)
    plan = given or declared_plan(model)
    found = not plan
    cuts = read_plan(model, plan or find_pairs(), given=bool(given))
    if not cuts:
        raise UserError(
            "no module of the model can be cut: it has no plan, and no pair of linear layers with elementwise"
            " functions between them",
            field="parallel.tensor",
            got=axis.size,
            allowed="1",
            remedy="Name modules in parallel.tensor_plan, such as {'layers.*.up': colwise, 'layers.*.down':"
            " rowwise}, or use parallel.data",
        )
    check_cuts(model, cuts, axis.size)
    ties = tied_places(model)
    for cut in cuts:
        apply_word(cut, axis, original)
    for places in ties:
        held = [module._parameters[name] for module, name, _ in places]
        cut_one = next(filter(is_sharded, held), held[0])
        for module, name, _ in places:
            module._parameters[name] = cut_one
    return [cut.name for cut in cuts], found


def report(model: nn.Module, names: list[str], found: bool) -> None:
    """Print which modules are cut, and how much of the model that is.

    Args:
        found: they are pairs that were found, and not of a plan.
    """
    generic = sorted(set(map(generic_name, names)))
    total = sum(p.numel() for p in model.parameters())
    cut = sum(p.numel() for p in model.parameters() if _is_cut(p))
    shown = ", ".join(generic[:12]) + (f" and {len(generic) - 12} more" if len(generic) > 12 else "")
    rest = "; the model has no plan, so that attention stays whole (parallel.tensor_plan)" if found else ""
    share = 100 * cut / max(total, 1)
    print_line(f"note: tensor parallelism cuts {share:.0f} % of the parameters: {shown}{rest}", sys.stdout)


def _is_cut(parameter: Any) -> bool:
    return is_sharded(parameter) and "tensor" in (parameter.device_mesh.mesh_dim_names or ())


def check_optimizer(optimizer: torch.optim.Optimizer, field: str, size: int) -> None:
    """Refuse optimizers whose step needs whole parameters.

    Args:
        field: of the configuration that cuts them.
        size: its value.

    Raises:
        UserError: it is one.
    """
    if isinstance(optimizer, _WHOLE):
        raise UserError(
            f"{type(optimizer).__name__} needs whole parameters, and {field}={size} cuts them",
            field="optimizer",
            got=type(optimizer).__name__,
            allowed="elementwise optimizers, such as SGD and AdamW",
            remedy=f"Choose one of these, or {field}=1",
        )


_WHOLE = (torch.optim.Adafactor, *([torch.optim.Muon] if hasattr(torch.optim, "Muon") else []))
