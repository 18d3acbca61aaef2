"""SKConv2d: a convolution to a few channels, then a 1 x 1 convolution."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed_kernels.errors import KernelError
from distributed_kernels.foreign_names import refuse_foreign
from distributed_kernels.sketching.costs import LayerReport, check_rank
from distributed_kernels.sketching.factorizations import spectral

__all__ = ["SKConv2d"]

Pair = tuple[int, int]


class SKConv2d(nn.Module):
    """y = B * (A * x) + b: A convolves with the kernel's size into `rank` channels, B is 1 x 1.

    It is `SKLinear` over patches, with ``in_channels * height * width`` of the kernel as inputs: it saves
    weights and FLOPs when rank is at most `break_even_rank` of these.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device,
            dtype: as for `nn.Conv2d`, in its order; groups other than 1 and paddings other than zeros are
            refused.
        rank: channels between the two; by keyword.
        allow_costly: accept a rank above break-even.

    Attributes:
        factor_in: (rank, in_channels, height, width).
        factor_out: (out_channels, rank).
        bias: (out_channels,) or None.
        report: the `LayerReport` of a layer that `factorize_conv` made, else None.

    Raises:
        KernelError: a rank that is missing or saves nothing, groups, another padding, or an argument of
            another library.
    """

    report: LayerReport | None = None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        stride: int | Pair = 1,
        padding: int | Pair | str = 0,
        dilation: int | Pair = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        rank: int | None = None,
        allow_costly: bool = False,
        **unknown: Any,
    ) -> None:
        super().__init__()
        refuse_foreign("SKConv2d.__init__", unknown, ("rank", "stride"))
        if groups != 1 or padding_mode != "zeros":
            raise KernelError(
                "groups, padding_mode: grouped convolutions and paddings other than zeros are not supported",
                got=(groups, padding_mode),
                allowed="groups=1, padding_mode='zeros'",
                remedy="Keep nn.Conv2d",
            )
        if rank is None:
            raise KernelError(
                "rank: missing, and taken by keyword alone; the fourth position is nn.Conv2d's stride",
                got=f"stride={stride}",
                allowed="rank=, channels between the two convolutions",
                remedy=f"Write SKConv2d({in_channels}, {out_channels}, {kernel_size}, rank=...)",
            )
        self.in_channels, self.out_channels, self.rank = in_channels, out_channels, rank
        self.kernel_size = kernel_size if isinstance(kernel_size, tuple) else (kernel_size, kernel_size)
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.in_features = in_channels * math.prod(self.kernel_size)
        check_rank(rank, self.in_features, out_channels, least=1, allow_costly=allow_costly)
        shape = (rank, in_channels, *self.kernel_size)
        self.factor_in = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.factor_out = nn.Parameter(torch.empty(out_channels, rank, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As `SKLinear.reset_parameters`, from a weight drawn as `nn.Conv2d` draws its own."""
        if self.factor_in.is_meta:
            return
        dtype = torch.promote_types(self.factor_in.dtype, torch.float32)
        weight = torch.empty(self.out_channels, self.in_features, device=self.factor_in.device, dtype=dtype)
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        factor_in, factor_out = spectral(weight, self.rank)
        self.factor_in.copy_(factor_in.view_as(self.factor_in))
        self.factor_out.copy_(factor_out)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in_channels, height, width) -> (batch, out_channels, height, width)."""
        h = F.conv2d(x, self.factor_in, None, self.stride, self.padding, self.dilation)
        return F.conv2d(h, self.factor_out[:, :, None, None], self.bias)

    def dense_weight(self) -> Tensor:
        """The weight of the `nn.Conv2d` that this layer equals; differentiable."""
        return torch.einsum("or,rihw->oihw", self.factor_out, self.factor_in)

    def flops(self, num_rows: int, *, backward: bool = False) -> int:
        """FLOPs of `num_rows` output pixels, as in `SKLinear.flops`."""
        return (6 if backward else 2) * num_rows * self.rank * (self.in_features + self.out_channels)

    def dense_flops(self, num_rows: int, *, backward: bool = False) -> int:
        """`flops` of the `nn.Conv2d` in whose place this layer stands."""
        return (6 if backward else 2) * num_rows * self.in_features * self.out_channels

    def extra_repr(self) -> str:
        """Sizes, as `nn.Conv2d` prints them, and the share of its FLOPs."""
        share = self.flops(1) / self.dense_flops(1)
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, rank={self.rank},"
            f" stride={self.stride}, padding={self.padding}, {share:.1%} of dense"
        )
