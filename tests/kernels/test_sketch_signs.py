"""The signs: a function of seed, row and column alone, and as good as coins."""

from __future__ import annotations

import pytest
import torch
from distributed_kernels import SIGN_ALGORITHM, KernelError, sketch_signs
from hypothesis import given, settings
from hypothesis import strategies as st

SIDE = 512


def test_the_name_stands_for_these_signs() -> None:
    """Saved seeds mean other matrices when this changes: then the name has to."""
    assert SIGN_ALGORITHM == "mix32-v1"
    signs = sketch_signs(5, (4, 8), dtype=torch.int8).tolist()
    assert signs == [
        [-1, 1, -1, 1, -1, 1, -1, -1],
        [-1, -1, 1, 1, 1, -1, 1, -1],
        [1, -1, -1, 1, 1, -1, -1, 1],
        [1, -1, 1, 1, -1, -1, -1, 1],
    ]


def by_hand(seed: int, row: int, column: int) -> int:
    """The same in Python's own integers."""
    z = (seed + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    z = z ^ (z >> 31)

    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x21F0AAAD % 2**32
        x = (x ^ (x >> 15)) * 0xD35A2D97 % 2**32
        return x ^ (x >> 15)

    h = mix(mix(mix(row) ^ (z >> 32)) ^ mix(mix(column) ^ (z % 2**32)))
    return -1 if h >> 31 else 1


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 8), st.integers(0, 2**32 - 8), st.integers(0, 7))
def test_integers_as_wide_as_they_come(seed: int, row: int, column: int, more: int) -> None:
    signs = sketch_signs(seed, (8, 8), offset=(row, column), dtype=torch.int8)
    assert signs[more, 7 - more] == by_hand(seed, row + more, column + 7 - more)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_a_part_is_the_slice_of_the_whole(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**63 - 1))
    rows, columns = data.draw(st.integers(0, 50)), data.draw(st.integers(0, 50))
    row, column = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    whole = sketch_signs(seed, (rows, columns))
    part = sketch_signs(seed, (rows - row, columns - column), offset=(row, column))
    assert torch.equal(part, whole[row:, column:])


def test_a_part_of_what_is_made_in_pieces() -> None:
    whole = sketch_signs(3, (1500, 700))
    assert torch.equal(sketch_signs(3, (5, 700), offset=(1122, 0)), whole[1122:1127])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2**62 + 5])
def test_coins(seed: int) -> None:
    """Mean, rows, columns, shifted rows and another seed: nothing beyond what chance gives."""
    signs = sketch_signs(seed, (SIDE, SIDE), dtype=torch.float64)
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(signs.sum()) < 4 * SIDE
    other = sketch_signs(seed ^ 1, (SIDE, SIDE), dtype=torch.float64)
    for a, b in ((signs, signs), (signs.T, signs.T), (signs, signs.T), (signs, other)):
        products = (a @ b.T) / SIDE**0.5  # standard normal, but for a row with itself
        if torch.equal(a, b):
            products.fill_diagonal_(0)
        assert products.abs().max() < 5.6
        assert abs(products.square().mean() - 1) < 0.02
    neighbours = (signs[1:] * signs[:-1]).sum() / SIDE, (signs[:, 1:] * signs[:, :-1]).sum() / SIDE
    assert max(abs(n) for n in neighbours) < 4
    assert abs(torch.linalg.matrix_norm(signs, 2) / SIDE**0.5 - 2) < 0.1  # random matrices' edge


@pytest.mark.slow
def test_panther_variance() -> None:
    """(W U1^T U1 + U2 U2^T W) / 2 is right on average, by E||W^ - W||^2 = (d + o - 2) / (4 k) ||W||^2."""
    d, o, k, seeds = 40, 24, 8, 400
    weight = torch.randn(d, o, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total, errors = torch.zeros_like(weight), []
    for seed in range(seeds):
        u1 = sketch_signs(2 * seed, (k, o), dtype=torch.float64) / k**0.5
        u2 = sketch_signs(2 * seed + 1, (d, k), dtype=torch.float64) / k**0.5
        estimate = (weight @ u1.T @ u1 + u2 @ u2.T @ weight) / 2
        total += estimate
        errors.append(float((estimate - weight).square().sum() / weight.square().sum()))
    assert sum(errors) / seeds == pytest.approx((d + o - 2) / (4 * k), rel=0.03)
    left = ((total / seeds - weight).square().sum() / weight.square().sum()).sqrt()
    assert left == pytest.approx(((d + o - 2) / (4 * k) / seeds) ** 0.5, rel=0.1)


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    sketch_signs(0, (10, 10))
    assert torch.equal(torch.get_rng_state(), before)


def test_on_the_meta_device() -> None:
    assert sketch_signs(0, (3, 2), device="meta").shape == (3, 2)


@pytest.mark.parametrize(
    ("seed", "shape", "offset", "words"),
    [
        (-1, (2, 2), (0, 0), "seed: not in range. Got -1"),
        (2**63, (2, 2), (0, 0), "seed: not in range"),
        (0, (2, -2), (0, 0), "rows or columns out of range"),
        (0, (2, 2), (0, -1), "rows or columns out of range"),
        (0, (2, 2), (2**32 - 1, 0), "to end at 2\\*\\*32 at most"),
        (0, (2, 2, 2), (0, 0), "a sketch is a matrix"),
    ],
)
def test_bad_input(seed: int, shape: tuple[int, int], offset: tuple[int, int], words: str) -> None:
    with pytest.raises(KernelError, match=words):
        sketch_signs(seed, shape, offset=offset)
