"""Factorize a trained dense layer into two thin factors, with savings and errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from distributed_kernels.errors import KernelError
from distributed_kernels.sketching.conv import SKConv2d
from distributed_kernels.sketching.costs import CostlyError, LayerReport, break_even_rank, check_rank
from distributed_kernels.sketching.factorizations import balanced, truncated_svd
from distributed_kernels.sketching.linear import SKLinear

__all__ = ["METHODS", "factorize_conv", "factorize_linear"]

METHODS = ("svd", "rsvd", "activation")


def factorize_linear(
    linear: nn.Linear,
    rank: int | None = None,
    *,
    energy: float | None = None,
    method: str = "svd",
    covariance: Tensor | None = None,
    allow_costly: bool = False,
) -> SKLinear:
    """An `SKLinear` that approximates `linear`, with what that costs in its attribute `report`.

    Args:
        linear: layer to approximate; not changed.
        rank: rank of the factors; or
        energy: 0 to 1, the share of ||W||^2 (with ``activation``, of the mean squared output) that the
            smallest sufficient rank keeps.
        method: ``svd``, the best for the weight; ``rsvd``, nearly that, faster on large layers;
            ``activation``, the best for the outputs on inputs of this `covariance`.
        covariance: E[x x^T], (in, in), from `input_covariance`. With the other methods it only adds
            `output_error` to the report.
        allow_costly: accept a rank above break-even.

    Raises:
        CostlyError: the rank asked for, or needed for `energy`, saves nothing.
        KernelError: arguments contradict each other.
    """
    factors = _factorize(linear.weight, rank, energy, method, covariance, allow_costly)
    layer = SKLinear(
        linear.in_features,
        linear.out_features,
        factors.report.rank,
        bias=linear.bias is not None,
        device="meta",
        dtype=linear.weight.dtype,
        allow_costly=True,
    )
    return _filled(layer, linear, factors)


def factorize_conv(
    conv: nn.Conv2d,
    rank: int | None = None,
    *,
    energy: float | None = None,
    method: str = "svd",
    covariance: Tensor | None = None,
    allow_costly: bool = False,
) -> SKConv2d:
    """`factorize_linear` for a convolution; its inputs are patches.

    Raises:
        KernelError: as there; or groups, or padding with anything but zeros.
    """
    if conv.groups != 1 or conv.padding_mode != "zeros":
        raise KernelError(
            "conv: groups and padding modes are not supported",
            got=(conv.groups, conv.padding_mode),
            allowed="groups=1, padding_mode='zeros'",
            remedy="Keep nn.Conv2d",
        )
    factors = _factorize(conv.weight.flatten(1), rank, energy, method, covariance, allow_costly)
    layer = SKConv2d(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,  # type: ignore[arg-type]
        rank=factors.report.rank,
        stride=conv.stride,  # type: ignore[arg-type]
        padding=conv.padding,  # type: ignore[arg-type]
        dilation=conv.dilation,  # type: ignore[arg-type]
        bias=conv.bias is not None,
        device="meta",
        dtype=conv.weight.dtype,
        allow_costly=True,
    )
    return _filled(layer, conv, factors)


@dataclass(frozen=True)
class _Factors:
    factor_in: Tensor
    factor_out: Tensor
    report: LayerReport


Layer = TypeVar("Layer", SKLinear, SKConv2d)


@torch.no_grad()
def _filled(layer: Layer, dense: nn.Linear | nn.Conv2d, factors: _Factors) -> Layer:
    layer = layer.to_empty(device=dense.weight.device)
    layer.factor_in.copy_(factors.factor_in.view_as(layer.factor_in))
    layer.factor_out.copy_(factors.factor_out)
    for factor in (layer.factor_in, layer.factor_out):
        factor.requires_grad_(dense.weight.requires_grad)
    if dense.bias is not None:
        layer.bias.copy_(dense.bias)
        layer.bias.requires_grad_(dense.bias.requires_grad)
    layer.report = factors.report
    return layer.train(dense.training)


@torch.no_grad()
def _factorize(
    weight: Tensor,
    rank: int | None,
    energy: float | None,
    method: str,
    covariance: Tensor | None,
    allow_costly: bool,
) -> _Factors:
    _check(weight, rank, energy, method, covariance)
    out, into = weight.shape
    dtype, weight, most = weight.dtype, weight.double(), break_even_rank(into, out)
    if rank is not None:
        check_rank(rank, into, out, least=1, allow_costly=allow_costly)
    wanted = rank or (most + 1 if method == "rsvd" and not allow_costly else min(into, out))
    if method == "activation":
        assert covariance is not None
        basis, kept, total = _output_directions(weight, covariance.to(weight))
    else:
        u, s, vt = truncated_svd(weight, wanted, method)
        basis, kept, total = u, s.square(), weight.square().sum()
    if energy is not None:
        rank = _rank_of(energy, kept, total, most, (into, out), allow_costly)
    assert rank is not None
    if method == "activation":
        # The same product, written with factors of equal scale.
        u, s, vt = torch.linalg.svd(basis[:, :rank].mT @ weight, full_matrices=False)
        u = basis[:, :rank] @ u
    factor_in, factor_out = balanced(u[:, :rank], s[:rank], vt[:rank])
    factor_in, factor_out = factor_in.to(dtype), factor_out.to(dtype)
    error = weight - factor_out.double() @ factor_in.double()
    report = LayerReport(
        rank=len(factor_in),
        break_even=most,
        parameters_before=into * out,
        parameters_after=len(factor_in) * (into + out),
        flops_before=2 * into * out,
        flops_after=2 * len(factor_in) * (into + out),
        weight_error=_ratio(error.square().sum(), weight.square().sum()),
        output_error=None
        if covariance is None
        else _ratio(*(((m @ covariance.to(m)) * m).sum() for m in (error, weight))),
    )
    return _Factors(factor_in, factor_out, report)


def _output_directions(weight: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvectors of W C W^T, the outputs' second moments, greatest first; their eigenvalues; the trace.

    With the first r of them as U, U U^T W has the least mean squared error of the outputs, and no matrix
    has to be inverted or rooted.
    """
    basis, small = None, weight
    if weight.shape[0] > weight.shape[1]:
        basis, small = torch.linalg.qr(weight)
    values, vectors = torch.linalg.eigh(small @ covariance @ small.mT)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    return vectors if basis is None else basis @ vectors, values, values.sum()


