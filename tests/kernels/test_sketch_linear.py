"""SKLinear against its formula in float64, and in the places where a linear layer is used."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import distributed_kernels
import pytest
import torch
import torch.nn.functional as F
from distributed_kernels import GivenSketch, KernelError, SignSketch, SKLinear, break_even_rank, sketch_signs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

MODES = [{"train_both": True}, {"train_both": False}]
F64 = torch.float64


def layer_of(into: int = 40, out: int = 30, rank: int = 8, **given: Any) -> SKLinear:
    torch.manual_seed(0)
    return SKLinear(into, out, rank, **{"dtype": F64, **given})


def panther(x: Tensor, s1: Tensor, s2: Tensor, u1: Tensor, u2: Tensor, bias: Tensor) -> Tensor:
    """x S1 U1 + x U2 S2 + b, term by term."""
    return x @ s1 @ u1 + x @ u2 @ s2 + bias


def frozen_halves(layer: SKLinear) -> tuple[Tensor, Tensor]:
    """(U1, U2) as their definition has them."""
    r2, seed = layer.rank // 2, layer.sketch.seed
    r1 = layer.rank - r2
    u1 = sketch_signs(2 * seed + 1, (layer.out_features, r1), dtype=F64).T / r1**0.5
    return u1, sketch_signs(2 * seed, (r2, layer.in_features), dtype=F64).T / r2**0.5


# -- values and gradients ------------------------------------------------------------------


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    sizes=st.tuples(st.integers(6, 30), st.integers(6, 30)),
    batch=st.lists(st.integers(0, 4), max_size=3),
    bias=st.booleans(),
    frozen=st.booleans(),
    dtype=st.sampled_from([F64, torch.float32]),
    data=st.data(),
)
def test_formula(
    sizes: tuple[int, int], batch: list[int], bias: bool, frozen: bool, dtype: torch.dtype, data: Any
) -> None:
    rank = data.draw(st.integers(2, break_even_rank(*sizes)))
    layer = layer_of(*sizes, rank, train_both=not frozen, bias=bias, dtype=dtype, seed=11)
    x = torch.randn(*batch, sizes[0], dtype=dtype, requires_grad=True)
    weights = torch.randn(*batch, sizes[1], dtype=dtype)
    (layer(x) * weights).sum().backward()

    leaves = [t.detach().to(F64).requires_grad_() for t in (x, layer.factor_in, layer.factor_out)]
    b = torch.zeros((), dtype=F64) if not bias else layer.bias.detach().to(F64).requires_grad_()
    if frozen:
        u1, u2 = frozen_halves(layer)
        y = panther(leaves[0], leaves[1].T, leaves[2].T, u1, u2, b)
    else:
        y = leaves[0] @ leaves[1].T @ leaves[2].T + b
    (y * weights.to(F64)).sum().backward()
    pairs = [(layer(x), y), (x.grad, leaves[0].grad), (layer.factor_in.grad, leaves[1].grad)]
    pairs.append((layer.factor_out.grad, leaves[2].grad))
    if bias:
        pairs.append((layer.bias.grad, b.grad))
    bound = 1e-10 if dtype is F64 else 5e-6
    for ours, oracle in pairs:
        scale = max(1.0, float(oracle.detach().abs().max())) if oracle.numel() else 1.0
        torch.testing.assert_close(ours.to(F64), oracle, atol=bound * scale, rtol=0)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_gradcheck(mode: dict[str, Any]) -> None:
    layer = layer_of(7, 6, 3, **mode)
    names = [name for name, _ in layer.named_parameters()]

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))
        return result

    inputs = (torch.randn(2, 3, 7, dtype=F64, requires_grad=True), *layer.parameters())
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_equals_the_linear_layer_of_its_dense_weight(mode: dict[str, Any]) -> None:
    layer, x = layer_of(**mode), torch.randn(5, 40, dtype=F64)
    dense = F.linear(x, layer.dense_weight(), layer.bias)
    torch.testing.assert_close(layer(x), dense, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_gradients_that_are_asked_for(needs: tuple[bool, bool, bool]) -> None:
    layer = layer_of(train_both=False)
    x = torch.randn(5, 40, dtype=F64, requires_grad=needs[0])
    layer.bias.requires_grad_(False)
    layer.factor_in.requires_grad_(needs[1])
    layer.factor_out.requires_grad_(needs[2])
    layer(x).sum().backward()
    assert tuple(t.grad is not None for t in (x, layer.factor_in, layer.factor_out)) == needs


@pytest.mark.parametrize(("mode", "units"), [(MODES[0], 6), (MODES[1], 5)], ids=str)
def test_flops_are_those_that_torch_counts(mode: dict[str, Any], units: int) -> None:
    layer, x = layer_of(**mode), torch.randn(3, 4, 40, dtype=F64, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = layer(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert forward.get_total_flops() == layer.flops(12) == 2 * 12 * 8 * 70
    both = forward.get_total_flops() + backward.get_total_flops()
    assert both == layer.flops(12, backward=True) == units * 12 * 8 * 70
    assert layer.dense_flops(12, backward=True) == 6 * 12 * 40 * 30


# -- initial values --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("into", "out", "rank"), [(1024, 4096, 64), (4096, 1024, 8), (64, 1000, 20)])
def test_outputs_start_as_large_as_those_of_a_linear_layer(
    mode: dict[str, Any], into: int, out: int, rank: int
) -> None:
    torch.manual_seed(0)
    layer, dense, x = SKLinear(into, out, rank, **mode), nn.Linear(into, out), torch.randn(1000, into)
    with torch.no_grad():
        assert layer(x).std() == pytest.approx(float(dense(x).std()), rel=0.05)
    assert layer.bias.detach().std() == pytest.approx(into**-0.5 / 3**0.5, rel=0.1)


def test_factors_are_equal_in_scale() -> None:
    layer = layer_of(300, 100, 20)
    torch.testing.assert_close(layer.factor_in @ layer.factor_in.T, layer.factor_out.T @ layer.factor_out)


def test_fit_keeps_what_its_rank_can() -> None:
    weight = torch.randn(30, 40, dtype=F64)
    s = torch.linalg.svdvals(weight)
    layer = layer_of()
    layer.fit_weight(weight, keep_norm=False)
    assert (layer.dense_weight() - weight).norm().item() == pytest.approx(s[8:].norm().item())
    layer.fit_weight(weight)
    assert layer.dense_weight().norm().item() == pytest.approx(weight.norm().item())


def test_least_squares_residual() -> None:
    """||(I - P1) W (I - P2)||, and no neighbour of the fit is nearer."""
    layer, weight = layer_of(train_both=False), torch.randn(30, 40, dtype=F64)
    layer.fit_weight(weight, keep_norm=False)
    u1, u2 = frozen_halves(layer)
    rest_out = torch.eye(30, dtype=F64) - u1.T @ torch.linalg.pinv(u1.T)
    rest_in = torch.eye(40, dtype=F64) - torch.linalg.pinv(u2.T) @ u2.T
    error = (layer.dense_weight() - weight).norm()
    assert error.item() == pytest.approx((rest_out @ weight @ rest_in).norm().item())
    (layer.dense_weight() - weight).square().sum().backward()
    assert max(p.grad.abs().max() for p in (layer.factor_in, layer.factor_out)) < 1e-10


def test_the_seed_of_torch_decides_the_start() -> None:
    assert torch.equal(layer_of().factor_in, layer_of().factor_in)
    other = SKLinear(40, 30, 8, dtype=F64)
    assert not torch.equal(layer_of().factor_in, other.factor_in)


# -- where it has to work -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_autocast(mode: dict[str, Any]) -> None:
    """bf16 has 8 bits: relative errors of some 2**-8 at each of three roundings."""
    layer, x = layer_of(dtype=torch.float32, **mode), torch.randn(64, 40, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype is torch.bfloat16
    y.float().square().mean().backward()
    found = [t.grad for t in (x, *layer.parameters())]
    x.grad = None
    layer.zero_grad()
    layer(x).square().mean().backward()
    assert (y.float() - layer(x)).norm() < 2**-6 * layer(x).norm()
    for low, full in zip(found, (x.grad, *(p.grad for p in layer.parameters())), strict=True):
        assert low.dtype is torch.float32
        assert (low - full).norm() < 2**-5 * full.norm()


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_low_precision_throughout(mode: dict[str, Any]) -> None:
    """Weights in bf16, and the result within 2**-6 of the same in float64."""
    layer, x = layer_of(dtype=torch.bfloat16, **mode), torch.randn(64, 40, dtype=torch.bfloat16)
    exact = F.linear(x.double(), copy.deepcopy(layer).double().dense_weight(), layer.bias.double())
    assert (layer(x).double() - exact).norm() < 2**-6 * exact.norm()


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_checkpointed_and_copied_and_pickled(mode: dict[str, Any]) -> None:
    layer, x = layer_of(**mode), torch.randn(5, 40, dtype=F64, requires_grad=True)
    layer(x).sum().backward()
    wanted = [t.grad.clone() for t in (x, *layer.parameters())]
    for other in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        other.zero_grad()
        x.grad = None
        checkpoint(other, x, use_reentrant=False).sum().backward()
        assert all(map(torch.equal, wanted, [t.grad for t in (x, *other.parameters())]))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_from_the_meta_device(mode: dict[str, Any]) -> None:
    layer = layer_of(device="meta", **mode)
    assert layer(torch.empty(3, 40, device="meta", dtype=F64)).shape == (3, 30)
    layer = layer.to_empty(device="cpu")
    torch.manual_seed(0)
    layer.reset_parameters()
    assert all(map(torch.equal, layer.parameters(), layer_of(**mode).parameters()))
    x = torch.randn(3, 40, dtype=F64)
    assert torch.equal(layer(x), layer_of(**mode)(x))


def test_what_is_saved_is_the_seed(tmp_path: Any) -> None:
    layer, other = layer_of(train_both=False, seed=5), layer_of(train_both=False, seed=6)
    state = layer.state_dict()
    assert sorted(state) == ["bias", "factor_in", "factor_out", "sketch._extra_state"]
    torch.save(state, tmp_path / "state.pt")
    x = torch.randn(3, 40, dtype=F64)
    assert not torch.equal(layer(x), other(x))
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(layer(x), other(x))
    assert list(layer.buffers()) == []


def test_signs_of_another_version_are_refused() -> None:
    layer = layer_of(train_both=False)
    state = layer.state_dict()
    state["sketch._extra_state"]["algorithm"] = "mix32-v0"
    with pytest.raises(KernelError, match=r"Got 'mix32-v0'. Allowed: mix32-v1"):
        layer.load_state_dict(state)


def test_first_used_without_gradients_then_trained() -> None:
    layer, x = layer_of(train_both=False), torch.randn(3, 40, dtype=F64)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert layer.factor_in.grad is not None


def test_matrices_are_made_once() -> None:
    layer, x = layer_of(train_both=False), torch.randn(3, 40, dtype=F64)
    layer(x)
    first = layer.sketch.matrices(x.device, F64)
    layer(x)
    assert all(a is b for a, b in zip(first, layer.sketch.matrices(x.device, F64), strict=True))


@pytest.mark.slow
def test_compiled() -> None:
    for mode in MODES:
        layer, x = layer_of(**mode), torch.randn(3, 40, dtype=F64)
        torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(x), layer(x))


# -- ways to say it --------------------------------------------------------------------------------


def test_the_seeds_and_panthers_constructors() -> None:
    assert SKLinear(64, 64, 20).rank == SKLinear(64, 64, sketch_size=20).rank == 20
    panthers = SKLinear(64, 64, num_terms=2, low_rank=5)
    assert panthers.rank == 20
    assert not panthers.train_both
    assert panthers.factor_in.shape == panthers.factor_out.T.shape == (10, 64)
    assert SKLinear(64, 64, num_terms=2, low_rank=5, train_both=True).sketch is None


def test_matrices_by_hand() -> None:
    u1, u2 = torch.randn(3, 30, dtype=F64), torch.randn(40, 5, dtype=F64)
    torch.manual_seed(0)
    layer = SKLinear(40, 30, sketch=(u1, u2), dtype=F64)
    assert isinstance(layer.sketch, GivenSketch)
    assert layer.rank == 8
    x = torch.randn(4, 40, dtype=F64)
    y = panther(x, layer.factor_in.T, layer.factor_out.T, u1, u2, layer.bias)
    torch.testing.assert_close(layer(x), y)
    u1.zero_()  # the layer has its own
    torch.testing.assert_close(layer(x), y)
    other = SKLinear(40, 30, sketch=(torch.randn(3, 30), torch.randn(40, 5)), dtype=F64)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


def test_layers_of_one_seed_share_their_signs_and_others_do_not() -> None:
    a, b = SignSketch(40, 30, 4, 4, 1), SignSketch(40, 30, 4, 4, 2)
    assert a.checksum() == SignSketch(40, 30, 4, 4, 1).checksum() != b.checksum()
    cpu = torch.device("cpu")
    a.matrices(cpu, torch.bfloat16)
    assert a.checksum() == SignSketch(40, 30, 4, 4, 1).checksum(), "the dtype makes no difference"
    into, out = a.matrices(cpu, F64)
    assert not torch.equal(into[:, :30], out.T), "the halves differ from each other"


def test_a_part_of_a_sketch() -> None:
    whole, cpu = SignSketch(40, 30, 4, 4, 1), torch.device("cpu")
    part = SignSketch(40, 30, 4, 4, 1)
    part.in_range, part.out_range = (10, 20), (15, 30)
    frozen_in, frozen_out = whole.matrices(cpu, F64)
    assert torch.equal(part.matrices(cpu, F64)[0], frozen_in[:, 10:20])
    assert torch.equal(part.matrices(cpu, F64)[1], frozen_out[15:])
    assert part.checksum() == whole.checksum()


def test_printed() -> None:
    assert "rank=8, bias=True, 46.7% of dense" in repr(layer_of())


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("into", "out"), [(1024, 512), (7, 3), (64, 64), (1, 5), (2, 2)])
def test_break_even(into: int, out: int) -> None:
    rank = break_even_rank(into, out)
    assert rank * (into + out) < into * out <= (rank + 1) * (into + out)


@pytest.mark.slow
def test_what_saves_nothing_is_refused() -> None:
    with pytest.raises(KernelError, match=r"above break-even, which is rank 341 for 1024 -> 512.*Got 342"):
        SKLinear(1024, 512, 342)
    assert SKLinear(1024, 512, 341).rank == 341
    assert SKLinear(64, 32, 50, allow_costly=True)(torch.ones(2, 64)).shape == (2, 32)
    with pytest.raises(KernelError, match=r"break-even, which is rank 0 for 1 -> 5.*Allowed: none"):
        SKLinear(1, 5, 1)


ONES = torch.ones


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "needs exactly one of its arguments"),
        ({"rank": 4, "sketch_size": 4}, "needs exactly one of its arguments"),
        ({"rank": 4, "num_terms": 1, "low_rank": 2}, "needs exactly one of its arguments"),
        ({"num_terms": 1}, "only one is given"),
        ({"rank": 0}, "too small. Got 0. Allowed: 1 to 17"),
        ({"rank": 1, "train_both": False}, "too small. Got 1. Allowed: 2 to 17"),
        ({"rank": 4, "sketch": "gauss"}, "unknown kind. Got 'gauss'"),
        ({"rank": 4, "train_both": False, "seed": -1}, "seed: not in range. Got -1"),
        ({"sketch": (ONES(2, 31), ONES(40, 2))}, r"shapes do not fit. Got \(\(2, 31\), \(40, 2\)\)"),
        ({"rank": 5, "sketch": (ONES(2, 30), ONES(40, 2))}, "do not add up.*r1 \\+ r2 = 5"),
        ({"sketch": (ONES(2, 30), ONES(40, 2)), "train_both": True}, "nothing is frozen"),
    ],
)
def test_bad_input(given: dict[str, Any], words: str) -> None:
    with pytest.raises(KernelError, match=words):
        SKLinear(40, 30, **given)


def test_errors_travel_between_processes() -> None:
    with pytest.raises(KernelError) as caught:
        SKLinear(4, 3, 9)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_every_public_name_resolves() -> None:
    for name in distributed_kernels.__all__:
        assert getattr(distributed_kernels, name) is not None
    assert dir(distributed_kernels) == sorted(distributed_kernels.__all__)
    with pytest.raises(AttributeError, match="SKLinaer"):
        distributed_kernels.SKLinaer  # noqa: B018
