"""Arguments of FSDP1, and parameters that are gathered in bf16."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision

from distributed import FSDPTrainer, UserError
from distributed.testing.conformance import distance
from distributed.testing.oracle import sample_order
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer

RATE, STEPS, BATCH = 0.5, 4, 12
BF16 = {"mixed_precision": "bf16", "fsdp": {"param_dtype": "bf16"}}


class Normed(nn.Module):
    """A layer norm, whose weights autocast would use in float32, between two products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.enter, self.norm, self.leave = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        with torch.no_grad():
            self.norm.weight += 0.1 * torch.randn(16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.leave(F.gelu(self.norm(self.enter(x))))
        return result


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(24, 6, generator=generator)
    return x, x[:, :4].argmax(dim=1)


def oracle(ranks: int) -> nn.Module:
    """SGD on float32 parameters, with the mean of gradients that each rank computes from rounded ones."""
    model, (x, y), seen = Normed(), data(), 0
    orders = [sample_order(24, 0, epoch) for epoch in range(2 * STEPS)]
    for order in torch.cat(orders).split(BATCH)[:STEPS]:
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for mine in order.chunk(ranks):
            rounded = copy.deepcopy(model).bfloat16()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(rounded(x[mine]), y[mine])
            loss.backward()
            for total, p in zip(sums, rounded.parameters(), strict=True):
                assert p.grad is not None
                total += p.grad.float() / ranks
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), sums, strict=True):
                p -= RATE * gradient
        seen += 1
    assert seen == STEPS
    return model


def trained(pool: RankPool, ranks: int, **given: Any) -> nn.Module:
    model = Normed()
    settings: dict[str, Any] = {
        "optimizer": "sgd",
        "learning_rate": RATE,
        "global_batch_size": BATCH,
        **given,
    }
    make_trainer(model, ranks, pool, kind=FSDPTrainer, **settings).fit(data(), max_steps=STEPS)
    return model


def test_parameters_are_gathered_in_bf16(rank_pool: RankPool) -> None:
    expected = oracle(2)
    assert distance(trained(rank_pool, 2, **BF16), expected) < 1e-6
    # Autocast alone leaves the weights of the norm in float32.
    assert distance(trained(rank_pool, 2, mixed_precision="bf16"), expected) > 1e-5


def notes(**given: Any) -> list[str]:
    trainer: Any = FSDPTrainer(nn.Linear(6, 4), **given)
    return list(trainer._plan(trainer._configure({}), *_catalog_and_task(trainer)).notes)


def _catalog_and_task(trainer: Any) -> tuple[Any, Any]:
    from distributed.registry.catalog import get_catalog

    return get_catalog(), trainer._bare_task()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"fsdp": {"param_dtype": "bf16"}}, "Set mixed_precision=bf16, or leave fsdp.param_dtype out"),
        ({"mixed_precision": "bf16", "fsdp": {"param_dtype": "fp16"}}, "are used in, bf16. Got 'fp16'"),
        ({**BF16, "parallel": {"tensor": 2}}, "a divided model (parallel.tensor)"),
    ],
)
def test_a_dtype_that_is_not_that_of_the_run_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as caught:
        notes(device="cpu", num_processes=2, **given)
    assert caught.value.field == "fsdp.param_dtype"
    assert text in str(caught.value)


def test_a_run_that_is_not_equal_to_others_has_a_note() -> None:
    assert any(
        "not equal to one of another backend" in note for note in notes(num_processes=2, device="cpu", **BF16)
    )
    assert any(
        "changes nothing on a single rank" in note for note in notes(num_processes=1, device="cpu", **BF16)
    )


def test_mixed_precision_of_fsdp1_is_fields_of_ours() -> None:
    policy = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    given = {"device_id": torch.device("cuda", 0), "use_orig_params": True}
    config: Any = FSDPTrainer(nn.Linear(6, 4), mixed_precision=policy, **given).config
    assert (config.mixed_precision, config.fsdp.reduce_dtype, config.fsdp.param_dtype) == (
        "bf16",
        "fp32",
        None,
    )
    found = notes(device="cpu", num_processes=1, mixed_precision=policy, **given)
    assert any("buffer_dtype is left out" in note for note in found)
    assert any("device_id is left out" in note for note in found)
    assert FSDPTrainer(nn.Linear(6, 4), device_id=torch.device("cpu")).config.device == "cpu"
    assert FSDPTrainer(nn.Linear(6, 4), mixed_precision=MixedPrecision()).config.mixed_precision is False
    assert FSDPTrainer(nn.Linear(6, 4), mixed_precision=True).config.mixed_precision is True


def test_what_fsdp2_does_not_do_is_refused() -> None:
    with pytest.raises(UserError, match=r"use_orig_params: .*no flat ones.*Got False\. Allowed: True"):
        FSDPTrainer(nn.Linear(6, 4), use_orig_params=False)
    with pytest.raises(UserError, match=r"mixed_precision\.reduce_dtype: .*Got torch\.float64"):
        FSDPTrainer(nn.Linear(6, 4), mixed_precision=MixedPrecision(reduce_dtype=torch.float64))
