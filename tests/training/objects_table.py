"""Measures what a script's objects hold around `fit`, for the table of docs/objects.md.

As a script, on ranks that a launcher started, it prints the columns of its mode as JSON on rank 0.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, TensorDataset

from distributed import Callback, Trainer
from distributed.interfaces.callback import Context
from distributed.interfaces.launcher import Launcher
from tests.support.training import make_trainer

X = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True).sin()
BEFORE, ITSELF, LEFT, RANK0 = "as before", "the object itself", "what training left", "rank 0's"
NOW, NOTHING, SEEDED = "its values now", "nothing", "seeded by `fit`"


class Loss:
    """A loss with a weight, which counts its calls and notes the rank of the last one."""

    def __init__(self) -> None:
        self.weight, self.calls = 1.0, [0]

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        self.calls[1:] = [rank()]
        return self.weight * nn.functional.mse_loss(output, target) + output.abs().mean()


class Sets(Callback):
    """Sets the rate after the first step, counts steps, and looks at the script's objects."""

    all_ranks = True

    def __init__(self) -> None:
        self.rate, self.seen = 0.05, [0]

    def on_step_end(self, context: Context) -> None:
        if context.progress.step == 1:
            context.optimizer.param_groups[0]["lr"] = self.rate
            context.model[2].p = 0.5
        self.seen[0] += 1
        self.seen[1:] = [rank()]
        if look is not None and context.progress.step == 6:
            look()


class Decays(torch.optim.Adam):
    """Counts its steps, and sets a decay."""

    def __init__(self, parameters: Any, rate: float) -> None:
        super().__init__(parameters, rate)
        self.decay, self.num_steps = 0.0, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        self.param_groups[0]["weight_decay"] = self.decay
        super().step()


look: Callable[[], None] | None = None


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


class Script:
    """The objects of a script, and their values by the rows of the table."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        norm = nn.BatchNorm1d(4).eval()
        layers = [nn.Linear(3, 4), norm, nn.Dropout(0.25), nn.Linear(4, 1)]
        self.model = nn.Sequential(*layers).double()
        self.optimizer = Decays(self.model.parameters(), 0.02)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.loss, self.callback = Loss(), Sets()
        self.generator = torch.Generator().manual_seed(5)

    def fit(self, backend: str, ranks: int, launcher: Launcher | None) -> list[torch.Tensor]:
        """Train; weights afterwards."""
        data = DataLoader(TensorDataset(X, Y), 6, shuffle=True, generator=self.generator)
        trainer: Trainer = make_trainer(
            self.model, ranks, launcher, backend=backend, optimizer=self.optimizer, scheduler=self.scheduler,
            loss_fn=self.loss, callbacks=[self.callback], global_batch_size=6, epochs=2,
        )  # fmt: skip
        trainer.fit(data)
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def values(self) -> dict[str, Any]:
        """What the objects hold now, by row."""
        numbers = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index, union-attr]
        return copy.deepcopy(
            {
                "weights and buffers of the model": self.model.state_dict(),
                "moments, steps and rates of the optimizer": self.optimizer.state_dict(),
                "attributes of modules and of the optimizer": (self.model[2].p, self.optimizer.num_steps),
                "the scheduler": self.scheduler.state_dict(),
                "attributes of the loss": vars(self.loss),
                "attributes of callbacks": vars(self.callback),
                "generators of `random`, NumPy and torch": numbers,
                "the generator of a `DataLoader`": self.generator.get_state().tolist(),
            }
        )

    def change(self, row: str) -> None:
        """Change the object of `row` so that it matters, if it is taken."""
        if row == "weights and buffers of the model":
            self.model[0].weight.data.mul_(0.5)
        elif row == "moments, steps and rates of the optimizer":
            self.model(X).square().sum().backward()
            rates = [group["lr"] for group in self.optimizer.param_groups]
            weights = copy.deepcopy(self.model.state_dict())
            self.optimizer.step()
            self.model.load_state_dict(weights)
            assert rates == [group["lr"] for group in self.optimizer.param_groups]
        elif row == "attributes of modules and of the optimizer":
            self.model[2].p, self.optimizer.decay = 0.0, 0.1
        elif row == "the scheduler":
            self.scheduler.gamma = 0.1
        elif row == "attributes of the loss":
            self.loss.weight = 3.0
        elif row == "attributes of callbacks":
            self.callback.rate = 0.001
        elif row == "generators of `random`, NumPy and torch":
            torch.manual_seed(9)
            random.seed(9)
            np.random.seed(9)
        else:
            self.generator.manual_seed(9)


def differ(first: Any, second: Any) -> bool:
    """Compare all values exactly."""
    plain = [tree_map_only(torch.Tensor, torch.Tensor.tolist, value) for value in (first, second)]
    return repr(plain[0]) != repr(plain[1])


def measure(backend: str, ranks: int, launcher: Callable[[Callable[[], None]], Launcher] | None) -> Any:
    """{row: [taken, during, afterwards]} in words of the table.

    Args:
        launcher: makes the launcher of started ranks, which calls its argument before anything returns.
    """
    global look
    script = Script()
    before, during = script.values(), {}

    def note() -> None:
        during.update(script.values())

    look = note if launcher is None else None
    plain = script.fit(backend, ranks, launcher and launcher(note))
    look = None
    after, table = script.values(), {}
    for row in before:
        other = Script()
        other.change(row)
        found = other.fit(backend, ranks, launcher and launcher(lambda: None))
        taken = NOW if differ(found, plain) else NOTHING
        generators = row.startswith("generators")
        changes = (SEEDED if generators else ITSELF) if differ(before[row], during[row]) else BEFORE
        left = RANK0 if row.startswith("attributes") else LEFT
        table[row] = [taken, changes, left if differ(before[row], after[row]) else BEFORE]
    assert after["attributes of callbacks"]["seen"] == [8, rank()]
    return table


if __name__ == "__main__":
    found = measure("pytorch-ddp", int(os.environ["WORLD_SIZE"]), None)
    if rank() == 0:
        print(json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
