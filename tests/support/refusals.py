"""A small classification, and the check that `fit` refuses something before its first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from distributed.errors import UserError
from tests.support.training import make_trainer


def points(length: int = 12) -> tuple[Tensor, Tensor]:
    x = torch.randn(length, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def refused(field: str, *words: str, data: Any = None, model: nn.Module | None = None, **given: Any) -> None:
    """A fit raises a UserError about `field` with `words`, and the weights are as before."""
    model = nn.Linear(4, 2) if model is None else model
    before = [p.detach().clone() for p in model.parameters()]
    trainer = make_trainer(model, batch_size=4, **{"optimizer": SGD, "learning_rate": 0.5, **given})
    with pytest.raises(UserError) as caught:
        trainer.fit(*(data or (points(),)))
    assert caught.value.field == field
    for word in words:
        assert word in str(caught.value)
    assert caught.value.remedy
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
