"""Sparse gradients for a loop of one's own, beside plain PyTorch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from distributed import GradientCompression, HorovodTrainer, UserError, compress_gradient, random_sparse
from distributed.testing.thread_wire import ThreadWire, run_ranks


def test_the_largest_elements_keep_their_signs() -> None:
    gradient = torch.tensor([[0.5, -3.0, 1.0], [2.0, -0.1, 0.0]])
    values, indices = compress_gradient(gradient, k=0.5)
    assert values.tolist() == [-3.0, 1.0, 2.0]
    assert indices.tolist() == [1, 2, 3]
    assert [len(part) for part in compress_gradient(gradient, k=0.01)] == [1, 1]


def test_what_is_left_out_comes_later() -> None:
    compression, sent = GradientCompression(compression_ratio=0.25), torch.zeros(3, 4)
    given = [torch.randn(3, 4, generator=torch.Generator().manual_seed(step)) for step in range(5)]
    residual = torch.zeros(3, 4)
    for gradient in given:
        compressed = compression.compress_gradients([None, gradient])
        none, dense = compression.decompress_gradients(compressed)
        values = gradient + residual
        kept = values.abs() >= values.abs().flatten().topk(3).values.min()
        assert none is None
        assert torch.equal(dense, torch.where(kept, values, 0.0))
        residual = values - dense
        sent += dense
    torch.testing.assert_close(sent + residual, torch.stack(given).sum(0))
    once = GradientCompression(0.25, error_feedback=False)
    for _ in range(2):
        (found,) = once.compress_gradients([given[0]])
        assert torch.equal(found.values, compress_gradient(given[0], 0.25)[0])


def test_ranks_gather_what_they_add_up() -> None:
    """As the docstring states: the sum over the ranks is that of their dense forms."""

    def work(wire: ThreadWire) -> tuple[torch.Tensor, torch.Tensor]:
        gradient = torch.randn(40, generator=torch.Generator().manual_seed(wire.rank))
        compression = GradientCompression(0.1)
        (sparse,) = compression.compress_gradients([gradient])
        values = [part.clone().view(torch.float32) for part in wire.gather(sparse.values.view(torch.uint8))()]
        indices = [part.clone().view(torch.int64) for part in wire.gather(sparse.indices.view(torch.uint8))()]
        received = [sparse._replace(values=v, indices=i) for v, i in zip(values, indices, strict=True)]
        dense = compression.decompress_gradients(received)
        (own,) = compression.decompress_gradients([sparse])
        return torch.stack(dense).sum(0), own

    ranks = run_ranks(3, work)
    assert all(torch.equal(total, torch.stack([own for _, own in ranks]).sum(0)) for total, _ in ranks)


def test_random_elements_have_the_gradient_as_expectation() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(50, dtype=torch.float64)
    drawn = torch.stack([random_sparse(gradient, p=0.2) for _ in range(4000)])
    assert all(torch.equal(row, torch.where(row != 0, gradient / 0.2, 0.0)) for row in drawn[:20])
    # Variance of the mean: g^2 (1 / p - 1) / 4000.
    assert ((drawn.mean(0) - gradient).abs() < 5 * gradient.abs() * (4 / 4000) ** 0.5).all()


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_lies_between_0_and_1(share: float) -> None:
    one = partial(compress_gradient, torch.ones(2)), partial(random_sparse, torch.ones(2))
    for call in (GradientCompression, *one):
        with pytest.raises(UserError, match="above 0 and at most 1"):
            call(share)


def test_another_order_of_gradients_is_refused() -> None:
    compression = GradientCompression()
    compression.compress_gradients([torch.ones(2), torch.ones(3)])
    with pytest.raises(UserError, match=r"position 0 has another shape than before\. Got \(3,\)"):
        compression.compress_gradients([torch.ones(3), torch.ones(2)])


@pytest.mark.parametrize("name", ["fp16", "none"])
def test_horovods_classes_are_fields(name: str) -> None:
    """`hvd.Compression.fp16` is a class with `FP16Compressor` as its name."""
    hvd: Any = pytest.importorskip("horovod.torch")
    config: Any = HorovodTrainer(torch.nn.Linear(2, 2), compression=getattr(hvd.Compression, name)).config
    assert config.horovod.compression == name
