"""Converting dense layers: the errors are the least that there can be, and they are reported."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed_kernels import (
    CostlyError,
    KernelError,
    SKConv2d,
    SKLinear,
    factorize_conv,
    factorize_linear,
    input_covariance,
    sketch_model,
)
from distributed_kernels.sketching.factorizations import OVERSAMPLING, truncated_svd
from torch import Tensor, nn

F64 = torch.float64


def linear(into: int = 40, out: int = 30, decay: float = 0.5) -> nn.Linear:
    """Singular values i ** -decay."""
    torch.manual_seed(0)
    layer = nn.Linear(into, out, dtype=F64)
    u, s, vt = torch.linalg.svd(layer.weight.detach(), full_matrices=False)
    s = torch.arange(1, len(s) + 1, dtype=F64) ** -decay
    layer.weight.data = u * s @ vt
    return layer


def uneven_inputs(count: int = 4000, into: int = 40) -> Tensor:
    """Rows with a mean, and of very different size in different directions."""
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(into, into, generator=generator, dtype=F64) / torch.arange(1, into + 1, dtype=F64)
    return torch.randn(count, into, generator=generator, dtype=F64) @ mixed.T + 0.1


def tail(weight: Tensor, rank: int) -> float:
    """What no matrix of this rank can have of `weight`, relative (Eckart and Young)."""
    s = torch.linalg.svdvals(weight.detach())
    return float(s[rank:].norm() / s.norm())


# -- one linear layer ------------------------------------------------------------------------


def test_svd_is_the_best_for_the_weight() -> None:
    dense = linear()
    before = copy.deepcopy(dense.state_dict())
    layer = factorize_linear(dense, 6)
    assert isinstance(layer, SKLinear)
    report = layer.report
    assert report is not None
    assert report.weight_error == pytest.approx(tail(dense.weight, 6))
    error = (layer.dense_weight() - dense.weight).detach().norm() / dense.weight.detach().norm()
    assert float(error) == pytest.approx(tail(dense.weight, 6))
    assert (report.rank, report.break_even, report.output_error) == (6, 17, None)
    assert (report.parameters_before, report.parameters_after) == (1200, 420)
    assert (report.flops_before, report.flops_after) == (2400, layer.flops(1)) == (2400, 840)
    assert torch.equal(layer.bias, dense.bias)
    assert layer.bias is not dense.bias
    assert all(torch.equal(before[name], tensor) for name, tensor in dense.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("rank", [3, 12])
def test_randomized_svd_keeps_its_bound(decay: float, rank: int) -> None:
    """Halko, Martinsson and Tropp (2011), theorem 10.5, which holds on average without the power steps
    that are added here; truncating from rank + p to rank adds at most the tail once more."""
    weight = linear(120, 90, decay).weight.detach()
    u, s, vt = truncated_svd(weight, rank, "rsvd")
    error, best = float((weight - u * s @ vt).norm() / weight.norm()), tail(weight, rank)
    assert best - 1e-12 <= error <= best * (1 + math.sqrt(1 + rank / (OVERSAMPLING - 1)))
    assert error < best * (1.002 if decay else 1.02)
    torch.testing.assert_close(u.T @ u, torch.eye(rank, dtype=F64))
    report = factorize_linear(linear(120, 90, decay), rank, method="rsvd").report
    assert report.weight_error == pytest.approx(error)


def test_randomized_svd_draws_the_same_and_leaves_the_random_state() -> None:
    state, dense = torch.get_rng_state(), linear()
    state = torch.get_rng_state()
    first = factorize_linear(dense, 6, method="rsvd")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert torch.equal(factorize_linear(dense, 6, method="rsvd").factor_in, first.factor_in)


@pytest.mark.parametrize(("into", "out"), [(40, 30), (30, 40)])
def test_activation_is_the_best_for_the_outputs(into: int, out: int) -> None:
    """||(W - W^) C^1/2|| equals the tail of W C^1/2, with the root taken here and not there."""
    dense, x = linear(into, out, 0.2), uneven_inputs(into=into)
    covariance = x.T @ x / len(x)
    layer = factorize_linear(dense, 6, method="activation", covariance=covariance)
    values, vectors = torch.linalg.eigh(covariance)
    seen = dense.weight.detach() @ (vectors * values.clamp(min=0).sqrt())
    report = layer.report
    assert report.output_error == pytest.approx(tail(seen, 6), rel=1e-6)
    with torch.no_grad():
        error = (layer(x) - dense(x)).norm() / (dense(x) - dense.bias).norm()
    assert float(error) == pytest.approx(report.output_error, rel=1e-6)
    plain = factorize_linear(dense, 6, covariance=covariance).report
    assert plain.output_error > 1.5 * report.output_error
    assert plain.weight_error < report.weight_error


def test_inputs_of_few_directions_need_no_inverse() -> None:
    dense, x = linear(decay=0.0), uneven_inputs(3)
    report = factorize_linear(dense, 3, method="activation", covariance=x.T @ x / 3).report
    assert report.output_error < 1e-6


@pytest.mark.parametrize("method", ["svd", "rsvd", "activation"])
def test_energy_takes_the_least_rank_that_keeps_it(method: str) -> None:
    dense, x = linear(decay=1.0), uneven_inputs()
    covariance = x.T @ x / len(x)
    report = factorize_linear(dense, energy=0.95, method=method, covariance=covariance).report
    kind = "output_error" if method == "activation" else "weight_error"
    less = factorize_linear(dense, report.rank - 1, method=method, covariance=covariance).report
    assert getattr(report, kind) ** 2 <= 0.05 < getattr(less, kind) ** 2


def test_all_energy_is_the_layer_itself() -> None:
    dense = linear()
    layer = factorize_linear(dense, energy=1.0, allow_costly=True)
    torch.testing.assert_close(layer.dense_weight(), dense.weight)
    thin = nn.Linear(40, 30, dtype=F64)
    thin.weight.data = torch.outer(torch.arange(30.0), torch.ones(40)).double()
    assert factorize_linear(thin, energy=1.0).report.rank == 1
    thin.weight.data.zero_()
    assert factorize_linear(thin, energy=0.9).report.weight_error == 0.0


def test_what_the_layer_was_it_stays() -> None:
    dense = nn.Linear(40, 30, bias=False, dtype=torch.bfloat16).requires_grad_(False).eval()
    layer = factorize_linear(dense, 4)
    assert layer.bias is None
    assert not layer.training
    assert not layer.factor_in.requires_grad
    assert layer.factor_in.dtype is layer.factor_out.dtype is torch.bfloat16


C40 = torch.eye(40)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rank": 18}, "above break-even, which is rank 17 for 40 -> 30"),
        ({"energy": 0.99}, "takes rank 30 or more, and above rank 17 .break-even. nothing is saved"),
        ({"energy": 0.99, "method": "rsvd"}, "takes rank 19 or more"),
        ({}, "need exactly one of them"),
        ({"rank": 3, "energy": 0.5}, "need exactly one of them"),
        ({"rank": 0}, "too small"),
        ({"energy": 1.5}, "not a share. Got 1.5"),
        ({"rank": 3, "method": "qr"}, "unknown method. Got 'qr'. Allowed: svd, rsvd, activation"),
        ({"rank": 3, "method": "activation"}, "'activation' needs it"),
        ({"rank": 3, "covariance": torch.eye(30)}, r"layer's inputs. Got \(30, 30\). Allowed: \(40, 40\)"),
    ],
)
def test_bad_input(given: dict[str, Any], words: str) -> None:
    with pytest.raises(KernelError, match=words):
        factorize_linear(linear(decay=0.1), **given)


def test_what_costs_more_has_an_error_of_its_own() -> None:
    with pytest.raises(CostlyError):
        factorize_linear(linear(), 18)
    assert factorize_linear(linear(), 18, allow_costly=True).rank == 18


# -- convolutions ------------------------------------------------------------------------------


def conv(**given: Any) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(5, 12, (3, 2), **{"dtype": F64, **given})


GEOMETRIES: list[dict[str, Any]] = [
    {},
    {"stride": 2, "padding": (1, 2)},
    {"dilation": (2, 1), "padding": "same"},
    {"bias": False, "padding": "valid"},
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_convolution(geometry: dict[str, Any]) -> None:
    dense, x = conv(**geometry), torch.randn(2, 5, 9, 8, dtype=F64, requires_grad=True)
    layer = factorize_conv(dense, 6)
    assert layer.report.weight_error == pytest.approx(tail(dense.weight.flatten(1), 6))
    stride, padding, dilation = dense.stride, dense.padding, dense.dilation
    y = F.conv2d(x, layer.dense_weight(), layer.bias, stride, padding, dilation)
    torch.testing.assert_close(layer(x), y, atol=1e-10, rtol=0)
    parameters = [x, *layer.parameters()]
    weights = torch.randn_like(y)
    ours = torch.autograd.grad((layer(x) * weights).sum(), parameters)
    for a, b in zip(ours, torch.autograd.grad((y * weights).sum(), parameters), strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_convolution_by_its_patches(geometry: dict[str, Any]) -> None:
    dense, x = conv(**geometry), torch.randn(2, 5, 9, 8, dtype=F64)
    covariance = input_covariance(nn.Sequential(dense), [x])["0"]
    layer = factorize_conv(dense, 6, method="activation", covariance=covariance)
    with torch.no_grad():
        plain = dense(x) if dense.bias is None else dense(x) - dense.bias[:, None, None]
        error = (layer(x) - dense(x)).norm() / plain.norm()
    assert float(error) == pytest.approx(layer.report.output_error)


def test_convolutions_start_as_large_as_dense_ones() -> None:
    torch.manual_seed(0)
    x, dense = torch.randn(4, 16, 20, 20), nn.Conv2d(16, 64, 3)
    with torch.no_grad():
        assert float(SKConv2d(16, 64, 3, rank=20)(x).std()) == pytest.approx(float(dense(x).std()), rel=0.05)


def test_convolutions_that_are_refused() -> None:
    with pytest.raises(KernelError, match=r"are not supported\. Got \(2, 'zeros'\)"):
        SKConv2d(4, 8, 3, groups=2, rank=2)
    with pytest.raises(KernelError, match=r"Got \(1, 'circular'\)"):
        factorize_conv(conv(padding=1, padding_mode="circular"), 3)
    with pytest.raises(CostlyError, match="rank 8 for 30 -> 12"):
        factorize_conv(conv(), 9)


# -- whole models --------------------------------------------------------------------------------


class Model(nn.Module):
    """Every reason to keep a layer, and two to convert."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.first, self.again = nn.Linear(32, 64), nn.Linear(64, 32)
        self.thrice = self.again
        self.idle = nn.Linear(32, 32)
        self.narrow = nn.Linear(32, 3)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.thrice(torch.relu(self.first(self.again(torch.relu(self.first(x))))))
        logits: Tensor = self.head(x) + self.narrow(x).sum(-1, keepdim=True)
        return logits


