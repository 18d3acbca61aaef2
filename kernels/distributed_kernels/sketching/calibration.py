"""Second moments of the inputs of a model's layers over some batches."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed_kernels.errors import KernelError


def select_modules(model: nn.Module, modules: Iterable[str] | None) -> dict[str, nn.Module]:
    """The `nn.Linear` and `nn.Conv2d` of `model` by name, those alone that `modules` names.

    Args:
        model: searched whole.
        modules: names or glob patterns (``blocks.*.fc1``); None takes all.

    Raises:
        KernelError: a pattern that no such layer has.
    """
    found: dict[str, nn.Module] = {
        name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))
    }
    if modules is None:
        return found
    patterns = [modules] if isinstance(modules, str) else list(modules)
    for pattern in patterns:
        if not fnmatch.filter(found, pattern):
            raise KernelError(
                "modules: no nn.Linear or nn.Conv2d has this name",
                got=pattern,
                allowed=", ".join(found) or "none, the model has no such layer",
                remedy="Correct the name or the pattern",
            )
    return {name: m for name, m in found.items() if any(fnmatch.fnmatch(name, p) for p in patterns)}


@torch.no_grad()
def input_covariance(
    model: nn.Module,
    batches: Iterable[Any],
    modules: Iterable[str] | None = None,
    *,
    call: Callable[[nn.Module, Any], Any] | None = None,
) -> dict[str, Tensor]:
    """E[x x^T] of the inputs x of every linear layer, or of the patches that a convolution sees.

    The model runs in evaluation mode, without gradients, and is put back as it was.

    Args:
        model: all on one process; nothing is summed over ranks.
        batches: arguments of `call`.
        modules: as for `select_modules`.
        call: runs the model on a batch. Without it a mapping is passed as keywords, of a tuple or list
            the first item, anything else as it is.

    Returns:
        float64 matrices (in, in) by layer name; layers whose forward never ran are missing.

    Raises:
        KernelError: no such layer, or no batch.
    """
    chosen = select_modules(model, modules)
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    hooks = [m.register_forward_pre_hook(partial(_record, name, sums, counts)) for name, m in chosen.items()]
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    seen = 0
    try:
        for batch in batches:
            (call or _call)(model, batch)
            seen += 1
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training
    if not seen:
        raise KernelError("batches: empty", got=seen, allowed="1 or more", remedy="Give at least one batch")
    return {name: total / counts[name] for name, total in sums.items()}


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


def _record(
    name: str, sums: dict[str, Tensor], counts: dict[str, int], module: nn.Module, args: tuple[Any, ...]
) -> None:
    rows = _patches(args[0], module) if isinstance(module, nn.Conv2d) else args[0]
    rows = rows.reshape(-1, rows.shape[-1]).double()
    product = rows.mT @ rows
    sums[name] = sums[name] + product if name in sums else product
    counts[name] = counts.get(name, 0) + len(rows)


def _patches(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """(pixels, in_channels height width): a row for each output pixel."""
    x = F.pad(x if x.dim() == 4 else x[None], conv._reversed_padding_repeated_twice)
    kernel, dilation, stride = (tuple(v) for v in (conv.kernel_size, conv.dilation, conv.stride))
    return F.unfold(x, kernel, dilation=dilation, stride=stride).mT
