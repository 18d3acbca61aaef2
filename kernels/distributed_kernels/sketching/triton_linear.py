"""y = (x A^T) B^T + b as one Triton kernel: h = x A^T stays in registers. Imported when it is used.

A program takes some rows: it goes along the inputs once for h, then along the outputs.
Untested on a GPU at this commit; its tests run it in Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(
    x: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    num_rows: tl.tensor,
    num_in: tl.tensor,
    num_out: tl.tensor,
    rank: tl.tensor,
    has_bias: tl.constexpr,
    precision: tl.constexpr,
    block_rows: tl.constexpr,
    block_in: tl.constexpr,
    block_out: tl.constexpr,
    block_rank: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    ranks = tl.arange(0, block_rank)
    long_rows = rows.to(tl.int64)
    h = tl.zeros((block_rows, block_rank), dtype=tl.float32)
    for start in range(0, num_in, block_in):
        columns = start + tl.arange(0, block_in)
        seen = (rows[:, None] < num_rows) & (columns[None, :] < num_in)
        x_part = tl.load(x + long_rows[:, None] * num_in + columns[None, :], mask=seen, other=0.0)
        seen = (columns[:, None] < num_in) & (ranks[None, :] < rank)
        a_part = tl.load(a + ranks[None, :] * num_in + columns[:, None], mask=seen, other=0.0)
        h = tl.dot(x_part, a_part, h, input_precision=precision)
    inner = h.to(x.dtype.element_ty)
    for start in range(0, num_out, block_out):
        columns = start + tl.arange(0, block_out)
        seen = (ranks[:, None] < rank) & (columns[None, :] < num_out)
        b_part = tl.load(b + columns[None, :] * rank + ranks[:, None], mask=seen, other=0.0)
        out = tl.dot(inner, b_part, input_precision=precision)
        if has_bias:
            out += tl.load(bias + columns, mask=columns < num_out, other=0.0)[None, :].to(tl.float32)
        seen = (rows[:, None] < num_rows) & (columns[None, :] < num_out)
        tl.store(y + long_rows[:, None] * num_out + columns[None, :], out.to(x.dtype.element_ty), mask=seen)


def launch(x: Tensor, factor_in: Tensor, factor_out: Tensor, bias: Tensor | None) -> Tensor:
    """Run the kernel on contiguous (rows, in), (rank, in), (out, rank), (out,)."""
    rank, num_in = factor_in.shape
    y = x.new_empty(len(x), len(factor_out))
    block_rank = max(16, triton.next_power_of_2(rank))
    narrow = block_rank > 64  # registers hold h and a tile of either factor
    block_rows, block_in, block_out = (32, 32, 64) if narrow else (64, 64, 64)
    exact = x.dtype is torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    _kernel[(triton.cdiv(len(x), block_rows),)](
        x, factor_in, factor_out, x if bias is None else bias, y,
        len(x), num_in, len(factor_out), rank,
        has_bias=bias is not None, precision="ieee" if exact else "tf32",
        block_rows=block_rows, block_in=block_in, block_out=block_out, block_rank=block_rank,
    )  # fmt: skip
    return y
