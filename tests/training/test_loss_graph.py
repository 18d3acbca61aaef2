"""Losses that are computed by hand: weighted by their divisor, or refused, on any number of micro-batches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from distributed import UserError
from distributed.testing.conformance import distance
from distributed.testing.rank_pool import RankPool
from distributed.training.loss_graph import average_of, has_constant_divisor, is_sum, other_divisor
from tests.support.training import make_trainer

SAMPLES, BATCH = 14, 4
"""Samples, of which the last global batch has two; samples of a global batch."""

Loss = Callable[[nn.Module, Any], Tensor]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 3).double()


def sequences() -> tuple[Tensor, Tensor]:
    """Five positions per sample, of which one to five have a target."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 5, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (SAMPLES, 5), generator=generator)
    kept = torch.arange(5) <= torch.arange(SAMPLES)[:, None] % 5
    return x, torch.where(kept, y, -1)


def per_token(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x).transpose(1, 2), y.clamp(min=0), reduction="none")


def masked_mean(model: nn.Module, batch: Any) -> Tensor:
    kept = batch[1] >= 0
    return (per_token(model, batch) * kept).sum() / kept.sum()


def masked_by_hand(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    kept, scores = (y >= 0).double(), model(x)
    chosen = scores.gather(-1, y.clamp(min=0)[..., None]).squeeze(-1)
    return ((scores.logsumexp(-1) - chosen) * kept).sum().div(kept.sum()).float().double()


def sum_over_count(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x).transpose(1, 2), y, ignore_index=-1, reduction="sum") / (y >= 0).sum()


def selected(model: nn.Module, batch: Any) -> Tensor:
    return per_token(model, batch)[batch[1] >= 0].mean()


def two_sums(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    kept = y >= 0
    penalty = (model(x).square().sum(-1) * kept).sum()
    return ((per_token(model, batch) * kept).sum() + 0.1 * penalty) / kept.sum()


def plain(loss: Loss, data: tuple[Tensor, Tensor]) -> nn.Module:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for start in range(0, SAMPLES, BATCH):
        optimizer.zero_grad()
        loss(model, [tensor[start : start + BATCH] for tensor in data]).backward()
        optimizer.step()
    return model


def fit(pool: RankPool, backend: str, ranks: int, data: Any, **given: Any) -> nn.Module:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"global_batch_size": BATCH, "data": {"shuffle": False}, **given}
    trainer = make_trainer(
        model,
        ranks,
        pool if ranks > 1 else None,
        backend=backend,
        optimizer=optimizer,
        batch_size=2,
        **options,
    )
    trainer.fit(data)
    return model


@pytest.mark.parametrize("loss", [masked_mean, masked_by_hand, sum_over_count, selected, two_sums])
def test_a_mean_over_tokens_is_weighted_by_them(loss: Loss, rank_pool: RankPool) -> None:
    limit = 1e-6 if loss is masked_by_hand else 1e-12  # it is rounded to float32
    reference = plain(loss, sequences())
    for backend, ranks in (("serial", 1), ("pytorch-ddp", 2), ("fsdp", 2)):
        trained = fit(rank_pool, backend, ranks, sequences(), training_step=loss)
        assert distance(trained, reference) < limit, backend


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: F.mse_loss(o, t, reduction="sum"),
        lambda o, t: F.mse_loss(o, t, reduction="none").sum(),
        lambda o, t: F.binary_cross_entropy_with_logits(o, t.sigmoid(), reduction="sum").view(()),
        lambda o, t: ((o - t) ** 2).sum(),
        lambda o, t: ((o - t) ** 2).sum() / 2,
        lambda o, t: 0.5 * torch.linalg.vector_norm(o - t, dim=1).pow(2).sum(),
        lambda o, t: F.mse_loss(o, t) + 0.1 * o.abs().sum(dim=(0, 1)),
        lambda o, t: -(o.log_softmax(1) * t.softmax(1)).sum(1).sum(),
        lambda o, t: F.mse_loss(o, t, reduction="sum") - 0.5 * torch.sum(1 + o - o.pow(2) - o.exp()),
    ],
)
def test_a_sum_is_refused(loss: Any) -> None:
    x, y = torch.randn(8, 6).double(), torch.randn(8, 3).double()
    with pytest.raises(UserError, match="mean") as caught:
        make_trainer(small(), loss_fn=loss, batch_size=4).fit((x, y))
    assert (caught.value.field, caught.value.got) == (
        "loss_fn",
        "a sum over the 4 samples of a micro-batch",
    )


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.SmoothL1Loss(), F.mse_loss, lambda o, t: F.l1_loss(o, t)])
def test_a_loss_over_all_pairs_of_samples_is_refused(loss: Any) -> None:
    """torch broadcasts (N, 1) and (N,) to (N, N), so that the loss depends on the size of a micro-batch."""
    model = nn.Linear(6, 1).double()
    before = model.weight.clone()
    with pytest.raises(UserError, match="all others") as caught:
        make_trainer(model, loss_fn=loss, batch_size=2).fit(
            (torch.randn(8, 6).double(), torch.randn(8).double())
        )
    assert caught.value.field == "loss_fn"
    assert "squeeze" in str(caught.value.remedy)
    assert torch.equal(model.weight, before)


