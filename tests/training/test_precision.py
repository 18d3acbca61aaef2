"""bf16 and fp16: autocast, and the scaler against a plain loop with torch's own (C6)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from distributed.testing.conformance import distance, problem, small_model
from distributed.testing.oracle import oracle_fit, sample_order
from distributed.testing.rank_pool import RankPool
from tests.support.training import SameWeights, make_trainer

HUGE = 2.0**30
trainer_of = partial(
    make_trainer, mixed_precision="fp16", optimizer=SGD, learning_rate=0.3, global_batch_size=8
)


def data(length: int = 24) -> tuple[Tensor, Tensor]:
    return problem(length, torch.float32)


def model32() -> nn.Module:
    return small_model(torch.float32)


def plain_fp16(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    steps: int,
    scale: float,
    growth: int = 2000,
    warmup: int = 1,
    max_norm: float | None = None,
) -> tuple[int, list[float], list[float]]:
    """(skipped steps, learning rates, norms) of the loop in torch's own documentation."""
    optimizer = SGD(model.parameters(), lr=0.3)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth)
    skipped, rates, norms = 0, [], []
    for step in range(steps):
        epoch, start = divmod(step * 8, len(x))
        batch = sample_order(len(x), 0, epoch)[start : start + 8]
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x[batch]), y[batch])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        limit = float("inf") if max_norm is None else max_norm
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        rates.append(optimizer.param_groups[0]["lr"])
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            skipped += 1
        else:
            schedule.step()
        optimizer.zero_grad()
    return skipped, rates, norms


# -- fp16 ------------------------------------------------------------------------------------


def test_fp16_on_one_rank_is_the_plain_loop(rank_pool: RankPool) -> None:
    x, y = data()
    model, reference = model32(), model32()
    trainer = trainer_of(model, 1, rank_pool, scaler_init_scale=HUGE, scaler_growth_interval=2,
                         warmup_steps=4, gradient_clipping=0.1)  # fmt: skip
    history = trainer.fit((x, y), max_steps=24)
    skipped, rates, norms = plain_fp16(
        reference, x, y, steps=24, scale=HUGE, growth=2, warmup=4, max_norm=0.1
    )
    assert 3 < skipped < 20
    assert history.num_skipped_steps == skipped
    assert history.steps["learning_rate"] == rates
    assert [log["grad_norm"] for log in history.logs] == pytest.approx(norms, nan_ok=True)
    assert distance(model, reference) < 1e-6


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_skipped_step_changes_nothing_but_the_scale(ranks: int, rank_pool: RankPool) -> None:
    model = model32()
    trainer = trainer_of(model, ranks, rank_pool, scaler_init_scale=2.0**60, warmup_steps=5)
    trainer.callbacks = [SameWeights()]
    history = trainer.fit(data(), max_steps=3)
    assert history.num_skipped_steps == 3
    assert history.steps["step"] == [1, 2, 3]
    assert history.steps["learning_rate"] == [0.3 / 5] * 3
    assert distance(model, model32()) == 0.0


def test_two_ranks_skip_and_step_alike(rank_pool: RankPool) -> None:
    x, y = data()
    model, reference = model32(), model32()
    trainer = trainer_of(model, 2, rank_pool, scaler_init_scale=HUGE)
    trainer.callbacks = [SameWeights()]
    history = trainer.fit((x, y), max_steps=20)
    skipped, _, norms = plain_fp16(reference, x, y, steps=20, scale=HUGE)
    # Halves of the batch make halved gradients, which may overflow a step sooner or later.
    assert abs(history.num_skipped_steps - skipped) <= 2
    assert history.num_skipped_steps > 3
    found = [log["grad_norm"] for log in history.logs]
    assert found[-1] == pytest.approx(norms[-1], rel=0.1)
    assert history.steps["loss"][-1] < history.steps["loss"][0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_scale_survives_into_the_next_fit(ranks: int, rank_pool: RankPool) -> None:
    whole = trainer_of(model32(), ranks, rank_pool, scaler_init_scale=HUGE).fit(data(), max_steps=16)
    trainer = trainer_of(model32(), ranks, rank_pool, scaler_init_scale=HUGE)
    parts = [trainer.fit(data(), max_steps=steps) for steps in (3, 13)]
    assert [part.num_skipped_steps for part in parts] == [3, whole.num_skipped_steps - 3]
    assert parts[0].steps["loss"] + parts[1].steps["loss"] == pytest.approx(whole.steps["loss"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_masked_targets_weigh_as_in_full_precision(ranks: int, rank_pool: RankPool) -> None:
    x, y = data(26)
    hidden = torch.rand(26, generator=torch.Generator().manual_seed(3)) < 0.6
    y = torch.where(hidden, -100, y)
    model, reference = model32(), model32()
    history = trainer_of(model, ranks, rank_pool, scaler_init_scale=1024.0, gradient_accumulation_steps=2,
                         batch_size=4 // ranks, gradient_clipping=0.2).fit((x, y), max_steps=12)  # fmt: skip
    seen = oracle_fit(reference, SGD(reference.parameters(), lr=0.3), x, y, global_batch_size=8, steps=12,
                      max_norm=0.2, loss_fn=lambda o, t: F.cross_entropy(o, t).nan_to_num(0.0))  # fmt: skip
    assert history.num_skipped_steps == 0
    assert history.steps["loss"] == pytest.approx(seen.losses, rel=5e-3)
    assert [log["grad_norm"] for log in history.logs] == pytest.approx(seen.norms, rel=2e-2)
    assert distance(model, reference) < 5e-3 < distance(model, model32())


# -- bf16 ------------------------------------------------------------------------------------


def bf16_step(model: nn.Module, batch: Any) -> Tensor:
    output = model(batch[0])
    assert output.dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return F.cross_entropy(output, batch[1])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("asked", [True, "bf16"])
def test_bf16_is_what_true_means_on_cpu(
    ranks: int, asked: bool | str, rank_pool: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = data()
    model, reference = model32(), model32()
    history = trainer_of(model, ranks, rank_pool, mixed_precision=asked, training_step=bf16_step).fit(
        (x, y), (x, y), max_steps=9)  # fmt: skip
    seen = oracle_fit(reference, SGD(reference.parameters(), lr=0.3), x, y, global_batch_size=8, steps=9)
    assert history.steps["loss"] == pytest.approx(seen.losses, rel=2e-2)
    assert history.steps["loss"] != pytest.approx(seen.losses, rel=1e-6)
    assert history.num_skipped_steps == 0
    said = capsys.readouterr().out
    assert ", bf16;" in said
    assert ("mixed_precision=True means bf16 on CPU" in said) == (asked is True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_may_be_bf16_themselves(ranks: int, rank_pool: RankPool) -> None:
    x, y = data(13)
    model, reference = small_model(torch.bfloat16), model32()
    history = trainer_of(model, ranks, rank_pool, mixed_precision=False, learning_rate=0.1).fit(
        (x.bfloat16(), y), max_steps=6)  # fmt: skip
    seen = oracle_fit(reference, SGD(reference.parameters(), lr=0.1), x, y, global_batch_size=8, steps=6)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert history.steps["loss"] == pytest.approx(seen.losses, rel=3e-2)


def test_fp32_computes_in_full(rank_pool: RankPool) -> None:
    x, y = data()
    model, reference = model32(), model32()
    trainer_of(model, 1, rank_pool, mixed_precision="fp32", optimizer=partial(SGD)).fit((x, y), max_steps=9)
    oracle_fit(reference, SGD(reference.parameters(), lr=0.3), x, y, global_batch_size=8, steps=9)
    assert distance(model, reference) < 1e-6
