"""The fused kernel in Triton's interpreter against two matrix products; without Triton only its refusal."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from distributed_kernels import KernelError, SKLinear, fused_linear, use_fused_linear
from distributed_kernels.sketching import fused

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("these run on the CPU, and what is imported once compiles for the GPU")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "into", "out", "rank"), [(5, 40, 30, 7), (70, 64, 130, 16), (33, 100, 65, 100), (1, 16, 16, 1)]
)
@pytest.mark.parametrize("bias", [True, False])
def test_two_products(rows: int, into: int, out: int, rank: int, bias: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, a, b, c = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((rows, into), (rank, into), (out, rank), (out,))
    )
    wide = [t.double() for t in (x, a, b, c)]
    h = F.linear(wide[0], wide[1]).to(dtype).double()  # what lies between the products is rounded
    expected = F.linear(h, wide[2], wide[3] if bias else None)
    found = fused_linear(x, a, b, c if bias else None)
    assert found.dtype is dtype
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < (5e-6 if dtype is torch.float32 else 2e-3)


@needs_triton
def test_the_layer_uses_it_when_asked_and_no_gradient_is(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = fused.fused_linear
    monkeypatch.setattr(
        "distributed_kernels.sketching.linear.fused_linear", lambda *a: calls.append(1) or real(*a)
    )
    torch.manual_seed(0)
    layer, x = SKLinear(40, 30, 5), torch.randn(2, 3, 40)
    with torch.no_grad():
        plain = layer(x)
        assert not calls
        with use_fused_linear():
            torch.testing.assert_close(layer(x), plain, atol=5e-6, rtol=0)
        assert len(calls) == 1
        monkeypatch.setenv("DISTRIBUTED_KERNELS_FUSED_LINEAR", "1")
        layer(x)
        assert len(calls) == 2
        with use_fused_linear(False):
            layer(x)
    with use_fused_linear():
        layer(x).sum().backward()
        with torch.no_grad():
            with torch.autocast("cpu", torch.bfloat16):
                assert layer(x).dtype is torch.bfloat16
            layer.double()(x.double())
    assert len(calls) == 2


@needs_triton
def test_what_it_cannot_do() -> None:
    with pytest.raises(KernelError, match=r"rank or dtype\. Got \(129, torch.float32\)"):
        fused_linear(torch.zeros(2, 400), torch.zeros(129, 400), torch.zeros(300, 129))


def test_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(KernelError, match=r"without Triton and a GPU\. Got 'cpu'"):
        fused_linear(torch.zeros(2, 4), torch.zeros(1, 4), torch.zeros(3, 1))
    with use_fused_linear(), torch.no_grad():
        assert SKLinear(40, 30, 5)(torch.zeros(2, 40)).shape == (2, 30)
