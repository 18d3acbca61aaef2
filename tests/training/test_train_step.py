"""`Trainer.train_step`, for people with a loop of their own."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

from distributed import Trainer
from distributed.errors import UserError
from distributed.testing.conformance import distance, problem, small_model
from distributed.testing.oracle import sample_order
from tests.support import commands
from tests.support.ports import free_port

momentum = partial(SGD, momentum=0.9)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"gradient_clipping": 0.3, "warmup_steps": 3},
        {"loss_fn": nn.CrossEntropyLoss(weight=torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64))},
        {"mixed_precision": "fp16", "scaler_init_scale": 2.0**40, "warmup_steps": 3},
    ],
    ids=str,
)
def test_it_is_the_step_that_fit_takes(fields: dict[str, Any]) -> None:
    x, y = problem(24)
    y[::5] = -100
    given = {"optimizer": momentum, "learning_rate": 0.2, "num_processes": 1, "device": "cpu",
             "log_every_n_steps": 1, **fields}  # fmt: skip
    mine, fitted = small_model(), small_model()
    whole = Trainer(fitted, global_batch_size=6, **given).fit((x, y), epochs=2)
    trainer = Trainer(mine, **given)
    losses = []
    for epoch in range(2):
        for batch in sample_order(24, 0, epoch).split(6):
            losses.append(trainer.train_step(x[batch], y[batch]))
    assert losses == pytest.approx(whole.steps["loss"], abs=1e-9)
    assert distance(mine, fitted) < 1e-9


def test_a_batch_smaller_than_the_accumulation() -> None:
    x, y = problem(2)
    model, reference = small_model(), small_model()
    trainer = Trainer(model, optimizer=SGD, learning_rate=0.2, gradient_accumulation_steps=4, device="cpu")
    loss = trainer.train_step(x, y)
    expected = F.cross_entropy(reference(x), y)
    expected.backward()
    SGD(reference.parameters(), lr=0.2).step()
    assert loss == pytest.approx(float(expected.detach()))
    assert distance(model, reference) < 1e-12


def test_it_cannot_start_ranks() -> None:
    trainer = Trainer(small_model(), num_processes=2, device="cpu")
    with pytest.raises(UserError, match="cannot start 2 ranks from inside"):
        trainer.train_step(*problem(4))


def test_a_loss_that_is_not_finite_stops_here_too() -> None:
    x, y = problem(4)
    model = small_model()
    with pytest.raises(UserError, match="the loss is nan") as caught:
        Trainer(model, device="cpu").train_step(x * torch.nan, y)
    assert caught.value.field == "on_nan"
    assert distance(model, small_model()) == 0.0
    Trainer(model, device="cpu", on_nan="skip").train_step(x * torch.nan, y)
    assert distance(model, small_model()) == 0.0


SCRIPT = """
import json, os
from functools import partial
import torch
from torch import nn
from torch.optim import SGD
from distributed import Trainer
from distributed.testing.conformance import small_model
from union import LOSSES, STEPS, data, rows

rank = int(os.environ["RANK"])
found = {}
for name, loss_fn in LOSSES.items():
    x, y = data(name)
    model = small_model()
    trainer = Trainer(model, optimizer=partial(SGD, momentum=0.9), learning_rate=0.2, device="cpu",
                      loss_fn=loss_fn, gradient_accumulation_steps=2, gradient_clipping=0.3)
    losses = [trainer.train_step(x[rows(step, rank)], y[rows(step, rank)]) for step in range(STEPS)]
    found[name] = losses, [p.tolist() for p in model.parameters()]
with open(f"rank_{rank}.json", "w") as file:
    json.dump(found, file)
"""

UNION = """
import torch
from torch import nn
from distributed.testing.conformance import problem

LOSSES = {"masked": nn.CrossEntropyLoss(), "mse": nn.MSELoss()}
STEPS = 4

def data(name):
    x, y = problem(40)
    y[::3] = -100
    return x, (y if name == "masked" else x[:, :3] * 2)

def rows(step, rank):
    # Rank 0 brings 7 samples, rank 1 brings 3, and a single one in the end.
    start, end = (0, 7) if rank == 0 else (7, 8 if step == STEPS - 1 else 10)
    return slice(10 * step + start, 10 * step + end)
"""


def test_ranks_may_bring_unequal_batches(tmp_path: Path, forking_python: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "union.py").write_text(UNION)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    done = commands.run(
        [*torchrun, "--master-port", str(free_port()), "train.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": str(forking_python)},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    zero, one = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2))
    shared: dict[str, Any] = {}
    exec(UNION, shared)
    for name, loss_fn in shared["LOSSES"].items():
        x, y = shared["data"](name)
        losses, weights = zero[name]
        assert weights == one[name][1]
        model = small_model()
        optimizer = momentum(model.parameters(), lr=0.2)
        for step in range(shared["STEPS"]):
            mine, others = shared["rows"](step, 0), shared["rows"](step, 1)
            with torch.no_grad():
                assert losses[step] == pytest.approx(float(loss_fn(model(x[mine]), y[mine])))
            optimizer.zero_grad()
            union = slice(mine.start, others.stop)
            loss_fn(model(x[union]), y[union]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
        for found, parameter in zip(weights, model.parameters(), strict=True):
            assert (torch.tensor(found, dtype=torch.float64) - parameter.detach()).abs().max() < 1e-9
