"""EarlyStopping stops all ranks after the same epoch."""

from __future__ import annotations

import pytest
import torch

from distributed import EarlyStopping, Trainer, UserError
from distributed.testing.conformance import problem, small_model
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer


def test_stops_after_patience_on_two_ranks(rank_pool: RankPool) -> None:
    # A rate of almost nothing leaves the validation loss where it is.
    fields = {"batch_size": 4, "learning_rate": 1e-300, "optimizer": torch.optim.SGD}
    trainer = make_trainer(small_model(), 2, rank_pool, **fields, callbacks=[EarlyStopping(patience=2)])
    history = trainer.fit(problem(16), problem(8), epochs=10)
    assert len(history.epochs) == 3
    assert history.stop_reason is not None
    assert "val_loss has not improved for 2 epochs" in history.stop_reason


def test_goes_on_while_it_improves() -> None:
    stopping = EarlyStopping("train_loss", patience=1)
    trainer = make_trainer(
        small_model(), backend="serial", batch_size=4, learning_rate=0.01, callbacks=[stopping]
    )
    history = trainer.fit(problem(16), epochs=5)
    assert (len(history.epochs), history.stop_reason) == (5, None)


def test_unknown_figure_is_named() -> None:
    trainer = Trainer(small_model(), backend="serial", callbacks=[EarlyStopping("val_acuracy")])
    with pytest.raises(
        UserError, match=r"EarlyStopping.metric: no such metric was reported this epoch. Got 'val_acuracy'"
    ):
        trainer.fit(problem(8), problem(4))
