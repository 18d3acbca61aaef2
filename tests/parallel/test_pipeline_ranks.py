"""What the ranks of a pipeline hold apart, and what they have to keep equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed import Callback, UserError
from distributed.interfaces.callback import Context
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.support.training import make_trainer

WIDTH = 8
X = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DATA = X, (X.sum(1) > 0).long()


def normed() -> nn.Module:
    """Two layers of BatchNorm, one for each of two stages, of equal size."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()),
        *(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)),
    ).double()


@pytest.mark.parametrize("second", ["3", "5"], ids=["one layer in each stage", "both in the first"])
def test_statistics_are_those_of_the_stage(second: str, rank_pool: RankPool) -> None:
    """Validation shares buffers among ranks with the same stages, and no others."""
    parallel = {"pipeline": 2, "num_microbatches": 1, "stages": ("0", second)}
    fields = {"backend": "pytorch-ddp", "batch_size": 4, "gradient_accumulation_steps": 2}
    found = []
    for ranks, given in ((1, {}), (2, {"parallel": parallel})):
        model = normed()
        history = make_trainer(model, ranks, rank_pool, **fields, **given).fit(DATA, DATA, max_steps=3)
        found.append((list(model.buffers()), history.epochs[-1]["val_loss"]))
    (expected, loss), (own, own_loss) = found
    assert own_loss == pytest.approx(loss, abs=EXACT)
    assert max(float((a - b).abs().max()) for a, b in zip(expected, own, strict=True)) < EXACT


class SameNumbers(Callback):
    """Fail where the random numbers that data may draw differ between the ranks."""

    all_ranks = True

    def on_step_end(self, context: Context) -> None:
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, torch.get_rng_state())
        assert all(torch.equal(states[0], state) for state in states)


class Noise(nn.Module):
    """Draws, in training, without a rate that would show it."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.calls, self.first = 0, first

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x + 1e-3 * torch.rand_like(x) if self.training and self.calls > self.first else x


def chain(layer: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
    ).double()


def trainer_of(layer: nn.Module, rank_pool: RankPool) -> Any:
    parallel = {"pipeline": 2, "stages": ("0", "2")}
    return make_trainer(chain(layer), 2, rank_pool, backend="pytorch-ddp", batch_size=4, parallel=parallel)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), Noise()], ids=["dropout", "a layer that draws"])
def test_a_stage_draws_for_its_own_layers_alone(layer: nn.Module, rank_pool: RankPool) -> None:
    trainer = trainer_of(layer, rank_pool)
    trainer.callbacks = [SameNumbers()]
    assert trainer.fit(DATA, max_steps=3).steps["step"] == [1, 2, 3]


def test_a_model_that_begins_to_draw_is_refused(rank_pool: RankPool) -> None:
    with pytest.raises(UserError, match="draws random numbers in this step and drew none in the first"):
        trainer_of(Noise(first=2), rank_pool).fit(DATA, max_steps=3)


def pop(samples: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Changes the samples it gets."""
    targets = torch.stack([sample.pop("y") for sample in samples])
    return torch.stack([sample["x"] for sample in samples]), targets


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return len(DATA[0])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": DATA[0][index], "y": DATA[1][index]}


def test_a_collate_function_may_change_its_samples(rank_pool: RankPool) -> None:
    trainer = trainer_of(nn.Tanh(), rank_pool)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4, collate_fn=pop)
    assert trainer.fit(loader, max_steps=2).steps["step"] == [1, 2]
