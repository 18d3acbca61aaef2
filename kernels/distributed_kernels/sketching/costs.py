"""Cost of a factorised layer: its break-even rank with a dense one, and what one conversion saved."""

from __future__ import annotations

from dataclasses import dataclass

from distributed_kernels.errors import KernelError


@dataclass(frozen=True)
class LayerReport:
    """Result of the factorization of one layer.

    Attributes:
        rank: rank of the factors.
        break_even: largest rank that saves anything.
        parameters_before, parameters_after: numbers in the weight, and in the factors.
        flops_before, flops_after: forward, per row of a linear layer or output pixel of a convolution.
        weight_error: ||W - W^|| / ||W||, Frobenius.
        output_error: the same of the outputs over the calibration batches, without bias; None without.
    """

    rank: int
    break_even: int
    parameters_before: int
    parameters_after: int
    flops_before: int
    flops_after: int
    weight_error: float
    output_error: float | None


class CostlyError(KernelError):
    """Thin factors of this rank would take more than the dense weight."""


def break_even_rank(in_features: int, out_features: int) -> int:
    """The largest rank at which two factors hold fewer numbers, and take fewer FLOPs, than one matrix.

    A layer of rank r has r (in + out) weights where the dense one has in x out, and both compute two
    FLOPs a weight and row, so the bound is in x out / (in + out). 0: no rank pays.
    """
    return (in_features * out_features - 1) // (in_features + out_features)


def check_rank(rank: int, in_features: int, out_features: int, *, least: int, allow_costly: bool) -> None:
    """Refuse a rank that is too small, or that saves nothing.

    Args:
        rank: rank of the layer.
        in_features, out_features: sizes of the dense matrix.
        least: smallest rank that the layer can have.
        allow_costly: accept a rank above break-even.

    Raises:
        KernelError: `rank` is below `least`.
        CostlyError: it is above `break_even_rank`, without `allow_costly`.
    """
    most = break_even_rank(in_features, out_features)
    if rank < least:
        raise KernelError(
            "rank: too small",
            got=rank,
            allowed=f"{least} to {most}",
            remedy="Give at least the smallest rank",
        )
    if rank > most and not allow_costly:
        range_ = f"{least} to {most}" if most >= least else "none"
        raise CostlyError(
            f"rank: above break-even, which is rank {most} for {in_features} -> {out_features}: this layer"
            f" would take {rank * (in_features + out_features)} weights for the dense layer's"
            f" {in_features * out_features}",
            got=rank,
            allowed=range_,
            remedy="Lower the rank, keep the dense layer, or pass allow_costly=True",
        )