def model() -> Model:
    torch.manual_seed(0)
    return Model()


WORDS = torch.randint(0, 50, (3, 8, 6), generator=torch.Generator().manual_seed(2))


def test_sketch_model_says_why() -> None:
    net = model()
    report = sketch_model(net, 8, batches=list(WORDS))
    assert sorted(report.converted) == ["again", "first"]
    kept = {row.name: row.kept for row in report.layers if row.report is None}
    assert {name: text.split()[-1] for name, text in kept.items()} == {
        "attention.out_proj": "own", "idle": "ran", "narrow": "(2)", "head": "layer's",
    }  # fmt: skip
    assert isinstance(net.first, SKLinear)
    assert net.thrice is net.again
    assert isinstance(net.again, SKLinear)
    before, after = (sum(p.numel() for p in m.parameters()) for m in (model(), net))
    assert (report.parameters_before, report.parameters_after) == (before, after)
    assert before - after == 2 * (32 * 64 - 8 * 96)
    text = str(report)
    assert "2 of 6 layers converted" in text
    assert "2,048 -> 768" in text
    assert "kept: rank 8 is above break-even (2)" in text
    net(WORDS[0]).sum().backward()


@pytest.mark.parametrize("method", ["svd", "rsvd", "activation"])
def test_sketch_model_by_energy(method: str) -> None:
    net = model()
    for name in ("first", "again"):
        layer = getattr(net, name)
        u, s, vt = torch.linalg.svd(layer.weight.detach(), full_matrices=False)
        layer.weight.data = u * (s * 0.7 ** torch.arange(32)) @ vt
    dense = copy.deepcopy(net).eval()
    report = sketch_model(net, energy=0.99, modules=["first", "aga*"], method=method, batches=list(WORDS))
    assert sorted(report.converted) == ["again", "first"]
    assert {row.kept for row in report.layers if row.name in ("narrow", "head")} == {"not selected"}
    for layer in report.converted.values():
        error = layer.output_error if method == "activation" else layer.weight_error
        assert error <= 0.1 + 1e-6
    with torch.no_grad():
        assert (net.eval()(WORDS[0]) - dense(WORDS[0])).norm() < 0.1 * dense(WORDS[0]).norm()


