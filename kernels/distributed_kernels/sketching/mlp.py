"""SketchedMLP: linear layers of thin factors with ReLU between them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distributed_kernels.errors import KernelError
from distributed_kernels.sketching.costs import break_even_rank
from distributed_kernels.sketching.linear import SKLinear


class SketchedMLP(nn.Module):
    """input_size -> hidden sizes, each with ReLU -> output_size, every layer an `SKLinear`.

    Args:
        input_size, hidden_sizes, output_size: numbers of features.
        sketch_ratios: rank of each layer as a share of the layer's inputs, rounded down; None keeps
            that layer an `nn.Linear`. The output layer takes the last one, which may be a further one.
        train_both, allow_costly: as for `SKLinear`.
        seed: seed of the first layer's sketch; every further layer has the next.
        device, dtype: as for `nn.Linear`.

    Raises:
        KernelError: a ratio at which a layer saves nothing (names the largest that does), or another
            number of ratios.
    """

    def __init__(
        self,
        input_size: int,
        hidden_sizes: Sequence[int],
        output_size: int,
        sketch_ratios: Sequence[float | None],
        *,
        train_both: bool = True,
        seed: int = 0,
        allow_costly: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        ratios = _for_each_layer(sketch_ratios, len(hidden_sizes))
        sizes = [input_size, *hidden_sizes, output_size]
        layers: list[nn.Module] = []
        for i, (into, out, ratio) in enumerate(zip(sizes[:-1], sizes[1:], ratios, strict=True)):
            if ratio is None:
                layers.append(nn.Linear(into, out, device=device, dtype=dtype))
            else:
                layers.append(
                    SKLinear(
                        into,
                        out,
                        _rank_of(ratio, i, into, out, 1 if train_both else 2, allow_costly),
                        train_both=train_both,
                        seed=seed + i,
                        device=device,
                        dtype=dtype,
                        allow_costly=allow_costly,
                    )
                )
            layers.append(nn.ReLU())
        self.model = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """(..., input_size) -> (..., output_size)."""
        result: Tensor = self.model(x)
        return result


class DistributedSketchedModel(SketchedMLP):
    """A `SketchedMLP` that accepts ratios at which a layer saves nothing, with one warning about all of them.

    Args:
        input_size, hidden_sizes, output_size, sketch_ratios, options: as for `SketchedMLP`.

    Raises:
        KernelError: a ratio below one of the layer's inputs, or another number of ratios.
    """

    def __init__(
        self,
        input_size: int,
        hidden_sizes: Sequence[int],
        output_size: int,
        sketch_ratios: Sequence[float | None],
        **options: Any,
    ) -> None:
        super().__init__(
            input_size, hidden_sizes, output_size, sketch_ratios, **{"allow_costly": True, **options}
        )
        layers = [layer for layer in self.model if isinstance(layer, SKLinear)]
        costly = [layer for layer in layers if layer.rank > _break_even(layer)]
        if costly:
            warnings.warn(_costs(layers, costly), stacklevel=2)


def _break_even(layer: SKLinear) -> int:
    return break_even_rank(layer.in_features, layer.out_features)


def _costs(layers: Sequence[SKLinear], costly: Sequence[SKLinear]) -> str:
    sizes = [(layer.in_features, layer.out_features, layer.rank) for layer in layers]
    more = sum(rank * (into + out) for into, out, rank in sizes) / sum(into * out for into, out, _ in sizes)
    each = ", ".join(
        f"{layer.in_features} -> {layer.out_features} rank {layer.rank} (break-even {_break_even(layer)})"
        for layer in costly
    )
    return (
        f"{len(costly)} of {len(layers)} sketched layers save nothing: {each}. Together the layers take"
        f" {more:.2f} times the weights of dense ones. Lower their sketch_ratios, or give None to keep a"
        " layer dense"
    )


def _for_each_layer(ratios: Sequence[float | None], num_hidden: int) -> list[float | None]:
    if len(ratios) not in (num_hidden, num_hidden + 1) or not ratios:
        raise KernelError(
            "sketch_ratios: need one for each hidden layer, and optionally one for the output layer",
            got=len(ratios),
            allowed=f"{max(num_hidden, 1)} or {num_hidden + 1} ratios",
            remedy="Give as many as there are layers",
        )
    return [*ratios[:num_hidden], ratios[-1]]


def _rank_of(ratio: float, index: int, into: int, out: int, least: int, allow_costly: bool) -> int:
    rank, most = int(into * ratio), break_even_rank(into, out)
    if rank >= least and (rank <= most or allow_costly):
        return rank
    # Half a rank more, so that these ratios give their ranks however they are rounded.
    low, high = ((r + 0.5) / into for r in (least, most))
    raise KernelError(
        f"sketch_ratios[{index}]: rank {rank} of {into} -> {out}"
        + (" is too small" if rank < least else f" is above break-even, which is rank {most}"),
        got=ratio,
        allowed=f"{low:.4g} to {high:.4g}" if most >= least else "none",
        remedy="Change the ratio, give None to keep this layer dense, or pass allow_costly=True",
    )
