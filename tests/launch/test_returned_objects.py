"""What a script's callbacks and functions collect is the same on started ranks as in one process."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distributed import Callback
from distributed.interfaces.callback import Context
from distributed.testing.rank_pool import RankPool
from distributed.training.refilling import refill
from tests.support import commands
from tests.support.training import make_trainer

X = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)
PLACES = [("serial", 1, {}), ("pytorch-ddp", 3, {}), ("fsdp", 2, {}), ("deepspeed", 2, {"zero_stage": 1})]

STEPS: list[int] = []
COUNTS = {"steps": 0}
total = 0


class Meter:
    """An average as scripts write it, with an array."""

    def __init__(self) -> None:
        self.values: deque[int] = deque(maxlen=3)
        self.sums = np.zeros(2)


def note(step: int) -> None:
    global total
    total += 1
    STEPS.append(step)


class Collects(Callback):
    """Collects in objects of its own, in globals, and through a function."""

    def __init__(self, meter: Meter, act: Callable[[Context], None]) -> None:
        self.meter, self.act, self.lock, self.best = meter, act, None, {"step": None}

    def on_step_end(self, context: Context) -> None:
        self.meter.values.append(context.progress.step)
        self.meter.sums[0] += 1.0
        self.act(context)
        self.best["step"] = context.progress.step
        COUNTS["steps"] += 1
        note(context.progress.step)

    def on_run_end(self, context: Context, status: str) -> None:
        self.status = status


class Steps:
    """A training step that is a method, and counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def step(self, model: nn.Module, batch: Any) -> Tensor:
        self.num_calls += 1
        return nn.functional.mse_loss(model(batch[0]), batch[1])


def fit(pool: RankPool | None, backend: str, ranks: int, fields: dict[str, Any], **given: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    make_trainer(model, ranks, pool, backend=backend, global_batch_size=6, epochs=1, **fields, **given).fit(
        (X, Y)
    )


@pytest.mark.parametrize(("backend", "ranks", "fields"), PLACES, ids=[place[0] for place in PLACES])
def test_what_is_collected_comes_back(
    backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool
) -> None:
    global total
    total = 0
    STEPS.clear()
    COUNTS["steps"] = 0
    meter, local, number = Meter(), [], 0

    def act(context: Context) -> None:
        nonlocal number
        number += 1
        local.append(context.progress.step)

    steps, callback = Steps(), Collects(meter, act)
    values, sums, best = meter.values, meter.sums, callback.best
    fit(rank_pool, backend, ranks, fields, training_step=steps.step, callbacks=[callback])
    assert (callback.meter, callback.act, callback.best) == (meter, act, best)
    assert values is meter.values
    assert sums is meter.sums
    assert [*values] == [2, 3, 4]
    assert sums.tolist() == [4.0, 0.0]
    assert (local, number) == ([1, 2, 3, 4], 4)
    assert (best, callback.status) == ({"step": 4}, "finished")
    assert (STEPS, COUNTS, total) == ([1, 2, 3, 4], {"steps": 4}, 4)
    assert steps.num_calls == 4


class Locks(Callback):
    """Keeps what cannot be pickled, and what can."""

    lock: Any = None
    steps = 0

    def on_step_end(self, context: Context) -> None:
        self.lock = threading.Lock()
        self.steps = context.progress.step


def test_what_cannot_be_pickled_is_named(rank_pool: RankPool, caplog: pytest.LogCaptureFixture) -> None:
    callback = Locks()
    fit(rank_pool, "pytorch-ddp", 2, {}, loss_fn=nn.MSELoss(), callbacks=[callback])
    assert (callback.lock, callback.steps) == (None, 4)
    assert (
        "lock of Locks cannot be pickled, and stays in this process as it was before training" in caplog.text
    )


SCRIPT = """
import torch
from torch import nn
from distributed import Trainer

LOSSES, calls = [], 0

def training_step(model, batch):
    global calls
    calls += 1
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    LOSSES.append(loss.item())
    return loss

if __name__ == "__main__":
    x = torch.randn(24, 3)
    places = {"backend": "pytorch-ddp", "num_processes": 2, "device": "cpu", "tracking": {"progress": "off"}}
    trainer = Trainer(nn.Linear(3, 1), places, global_batch_size=6, epochs=1, training_step=training_step)
    trainer.fit((x, x.sum(1, keepdim=True)))
    print("collected", len(LOSSES), calls)
"""


@pytest.mark.starts_processes
def test_globals_of_a_script_come_back(tmp_path: Any) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = commands.run(
        [sys.executable, str(tmp_path / "train.py")], cwd=tmp_path, capture_output=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "collected 4 4"


class Node:
    """Refers to itself."""

    def __init__(self, value: int) -> None:
        self.value, self.me = value, self


def test_objects_are_filled_in_place() -> None:
    node, tensor, module, part = Node(1), torch.zeros(2), nn.Linear(2, 1), {"deep": [1]}
    own = {"node": node, "tensor": tensor, "module": module, "part": part, "gone": {"a": 1}, "wide": tensor}
    other = nn.Linear(2, 1)
    values = {
        "node": Node(2), "tensor": torch.ones(2), "module": other, "part": {"deep": [1, 2]},
        "gone": {}, "wide": torch.ones(3), "new": partial(int, base=2),
    }  # fmt: skip
    weight, deep = module.weight, part["deep"]
    refill(own, values)
    assert (own["node"], node.value, node.me) == (node, 2, node)
    assert tensor.tolist() == [1.0, 1.0]
    assert own["module"] is module
    assert module.weight is weight
    assert torch.equal(weight, other.weight)
    assert (part["deep"], deep) == ([1, 2], [1, 2])
    assert part["deep"] is deep
    assert own["gone"] == {}
    assert own["wide"].tolist() == [1.0] * 3
    assert own["new"]("11") == 3
