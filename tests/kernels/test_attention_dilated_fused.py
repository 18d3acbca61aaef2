"""The path of dilated attention on one rank: its views, its number of operators, Triton's copies of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from distributed_kernels.attention import dilated_copies
from distributed_kernels.attention.dilated_copies import Copies, TritonCopies, chosen_copies
from distributed_kernels.attention.dilated_fused import TileAttention, fused_dilated_attention
from distributed_kernels.attention.dilated_tiles import HeadOffsets, Tile, dilated_plan, head_runs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels import oracles
from tests.kernels.attention_support import assert_matches, errors, inputs

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
bounded = settings(max_examples=60, deadline=None, derandomize=True)
Branches = list[tuple[int, int]]


def flash() -> TileAttention:
    """Torch's flash operators for the CPU as they are, without the halving of causal blocks."""

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        return found

    def backward(*given: Any, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *given, 0.0, causal, scale=scale
            )
        )
        return found

    return TileAttention(forward, backward)


def fused(qkv: list[Tensor], branches: Branches, offsets: HeadOffsets, causal: bool) -> Tensor:
    q, k, v = qkv
    plan = dilated_plan(tuple(branches), q.shape[2], q.shape[1], offsets)
    return fused_dilated_attention(q, k, v, plan, causal, q.shape[-1] ** -0.5, flash())


def side_by_side(qkv: list[Tensor]) -> list[Tensor]:
    """The same numbers as leaves that hold the heads of a position side by side."""
    return [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in qkv]


@pytest.mark.slow
@bounded
@given(
    length=st.integers(1, 26),
    heads=st.integers(1, 6),
    branches=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 7)), min_size=1, max_size=3),
    causal=st.booleans(),
    first=st.integers(0, 3),
    kind=st.sampled_from(["interleaved", "grouped"]),
    together=st.booleans(),
)
def test_against_the_oracle(
    length: int, heads: int, branches: Branches, causal: bool, first: int, kind: str, together: bool
) -> None:
    """Heads that are a part of more, in both orders of offsets and both layouts of memory."""
    torch.manual_seed(length)
    total = first + heads + 1
    widths, rates = zip(*branches, strict=True)
    count = oracles.dilated_counts(length, total, widths, rates, causal=causal, grouped=kind == "grouped")
    count = count[first : first + heads]
    qkv = inputs(2, heads, length, 4)
    assert_matches(
        lambda *qkv: fused(list(qkv), branches, HeadOffsets(kind, first, total), causal),
        lambda q, k, v: oracles.weighted_attention(q, k, v, count),
        side_by_side(qkv) if together else qkv,
    )


@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("heads", [3, 6])
@pytest.mark.parametrize("kind", ["interleaved", "grouped"])
@pytest.mark.parametrize("together", [False, True])
def test_heads_that_begin_within_a_cycle(first: int, heads: int, kind: str, together: bool) -> None:
    """Rates that divide the segments, so that all heads are in one tile, of several runs."""
    branches = [(8, 2), (24, 4), (12, 3)]
    widths, rates = zip(*branches, strict=True)
    count = oracles.dilated_counts(24, first + heads, widths, rates, grouped=kind == "grouped")
    qkv = inputs(2, heads, 24, 4)
    assert_matches(
        lambda *qkv: fused(list(qkv), branches, HeadOffsets(kind, first, first + heads), False),
        lambda q, k, v: oracles.weighted_attention(q, k, v, count[first:]),
        side_by_side(qkv) if together else qkv,
    )


