"""SKLinear: a linear layer of two thin factors, both trained, or one half of each frozen."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed_kernels.errors import KernelError
from distributed_kernels.foreign_names import refuse_foreign
from distributed_kernels.sketching.costs import LayerReport, break_even_rank, check_rank
from distributed_kernels.sketching.factorizations import least_squares, rescaled, spectral
from distributed_kernels.sketching.frozen_sketches import GivenSketch, SignSketch, Sketch
from distributed_kernels.sketching.fused import fused_linear, wants_fused
from distributed_kernels.sketching.half_frozen import half_frozen_columns, half_frozen_rows
from distributed_kernels.sketching.parallel_parts import assign, exchange, is_cut, local

__all__ = ["SKLinear", "break_even_rank"]


class SKLinear(nn.Module):
    """y = B (A x) + b with A of shape (rank, in) and B of shape (out, rank): two GEMMs in place of one.

    It saves weights and FLOPs when rank is at most `break_even_rank(in, out)`.

    With `train_both` all of A and B is trained, 6 rank (in + out) FLOPs a row forward and backward.
    Without, A = [factor_in; U2^T] and B = [U1^T, factor_out], where U1 and U2 are random signs over the
    square root of their rank and stay as they are: half the weights to train, to send and to keep
    optimizer state for, 5 rank (in + out) FLOPs. At equal rank it learns less (docs/kernels.md).

    Args:
        in_features, out_features: as for `nn.Linear`.
        rank: inner width. `sketch_size` is another word for it; `num_terms` and `low_rank` in its place
            mean 2 num_terms low_rank, and frozen halves, as in Panther.
        train_both: False freezes one half of each factor; None is False with `num_terms` or given
            matrices, else True.
        sketch: ``sign``, from `seed`; or the matrices (U1 (r1, out), U2 (in, r2)), r1 + r2 = rank.
        seed: seed of the signs. Layers of equal shape and seed have equal sketches.
        bias, device, dtype: as for `nn.Linear`.
        allow_costly: accept a rank above break-even.

    Attributes:
        factor_in: (rank, in), or (rank - rank // 2, in) when half is frozen.
        factor_out: (out, rank), or (out, rank // 2).
        bias: (out,) or None.
        sketch: the frozen halves, a `Sketch`; None when both factors are trained.
        report: the `LayerReport` of a layer that `factorize_linear` made, else None.

    Raises:
        KernelError: a rank that saves nothing, or arguments that contradict each other.
    """

    report: LayerReport | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int | None = None,
        *,
        sketch_size: int | None = None,
        num_terms: int | None = None,
        low_rank: int | None = None,
        train_both: bool | None = None,
        sketch: str | tuple[Tensor, Tensor] = "sign",
        seed: int = 0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        allow_costly: bool = False,
        **unknown: Any,
    ) -> None:
        super().__init__()
        refuse_foreign("SKLinear.__init__", unknown, ("rank",))
        self.in_features, self.out_features = in_features, out_features
        self.rank = _one_rank(rank, sketch_size, num_terms, low_rank, sketch)
        if train_both is None:
            train_both = num_terms is None and isinstance(sketch, str)
        self.train_both = train_both
        check_rank(
            self.rank, in_features, out_features, least=1 if train_both else 2, allow_costly=allow_costly
        )
        self.sketch = _make_sketch(self, sketch, seed, device, dtype)
        trained_in, trained_out = self.trained_ranks
        self.factor_in = nn.Parameter(torch.empty(trained_in, in_features, device=device, dtype=dtype))
        self.factor_out = nn.Parameter(torch.empty(out_features, trained_out, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def tensor_parallel_style(self, word: str) -> Any:
        """The `ParallelStyle` by which a tensor-parallel plan cuts this layer.

        Args:
            word: of the plan, such as ``colwise``.

        Raises:
            KernelError: sketched layers have no such word.
        """
        # torch.distributed.tensor is slow to import, and few use it.
        module = import_module("distributed_kernels.sketching.tensor_parallel")
        return module.style_of(word)

    @property
    def trained_ranks(self) -> tuple[int, int]:
        """(rows of `factor_in`, columns of `factor_out`)."""
        if self.sketch is None:
            return self.rank, self.rank
        return self.sketch.num_out, self.sketch.num_in

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Approximate a weight drawn as `nn.Linear` draws its own, and give the result that weight's norm;
        the outputs then have the standard deviation that `nn.Linear`'s have."""
        if self.factor_in.is_meta:
            return
        dtype = torch.promote_types(self.factor_in.dtype, torch.float32)
        weight = torch.empty(self.out_features, self.in_features, device=self.factor_in.device, dtype=dtype)
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        self.fit_weight(weight)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            assign(self.bias, weight.new_empty(self.out_features).uniform_(-bound, bound))

    @torch.no_grad()
    def fit_weight(self, weight: Tensor, *, keep_norm: bool = True) -> None:
        """Set the trained factors to approximate `weight`, (out, in): by its leading singular vectors, or
        by least squares for the frozen halves.

        Args:
            weight: weight in the precision to compute in.
            keep_norm: scale the result to the Frobenius norm of `weight`; False leaves the best fit.
        """
        if self.sketch is None:
            factor_in, factor_out = spectral(weight, self.rank, keep_norm=keep_norm)
        else:
            frozen_in, frozen_out = self.sketch.whole(weight.device, weight.dtype)
            factor_in, factor_out = least_squares(weight, frozen_in, frozen_out)
            if keep_norm:
                fitted = frozen_out @ factor_in + factor_out @ frozen_in
                scale = rescaled(weight, fitted)
                factor_in, factor_out = factor_in * scale, factor_out * scale
        assign(self.factor_in, factor_in)
        assign(self.factor_out, factor_out)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        factor_in, factor_out = local(self.factor_in), local(self.factor_out)
        bias = None if self.bias is None else local(self.bias)
        if self.sketch is None:
            if not is_cut(self.factor_out) and wants_fused(x, factor_in):
                return fused_linear(x, factor_in, factor_out, bias)
            h = F.linear(x, factor_in)
            return F.linear(exchange(h, self), factor_out, bias)
        x, factor_in, factor_out, bias = _autocast(x, factor_in, factor_out, bias)
        frozen_in, frozen_out = self.sketch.matrices(x.device, factor_in.dtype)
        h = half_frozen_rows(x, factor_in, frozen_in)
        return half_frozen_columns(exchange(h, self), frozen_out, factor_out, bias)

    def dense_weight(self) -> Tensor:
        """The weight of the `nn.Linear` that this layer equals, (out, in); differentiable."""
        factor_in, factor_out = (
            factor.full_tensor() if is_cut(factor) else factor for factor in (self.factor_in, self.factor_out)
        )
        if self.sketch is None:
            return factor_out @ factor_in
        frozen_in, frozen_out = self.sketch.whole(factor_in.device, factor_in.dtype)
        return frozen_out @ factor_in + factor_out @ frozen_in

    def flops(self, num_rows: int, *, backward: bool = False) -> int:
        """FLOPs of `num_rows` rows; a multiply-add counts as two, the bias is not counted.

        Args:
            num_rows: product of the input's dimensions but the last.
            backward: with the gradients of input and factors.
        """
        both = 2 * num_rows * self.rank * (self.in_features + self.out_features)
        if not backward:
            return both
        trained_in, trained_out = self.trained_ranks
        return 2 * both + 2 * num_rows * (trained_in * self.in_features + trained_out * self.out_features)

    def dense_flops(self, num_rows: int, *, backward: bool = False) -> int:
        """`flops` of the `nn.Linear` in whose place this layer stands."""
        return (6 if backward else 2) * num_rows * self.in_features * self.out_features

    def extra_repr(self) -> str:
        """Sizes, as `nn.Linear` prints them, and the share of its FLOPs."""
        share = self.flops(1) / self.dense_flops(1)
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank},"
            f" bias={self.bias is not None}, {share:.1%} of dense"
        )


