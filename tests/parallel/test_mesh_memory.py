"""Bytes of parameters, gradients and optimizer state of each rank: those of the formula, and no more.

A parameter of P elements that tensor parallelism cuts has P / tensor of them on a rank. FSDP cuts what is
left by rows, ceil(rows / shard) for each rank but the last ones. AdamW keeps two numbers for each.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed.interfaces.parallel_dims import ParallelDims
from distributed.testing.rank_pool import RankPool
from tests.parallel.models import ENTRIES, tokens
from tests.parallel.test_tensor_parallel import trainer_of

BYTES = 8
"""Of a float64."""
BY_COLUMNS = ("o_proj", "down_proj")
BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")


def rows_of(rows: int, shard: int, place: int) -> int:
    each = -(-rows // shard)
    return max(0, min(each, rows - place * each))


def expected(dims: ParallelDims, rank: int) -> int:
    """Elements of the tied Llama that a rank holds."""
    total, place = 0, dims.coordinates(rank)["shard"]
    for name, parameter in ENTRIES["llama tied"].build().named_parameters():
        rows, *rest = parameter.shape
        if any(part in name for part in BY_ROWS):
            rows //= dims.tensor
        elif any(part in name for part in BY_COLUMNS):
            rest = [rest[0] // dims.tensor]
        total += rows_of(rows, dims.shard, place) * prod(rest)
    return total


def nbytes(tensor: Any) -> int:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "placements") else tensor
    return local.numel() * local.element_size()


class Weighing(torch.optim.AdamW):
    """AdamW that fails a step in which a rank holds other than what the formula gives."""

    def __init__(self, params: Any, lr: float, dims: ParallelDims, eps: float = 1e-8) -> None:
        super().__init__(params, lr=lr, eps=eps)
        self.dims = dims

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        elements = expected(self.dims, dist.get_rank())
        assert sum(map(nbytes, parameters)) == BYTES * elements
        assert sum(nbytes(p.grad) for p in parameters) == BYTES * elements
        result = super().step(closure)
        slots = [s for state in self.state.values() for n, s in state.items() if n != "step"]
        assert sum(map(nbytes, slots)) == 2 * BYTES * elements
        return result


@pytest.mark.parametrize(
    ("backend", "dims"),
    [
        ("pytorch-ddp", ParallelDims(tensor=2)),
        ("pytorch-ddp", ParallelDims(data=2, tensor=2)),
        ("fsdp", ParallelDims(shard=2, tensor=2)),
        ("fsdp", ParallelDims(shard=4)),
    ],
    ids=str,
)
def test_a_rank_holds_what_the_formula_gives(backend: str, dims: ParallelDims, rank_pool: RankPool) -> None:
    trainer = trainer_of(
        ENTRIES["llama tied"].build(),
        backend,
        dims.world_size,
        rank_pool,
        {"tensor": dims.tensor},
        optimizer=partial(Weighing, dims=dims),
    )
    history = trainer.fit(tokens(16), max_steps=2)
    assert history.num_skipped_steps == 0
