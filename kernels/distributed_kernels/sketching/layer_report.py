"""LayerReport: result of the factorization of one layer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LayerReport"]


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
