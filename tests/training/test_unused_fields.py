"""What a run was given and does not use is named in a warning."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed import Trainer
from distributed.callbacks import EarlyStopping
from distributed.errors import UserError

DATA = torch.ones(8, 4), torch.zeros(8, dtype=torch.long)
SGD = functools.partial(torch.optim.SGD, momentum=0.9)


def step_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def warnings(caplog: pytest.LogCaptureFixture, val: Any = None, **fields: Any) -> list[str]:
    """Names of what has no effect in a run with `fields`."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "distributed"):
        Trainer(nn.Linear(4, 2), device="cpu", batch_size=4, **fields).fit(DATA, val, max_steps=1)
    return [m.split(" has no effect: ")[0] for m in caplog.messages if " has no effect: " in m]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, []),
        ({"optimizer": SGD, "learning_rate": 0.1}, []),
        ({"optimizer": SGD, "weight_decay": 0.1}, ["weight_decay"]),
        ({"momentum": 0.9}, ["momentum"]),
        ({"momentum": 0.9, "optimizer": "sgd"}, []),
        ({"scheduler": step_lr, "warmup_steps": 2}, ["warmup_steps"]),
        ({"scheduler": "cosine", "min_lr_ratio": 0.1}, []),
        ({"min_lr_ratio": 0.1}, ["min_lr_ratio"]),
        ({"scheduler": "cosine", "scheduler_interval": "epoch"}, ["scheduler_interval"]),
        ({"checkpoint": {"every_n_steps": 5}}, ["checkpoint.every_n_steps"]),
        ({"metrics": {"hits": lambda o, t: (o.argmax(1).eq(t).sum(), len(t))}}, ["metrics"]),
        ({"validation_step": lambda m, b: {"hits": (1, 1)}}, ["validation_step"]),
        ({"callbacks": None}, []),
    ],
)
def test_what_has_no_effect(
    fields: dict[str, Any], expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings(caplog, **fields) == expected


def test_metrics_with_validation_data_have_an_effect(caplog: pytest.LogCaptureFixture) -> None:
    hits = {"hits": lambda o, t: (o.argmax(1).eq(t).sum(), len(t))}
    assert warnings(caplog, DATA, metrics=hits) == []


def test_a_resume_names_hyperparameters_that_the_checkpoint_brings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    common = {"checkpoint_dir": str(tmp_path), "epochs": 1}
    assert warnings(caplog, **common) == []
    assert warnings(caplog, **common, resume_from_checkpoint=True, learning_rate=0.5) == ["learning_rate=0.5"]
    assert "nothing is left to train: raise epochs or max_steps" in capsys.readouterr().out
    given = {"checkpoint": {"hyperparameters": "given"}}
    assert warnings(caplog, **common, resume_from_checkpoint=True, learning_rate=0.5, **given) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"callbacks": [lambda context: None]}, r"callbacks: not a callback\. Got '<lambda>'"),
        (
            {"metrics": {"hits": lambda o, t: (o.argmax(1).eq(t), len(t))}},
            r"metric 'hits' have to be numbers",
        ),
        ({"validation_step": lambda m, b: None}, r"validation_step: .*Got 'NoneType'"),
    ],
)
def test_functions_and_callbacks_of_another_form(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Trainer(nn.Linear(4, 2), device="cpu", batch_size=4, **fields).fit(DATA, DATA, epochs=1)


class NoModule(nn.Module):
    """Forgets to call ``super().__init__()``."""

    def __init__(self) -> None:
        self.width = 4


def test_a_model_that_is_not_initialized() -> None:
    with pytest.raises(UserError, match=r"model: the model's __init__ .*Got 'NoModule'\. Call super"):
        Trainer(NoModule, device="cpu", batch_size=4).fit(DATA)


def test_a_batch_that_is_none() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*DATA), 4, collate_fn=lambda _: None)
    with pytest.raises(UserError, match="train_loader: a batch is None"):
        Trainer(nn.Linear(4, 2), device="cpu").fit(loader)


@pytest.mark.parametrize("patience", ["3", -1, 1.5])
def test_patience_is_a_number_of_epochs(patience: Any) -> None:
    with pytest.raises(UserError, match=r"EarlyStopping\.patience: not a number of epochs"):
        EarlyStopping(patience=patience)


def test_an_ellipsis_at_the_end_of_a_remedy_stays() -> None:
    error = UserError("wrong.", allowed="1, 2, ...", remedy="Give f=lambda x: ...")
    assert str(error) == "wrong. Allowed: 1, 2, ... Give f=lambda x: ..."