@given(offsets=st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_runs_hold_every_head_once(offsets: list[int]) -> None:
    found = [
        (
            run.head + group * run.group_heads + place,
            run.offset + group * run.group_step + place * run.step,
        )
        for run in head_runs(list(enumerate(offsets)))
        for group in range(run.groups)
        for place in range(run.size)
    ]
    assert found == list(enumerate(offsets))


@pytest.mark.parametrize("kind", ["interleaved", "grouped"])
@pytest.mark.parametrize("rate", [1, 2, 4, 8])
def test_rates_that_divide_the_heads_take_one_view(rate: int, kind: str) -> None:
    plan = dilated_plan(((64, rate),), 256, 8, HeadOffsets(kind))
    (tile,) = plan.branches[0]
    assert len(tile.runs) == 1
    assert (tile.segments, tile.rows) == (4, 64 // rate)


def test_expanded_and_sliced_gradients() -> None:
    branches, count = [(4, 1), (16, 2)], oracles.dilated_counts(16, 4, [4, 16], [1, 2])
    qkv = inputs(1, 4, 16, 8)
    mine = torch.autograd.grad(fused(qkv, branches, HeadOffsets(), False).sum(), qkv)
    theirs = torch.autograd.grad(oracles.weighted_attention(*qkv, count).sum(), qkv)
    for pair in zip(mine, theirs, strict=True):
        torch.testing.assert_close(*pair, rtol=0, atol=1e-12)


# -- operators -------------------------------------------------------------------------------------------

VIEWS = ("as_strided", "view", "reshape", "select", "unbind", "transpose", "unsqueeze", "detach", "alias")


class Operators(TorchDispatchMode):
    """Counts the operators that compute or copy."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if not any(name.startswith(view) for view in VIEWS):
            self.found[name] += 1
        return func(*args, **kwargs or {})


def operators(length: int, heads: int, branches: Branches) -> tuple[Counter[str], Counter[str]]:
    """Of the forward and of the backward."""
    qkv = inputs(1, heads, length, 8, dtype=torch.float32)
    with Operators() as forward:
        out = fused(qkv, branches, HeadOffsets(), True)
    dout = torch.ones_like(out)
    with Operators() as backward:
        torch.autograd.grad(out, qkv, dout)
    return forward.found, backward.found


@pytest.mark.parametrize("longest", [2, 3, 4])
def test_operators_grow_with_branches_alone(longest: int) -> None:
    """Forward three for each branch (gather, attention, merge) and seven more; whatever the sizes."""
    branches = [(16 * 2**step, 2**step) for step in range(longest)]
    forward, backward = operators(128, 8, branches)
    for length, heads in ((256, 8), (2048, 8), (128, 16), (128, 32)):
        assert operators(length, heads, branches) == (forward, backward)
    assert forward["_scaled_dot_product_flash_attention_for_cpu"] == longest
    assert forward.total() <= 3 * longest + 7
    # The branch of rate 2 is halved, so that its copies take no more memory than dense attention.
    assert backward["_scaled_dot_product_flash_attention_for_cpu_backward"] == longest + 1
    assert backward.total() <= 5 * (longest + 1)


def test_a_branch_of_all_rows_is_neither_copied_nor_merged() -> None:
    forward, backward = operators(64, 4, [(16, 1)])
    assert forward == {"_scaled_dot_product_flash_attention_for_cpu": 1}
    assert backward == {"_scaled_dot_product_flash_attention_for_cpu_backward": 1}


# -- Triton ----------------------------------------------------------------------------------------------


@pytest.fixture
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if torch.cuda.is_available():
        pytest.skip("these run on the CPU, and what is imported once compiles for the GPU")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    dilated_copies.triton_runs.cache_clear()
    yield
    dilated_copies.triton_runs.cache_clear()


@needs_triton
@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("shape", "branches"),
    [
        ((2, 4, 32, 8), [(8, 1), (16, 2), (32, 4)]),
        ((2, 4, 40, 5), [(16, 2), (24, 4)]),
        ((1, 4, 33, 8), [(8, 1), (8, 1), (12, 2)]),
        ((2, 3, 17, 8), [(5, 1), (9, 3)]),
    ],
)
def test_triton_copies(
    shape: tuple[int, ...], branches: Branches, causal: bool, together: bool, dtype: torch.dtype
) -> None:
    qkv = inputs(*shape, dtype=dtype)
    qkv = side_by_side(qkv) if together else qkv
    plan = dilated_plan(tuple(branches), shape[2], shape[1], HeadOffsets())
    assert chosen_copies(*qkv, plan) is TritonCopies
    widths, rates = zip(*branches, strict=True)
    count = oracles.dilated_counts(shape[2], shape[1], widths, rates, causal=causal)
    found = errors(
        lambda *qkv: fused(list(qkv), branches, HeadOffsets(), causal),
        lambda q, k, v: oracles.weighted_attention(q, k, v, count),
        qkv,
    )
    assert max(found) <= (5e-6 if dtype is torch.float32 else 4 * 2**-8)


@needs_triton
@pytest.mark.usefixtures("_interpreted")
def test_triton_that_computes_wrong_values_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Tile.launch_arguments.func
    monkeypatch.setattr(Tile, "launch_arguments", property(lambda tile: {**real(tile), "first": 1}))
    q = torch.randn(1, 2, 8, 4)
    plan = dilated_plan(((8, 2),), 8, 2, HeadOffsets())
    with pytest.warns(UserWarning, match=r"wrong values.*DISTRIBUTED_KERNELS_DILATED=torch"):
        assert chosen_copies(q, q, q, plan) is Copies


def test_triton_is_for_gpus_and_can_be_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    dilated_copies.triton_runs.cache_clear()
    q = torch.randn(1, 2, 8, 4)
    plan = dilated_plan(((8, 2),), 8, 2, HeadOffsets())
    assert chosen_copies(q, q, q, plan) is Copies
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("DISTRIBUTED_KERNELS_DILATED", "torch")
    dilated_copies.triton_runs.cache_clear()
    assert chosen_copies(q, q, q, plan) is Copies
    dilated_copies.triton_runs.cache_clear()