def _rank_of(
    energy: float, kept: Tensor, total: Tensor, most: int, sizes: tuple[int, int], allow_costly: bool
) -> int:
    """The smallest rank that keeps `energy` of `total`."""
    short = (kept.cumsum(0) < energy * total * (1 - 1e-12)).sum()  # energy=1 is not lost to rounding
    rank = int(short) + 1
    if rank > most and not allow_costly:
        raise CostlyError(
            f"energy: to keep this much of {sizes[0]} -> {sizes[1]} takes rank {min(rank, *sizes)} or more,"
            f" and above rank {most} (break-even) nothing is saved",
            got=energy,
            remedy="Keep less, keep the dense layer, or pass allow_costly=True",
        )
    return min(rank, len(kept))


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float((part.clamp(min=0) / whole).sqrt()) if whole > 0 else 0.0


def _check(
    weight: Tensor, rank: int | None, energy: float | None, method: str, covariance: Tensor | None
) -> None:
    if (rank is None) == (energy is None):
        raise KernelError(
            "rank, energy: need exactly one of them", got=(rank, energy), remedy="Leave one out"
        )
    if energy is not None and not 0 < energy <= 1:
        raise KernelError(
            "energy: not a share", got=energy, allowed="above 0, up to 1", remedy="Give a share such as 0.9"
        )
    if method not in METHODS:
        raise KernelError(
            "method: unknown method", got=method, allowed=", ".join(METHODS), remedy="Choose one of these"
        )
    if method == "activation" and covariance is None:
        raise KernelError(
            "covariance: method 'activation' needs it", got=None, remedy="Compute it with input_covariance"
        )
    if covariance is not None and tuple(covariance.shape) != (weight.shape[1],) * 2:
        raise KernelError(
            "covariance: shape does not match the layer's inputs",
            got=tuple(covariance.shape),
            allowed=str((weight.shape[1],) * 2),
            remedy="Use the matrix of this layer",
        )
