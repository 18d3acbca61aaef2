"""sketch_model: every layer of a model that thin factors can replace, and a table of the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from distributed_kernels.errors import KernelError
from distributed_kernels.sketching.calibration import input_covariance, select_modules
from distributed_kernels.sketching.costs import CostlyError, LayerReport, break_even_rank
from distributed_kernels.sketching.factorize import factorize_conv, factorize_linear


@dataclass(frozen=True)
class LayerRow:
    """One layer of the model.

    Attributes:
        name: name in the model.
        kind: ``Linear`` or ``Conv2d``.
        shape: ``in -> out``; of a convolution, patches to channels.
        report: result of the conversion; None where it was kept.
        kept: reason for keeping it dense; empty where it was converted.
    """

    name: str
    kind: str
    shape: str
    report: LayerReport | None
    kept: str = ""


@dataclass(frozen=True)
class SketchReport:
    """Result of `sketch_model`. ``print(report)`` is a table.

    Attributes:
        layers: every linear layer and convolution, in the model's order.
        parameters_before, parameters_after: number of parameters of the whole model.
    """

    layers: tuple[LayerRow, ...]
    parameters_before: int
    parameters_after: int

    @property
    def converted(self) -> dict[str, LayerReport]:
        """Reports by name of the layers that were converted."""
        return {row.name: row.report for row in self.layers if row.report is not None}

    def __str__(self) -> str:
        head = ("layer", "shape", "rank", "weights", "FLOPs a row", "weight error", "output error", "")
        lines = [head, *map(_cells, self.layers)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        text = "\n".join(
            "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
        )
        share = self.parameters_after / max(self.parameters_before, 1)
        return (
            f"{text}\n{len(self.converted)} of {len(self.layers)} layers converted; the model has"
            f" {self.parameters_after:,} parameters, {share:.1%} of {self.parameters_before:,}"
        )


def _cells(row: LayerRow) -> tuple[str, ...]:
    report = row.report
    if report is None:
        return (row.name, row.shape, "-", "-", "-", "-", "-", f"kept: {row.kept}")
    return (
        row.name,
        row.shape,
        str(report.rank),
        f"{report.parameters_before:,} -> {report.parameters_after:,}",
        f"{report.flops_before:,} -> {report.flops_after:,}",
        f"{report.weight_error:.4f}",
        "-" if report.output_error is None else f"{report.output_error:.4f}",
        "",
    )


def sketch_model(
    model: nn.Module,
    rank: int | None = None,
    *,
    energy: float | None = None,
    modules: Iterable[str] | None = None,
    method: str = "svd",
    batches: Iterable[Any] | None = None,
    call: Callable[[nn.Module, Any], Any] | None = None,
) -> SketchReport:
    """Replace the model's linear layers and convolutions by thin factors, in place, where that saves.

    Kept dense, with the reason in the report: layers that were not selected; for which the rank asked for,
    or needed for `energy`, is above break-even; whose weight is used elsewhere (tied, attention's
    `out_proj`, a subclass with a forward of its own); and, given `batches`, whose forward never ran.

    The parameters are new ones: make the optimizer afterwards. Where a `nn.TransformerEncoderLayer` loses
    its linear layers, its fused inference path, which reads their weights, is switched off.

    Args:
        model: changed in place.
        rank: one for all layers; or
        energy: as for `factorize_linear`, for each layer by itself.
        modules: names or glob patterns; None selects all.
        method: as for `factorize_linear`.
        batches, call: as for `input_covariance`; ``activation`` needs them, the other methods report the
            error of the outputs then.

    Raises:
        KernelError: as `factorize_linear`, but for ranks above break-even; or `modules` names none.
    """
    every, chosen = select_modules(model, None), select_modules(model, modules)
    if "" in every:
        raise KernelError(
            "model: a single layer cannot be replaced in place",
            got=type(model).__name__,
            remedy="Call factorize_linear or factorize_conv",
        )
    if method == "activation" and batches is None:
        raise KernelError(
            "batches: method 'activation' needs them", got=None, remedy="Give some batches of inputs"
        )
    moments = None if batches is None else input_covariance(model, batches, modules, call=call)
    before, owners = _count(model), Counter(p for m in model.modules() for p in m._parameters.values())
    rows: list[LayerRow] = []
    for name, module in every.items():
        assert isinstance(module, (nn.Linear, nn.Conv2d))
        kept = "" if name in chosen else "not selected"
        kept = kept or _used_elsewhere(module, owners)
        if not kept and moments is not None and name not in moments:
            kept = "its forward never ran"
        new: Any = None
        if not kept:
            covariance = None if moments is None else moments[name]
            new, kept = _convert(module, rank, energy, method, covariance)
        if new is not None:
            _replace(model, module, new)
        report = None if new is None else new.report
        kind = "Conv2d" if isinstance(module, nn.Conv2d) else "Linear"
        rows.append(LayerRow(name, kind, _shape(module), report, kept))
    return SketchReport(tuple(rows), before, _count(model))


def _convert(
    module: nn.Linear | nn.Conv2d,
    rank: int | None,
    energy: float | None,
    method: str,
    covariance: Tensor | None,
) -> tuple[nn.Module | None, str]:
    """(the layer, "") or (None, why there is none)."""
    make: Any = factorize_linear if isinstance(module, nn.Linear) else factorize_conv
    try:
        return make(module, rank, energy=energy, method=method, covariance=covariance), ""
    except CostlyError:
        out, into = module.weight.flatten(1).shape
        asked = f"rank {rank} is" if rank is not None else f"energy {energy} takes a rank"
        return None, f"{asked} above break-even ({break_even_rank(into, out)})"


def _used_elsewhere(module: nn.Linear | nn.Conv2d, owners: Counter[nn.Parameter | None]) -> str:
    """Why the layer's weight has to stay where it is, or nothing."""
    if type(module) not in (nn.Linear, nn.Conv2d):
        return f"{type(module).__name__} is used through its weight, or has a forward of its own"
    if any(owners[p] > 1 for p in module.parameters()):
        return "a parameter of it is tied to another layer's"
    if module._forward_hooks or module._forward_pre_hooks:
        return "hooks are attached to it"
    if isinstance(module, nn.Conv2d) and (module.groups != 1 or module.padding_mode != "zeros"):
        return "grouped, or padded with something else than zeros"
    return ""


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in model.modules():
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)
                if isinstance(parent, nn.TransformerEncoderLayer):
                    parent.activation_relu_or_gelu = 0
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(new is m for m in module.modules()):
            module.use_nested_tensor = False


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _shape(module: nn.Linear | nn.Conv2d) -> str:
    out, into = module.weight.flatten(1).shape
    return f"{into} -> {out}"
