"""A batch that does not fit into the memory of the GPU: chosen micro-batches, and the report of the error."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.gpu.checks import Measured, Settings
from tests.gpu.product import Callback, Trainer, WorkerError
from tests.gpu.ranks import trainer

__all__ = ["chosen_batch", "explained_error"]

_WIDTH, _LAYERS = 4096, 8
_STEPS = 2
_MANUAL = 2**14
"""Samples of a micro-batch of the loop that is compared with."""


def _model(width: int) -> nn.Module:
    torch.manual_seed(0)
    middle = [nn.Sigmoid() for _ in range(_LAYERS)]
    return nn.Sequential(nn.Linear(4, width), *middle, nn.Linear(width, 1)).double()


def _samples_beyond(setting: Settings) -> int:
    """Power of two: activations of so many samples take 1.5 to 3 times the memory of the GPU."""
    total = torch.cuda.get_device_properties(0).total_memory if setting.device == "cuda" else 2**30
    needed = 1.5 * total / (8 * setting.pick(_WIDTH, 16) * (_LAYERS + 1))
    return int(setting.pick(2 ** int(needed).bit_length(), 64))


def _data(samples: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(samples * _STEPS, 4, dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


def _run(setting: Settings, model: nn.Module, samples: int, batch_size: int | str) -> Trainer:
    made = trainer(
        setting,
        model,
        "serial",
        "default",
        batch_size=batch_size,
        global_batch_size=samples,
        data={"shuffle": False},
        loss_fn=F.mse_loss,
        optimizer="sgd",
        learning_rate=0.1,
        max_steps=_STEPS,
    )
    made.launcher = None  # pooled ranks stay, with the memory that the allocator keeps of a probe
    return made


def chosen_batch(setting: Settings) -> Iterator[Measured]:
    """``batch_size: auto`` beside a loop of small micro-batches, in float64."""
    samples = _samples_beyond(setting)
    model, (x, y) = _model(setting.pick(_WIDTH, 16)), _data(samples)
    start = deepcopy(model)
    sizes: list[int] = []
    ours = _run(setting, model, samples, "auto")
    ours.callbacks = [_Size(sizes)]
    ours.fit((x, y))
    expected = _by_hand(start.to(setting.device), x.to(setting.device), y.to(setting.device), samples)
    trained = {name: value.to(setting.device) for name, value in model.state_dict().items()}
    worst = max(float((trained[name] - value).abs().max()) for name, value in expected.items())
    yield Measured(worst, f"{sizes[0]} of {samples} samples in a micro-batch")


class _Size(Callback):
    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def on_run_start(self, context: object) -> None:
        self.sizes.append(context.plan.batch.batch_size)  # type: ignore[attr-defined]


def _by_hand(model: nn.Module, x: Tensor, y: Tensor, samples: int) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(_STEPS):
        optimizer.zero_grad()
        for part in torch.arange(step * samples, (step + 1) * samples, device=x.device).split(_MANUAL):
            (F.mse_loss(model(x[part]), y[part], reduction="sum") / samples).backward()
        optimizer.step()
    return model.state_dict()


_SAID = {
    "the parts of memory": "activations",
    "the capacity": "GiB",
    "a change that fits": r"\(1\) --set ",
}
"""What a report of an out-of-memory error says, and how."""


def explained_error(setting: Settings) -> Iterator[Measured]:
    """The report of an out-of-memory error, and whether its first change trains."""
    samples = _samples_beyond(setting)
    x, y = _data(samples)
    try:
        _run(setting, _model(setting.pick(_WIDTH, 16)), samples, samples).fit((x, y))
    except (RuntimeError, WorkerError) as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    else:
        raise RuntimeError("the batch fitted, so that nothing was reported")
    print(text, flush=True)
    gc.collect()  # the tensors of the step that failed
    torch.cuda.empty_cache()
    missing = [what for what, pattern in _SAID.items() if not re.search(pattern, text)]
    smaller = re.search(r"\(1\) --set batch_size=(\d+)", text)
    if smaller is None:
        missing.append("a smaller micro-batch")
    else:
        _run(setting, _model(setting.pick(_WIDTH, 16)), samples, int(smaller[1])).fit((x, y))
    yield Measured(len(missing), ", ".join(missing) or f"trained with {smaller and smaller[0]}")
