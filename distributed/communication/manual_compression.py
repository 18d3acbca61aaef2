"""Sparse gradients for a loop of one's own. Under a `Trainer`, ``compression.codec`` compresses and sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distributed.communication.codecs.sizes import number_sent
from distributed.communication.codecs.sparse import largest_elements
from distributed.errors import UserError

__all__ = ["GradientCompression", "SparseGradient", "compress_gradient", "random_sparse"]


class SparseGradient(NamedTuple):
    """A few elements of a gradient; all others count as zero.

    Attributes:
        values: with their signs, of shape (elements,).
        indices: of the elements in the flattened gradient, int64, in rising order.
        shape: of the gradient.
    """

    values: Tensor
    indices: Tensor
    shape: torch.Size


class GradientCompression:
    """The elements of largest magnitude of each gradient (top-k), with error feedback.

    It sends nothing. Ranks that add up gradients gather the `SparseGradient` of all and add up what
    `decompress_gradients` makes of each: values that are all-reduced belong to other elements on each rank.

    Args:
        compression_ratio: share of the elements of each gradient that is kept: above 0, at most 1, and one
            element at least.
        error_feedback: what was left out is added to the next gradient at the same position of the list.

    Raises:
        UserError: the share is not above 0 and at most 1.
    """

    def __init__(self, compression_ratio: float = 0.1, error_feedback: bool = True) -> None:
        _check_share("compression_ratio", compression_ratio)
        self.compression_ratio, self.error_feedback = compression_ratio, error_feedback
        self._kept: dict[int, Tensor] = {}

    @torch.no_grad()
    def compress_gradients(self, gradients: Sequence[Tensor | None]) -> list[SparseGradient | None]:
        """The largest elements of each gradient; None stays None.

        Args:
            gradients: in the same order at each call, such as ``[p.grad for p in model.parameters()]``.

        Raises:
            UserError: a gradient has another shape than that at its position before.
        """
        return [None if g is None else self._compress(index, g) for index, g in enumerate(gradients)]

    @torch.no_grad()
    def decompress_gradients(self, compressed: Sequence[SparseGradient | None]) -> list[Tensor | None]:
        """Dense gradients: zeros but for the elements that were kept."""
        return [None if sparse is None else _decompress(sparse) for sparse in compressed]

    def _compress(self, index: int, gradient: Tensor) -> SparseGradient:
        before = self._kept.get(index)
        if before is not None and before.shape != gradient.shape:
            raise UserError(
                f"the gradient at position {index} has another shape than before",
                field="gradients",
                got=tuple(gradient.shape),
                allowed=str(tuple(before.shape)),
                remedy="Give the gradients of all parameters in the same order, and None for those without",
            )
        values = gradient if before is None else gradient + before
        sparse = _compress(values, self.compression_ratio)
        if self.error_feedback:
            self._kept[index] = values - _decompress(sparse)
        return sparse


@torch.no_grad()
def compress_gradient(grad: Tensor, k: float = 0.01) -> tuple[Tensor, Tensor]:
    """The elements of largest magnitude of a gradient.

    Args:
        grad: of any shape.
        k: share of the elements, above 0 and at most 1; one element at least.

    Returns:
        (values with their signs, their indices in the flattened gradient in rising order).

    Raises:
        UserError: the share is not above 0 and at most 1.
    """
    _check_share("k", k)
    values, indices, _ = _compress(grad, k)
    return values, indices


@torch.no_grad()
def random_sparse(grad: Tensor, p: float = 0.01) -> Tensor:
    """Each element with probability `p`, divided by `p`, and zero otherwise: the expectation is the gradient.

    Args:
        grad: of any shape. The elements are drawn from torch's generator of its device.
        p: above 0 and at most 1.

    Raises:
        UserError: the probability is not above 0 and at most 1.
    """
    _check_share("p", p)
    chosen = torch.rand(grad.shape, device=grad.device) < p
    return torch.where(chosen, grad / p, torch.zeros_like(grad))


def _compress(gradient: Tensor, share: float) -> SparseGradient:
    flat = gradient.reshape(-1)
    indices = largest_elements(flat, number_sent(flat.numel(), share))
    return SparseGradient(flat[indices], indices, gradient.shape)


def _decompress(sparse: SparseGradient) -> Tensor:
    flat = sparse.values.new_zeros(sparse.shape.numel())
    flat[sparse.indices] = sparse.values
    return flat.view(sparse.shape)


def _check_share(field: str, share: float) -> None:
    if not 0.0 < share <= 1.0:
        raise UserError(
            "not a share of the elements",
            field=field,
            got=share,
            allowed="above 0 and at most 1",
            remedy="Give the share of the elements that is kept, such as 0.01",
        )