def drop_odd(samples: list[Any]) -> Any:
    """A collate function that leaves samples out."""
    return default_collate([sample for sample in samples if sample[0][0] > -1] or samples[:1])


def test_a_collate_function_may_drop_samples(rank_pool: RankPool) -> None:
    """A function is weighted by the rows that are left; a loss module has a fixed weight, and refuses."""
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(16, n, generator=generator, dtype=torch.float64) for n in (6, 3))
    loader = DataLoader(TensorDataset(x, y), 2, collate_fn=drop_odd)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for start in range(0, 16, 4):
        rows = torch.cat(
            [drop_odd([(x[i], y[i], i) for i in range(a, a + 2)])[2] for a in (start, start + 2)]
        )
        optimizer.zero_grad()
        F.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
    for backend, ranks in (("serial", 1), ("pytorch-ddp", 2)):
        assert distance(fit(rank_pool, backend, ranks, loader, loss_fn=F.mse_loss), model) < 1e-12
        with pytest.raises(UserError, match="dropped") as caught:
            fit(rank_pool, backend, ranks, loader, loss_fn=nn.MSELoss())
        assert caught.value.field == "loss_fn"
        assert "F.mse_loss" in str(caught.value.remedy)


def test_what_a_loss_is_a_mean_of() -> None:
    x, mask = torch.randn(4, 3, requires_grad=True), torch.tensor([[1.0, 1, 0]] * 4)
    assert average_of((x * mask).sum() / mask.sum()) == ("a divisor", torch.tensor(8.0))
    assert average_of(x[mask > 0].mean()) == ("elements", 8)
    # Means over features or over losses, and a divisor that is learned, are no means over samples.
    for loss in (
        x.mean(),
        x.mean(0).mean(),
        torch.stack([x.mean(), x.sum()]).sum() / 2,
        x.sum() / x.exp().sum(),
    ):
        assert average_of(loss) is None
    assert is_sum(F.mse_loss(x, mask, reduction="none").sum(), 4)
    assert not is_sum(F.mse_loss(x, mask), 4)
    assert other_divisor(x.sum() / 12 + 1.0, 4) is None
    assert other_divisor(2 * ((x * mask).sum() / 7) + x.mean(), 4) == 7.0


def test_sums_over_other_things_than_samples() -> None:
    """Penalties on weights, sums of means, and means by weights that add up to 1."""
    layer, other = nn.Linear(6, 4), torch.ones(4)
    output = layer(torch.randn(4, 6))
    weights = torch.tensor([0.4, 0.1, 0.2, 0.3])
    for loss in (
        output.mean() + 0.1 * layer.weight.pow(2).sum() + layer.bias.abs().sum(),
        output.pow(2).mean(0).sum(),
        (output.pow(2).sum(0) / 4).sum(),
        torch.stack([output[:, i].mean() for i in range(4)]).sum(),
        (output.pow(2).mean(1) * weights).sum(),
        (output.pow(2).mean(1) / 4).sum(),
        output[0].sum() / 4,
    ):
        assert not is_sum(loss, 4)
    assert is_sum((output.pow(2).mean(1) * other).sum(), 4)
    assert has_constant_divisor(output.sum() / 2, 4)
    assert not has_constant_divisor(output.sum() / 4, 4)
    assert not has_constant_divisor(output[:2].sum() / 2, 2)


def test_a_divided_sum_in_a_loss_gets_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    x, y = sequences()
    step = lambda model, batch: masked_mean(model, batch) + model.weight.square().mean()  # noqa: E731
    with caplog.at_level(logging.WARNING):
        fit(None, "serial", 1, (x, y), training_step=step)  # type: ignore[arg-type]
    assert [record for record in caplog.records if "weighted by its 2 samples" in record.getMessage()]