def _one_rank(
    rank: int | None,
    sketch_size: int | None,
    num_terms: int | None,
    low_rank: int | None,
    sketch: str | tuple[Tensor, Tensor],
) -> int:
    """The rank, given by exactly one argument, or by the matrices."""
    if (num_terms is None) != (low_rank is None):
        raise KernelError(
            "num_terms, low_rank: only one is given",
            got=(num_terms, low_rank),
            remedy="Give both, or only rank",
        )
    said = [r for r in (rank, sketch_size) if r is not None]
    if num_terms is not None and low_rank is not None:
        said.append(2 * num_terms * low_rank)
    if not said and not isinstance(sketch, str):
        said.append(sketch[0].shape[0] + sketch[1].shape[1])
    if len(said) != 1:
        raise KernelError(
            "rank: needs exactly one of its arguments",
            got={
                "rank": rank, "sketch_size": sketch_size, "num_terms": num_terms, "low_rank": low_rank,
            },
            allowed="rank; or sketch_size, which is the same; or num_terms and low_rank",
            remedy="Give one of them",
        )  # fmt: skip
    return said[0]


def _make_sketch(layer: SKLinear, sketch: Any, seed: int, device: Any, dtype: Any) -> Sketch | None:
    into, out, rank = layer.in_features, layer.out_features, layer.rank
    if isinstance(sketch, str):
        if sketch != "sign":
            raise KernelError(
                "sketch: unknown kind",
                got=sketch,
                allowed="'sign', or two matrices",
                remedy="Give one of these",
            )
        return None if layer.train_both else SignSketch(into, out, rank // 2, rank - rank // 2, seed)
    u1, u2 = sketch
    if layer.train_both:
        raise KernelError(
            "sketch: matrices are given, but nothing is frozen",
            got="train_both=True",
            remedy="Leave out train_both or sketch",
        )
    if u1.dim() != 2 or u2.dim() != 2 or u1.shape[1] != out or u2.shape[0] != into:
        raise KernelError(
            "sketch: shapes do not fit",
            got=(tuple(u1.shape), tuple(u2.shape)),
            allowed=f"(r1, {out}) and ({into}, r2)",
            remedy="Transpose, or correct the layer's sizes",
        )
    if u1.shape[0] + u2.shape[1] != rank or 0 in (*u1.shape, *u2.shape):
        raise KernelError(
            "sketch: the matrices' ranks do not add up to the layer's",
            got=(u1.shape[0], u2.shape[1]),
            allowed=f"r1 + r2 = {rank}, neither 0",
            remedy="Leave rank out",
        )
    return GivenSketch(u1, u2, device, torch.get_default_dtype() if dtype is None else dtype)


def _autocast(x: Tensor, *tensors: Tensor | None) -> Any:
    """Cast the arguments as autocast does for `F.linear`."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return x, *tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype is not torch.float64 else t
        for t in (x, *tensors)
    )