def test_energy_that_does_not_pay_is_kept() -> None:
    report = sketch_model(model(), energy=0.999, modules=["first"])
    assert not report.converted
    assert "kept: energy 0.999 takes a rank above break-even (21)" in str(report)


def test_encoder_layers_still_infer() -> None:
    """Their fast path reads weights that are no more; it is left."""
    torch.manual_seed(0)
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0), 2)
    x, mask = torch.randn(3, 5, 64), torch.zeros(3, 5, dtype=torch.bool)
    mask[0, 3:] = True
    assert len(sketch_model(net, 16).converted) == 4
    trained = net(x, src_key_padding_mask=mask)
    with torch.no_grad():
        torch.testing.assert_close(net.eval()(x, src_key_padding_mask=mask), trained)


def test_convolutions_in_a_model() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 3, groups=2), nn.Flatten(), nn.Linear(64, 64))
    report = sketch_model(net, 6, batches=[torch.randn(2, 8, 6, 6)])
    assert [row.kind for row in report.layers] == ["Conv2d", "Conv2d", "Linear"]
    assert sorted(report.converted) == ["0", "3"]
    assert report.layers[1].kept.startswith("grouped")
    assert net(torch.randn(2, 8, 6, 6)).shape == (2, 64)


def test_calibration_leaves_the_model_as_it_was() -> None:
    net = model().train()
    net.first.eval()
    moments = input_covariance(net, [(words, None) for words in WORDS], ["first"])
    assert net.training
    assert not net.first.training
    assert not net.first._forward_pre_hooks
    seen: list[Tensor] = []
    hook = net.first.register_forward_pre_hook(lambda _, args: seen.append(args[0].reshape(-1, 32).double()))
    with torch.no_grad():
        for words in WORDS:
            net(words)
    hook.remove()
    x = torch.cat(seen)
    torch.testing.assert_close(moments["first"], x.T @ x / len(x))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rank": 4, "modules": ["frist"]}, "no nn.Linear or nn.Conv2d has this name. Got 'frist'.*first"),
        ({"rank": 4, "method": "activation"}, "'activation' needs them"),
        ({"rank": 4, "batches": []}, "batches: empty"),
        ({}, "need exactly one of them"),
        ({"energy": 0.0}, "not a share"),
    ],
)
def test_bad_input_to_a_model(given: dict[str, Any], words: str) -> None:
    net = model()
    with pytest.raises(KernelError, match=words):
        sketch_model(net, **given)
    assert isinstance(net.first, nn.Linear)


def test_a_model_that_is_one_layer() -> None:
    with pytest.raises(KernelError, match="cannot be replaced in place"):
        sketch_model(nn.Linear(8, 8), 2)
