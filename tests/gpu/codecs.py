"""Training with gradient codecs on GPU ranks, against the same training on CPU ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.gpu.checks import Measured, Settings
from tests.gpu.product import Trainer, distance, problem
from tests.gpu.ranks import number_of_ranks, shared_pool, trainer

__all__ = ["parity"]


def _model(width: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)).double()


def parity(setting: Settings, codec: str, transport: str) -> Iterator[Measured]:
    """Momentum SGD with clipping and error feedback; float64. Tests compare CPU ranks with plain PyTorch."""
    ranks = number_of_ranks(setting, "pytorch-ddp", transport)
    batch, width = 8 * ranks, setting.pick(300, 40)
    data = problem(8 * batch)
    given: dict[str, Any] = {
        "global_batch_size": batch,
        "optimizer": "sgd",
        "momentum": 0.9,
        "learning_rate": 0.1,
        "gradient_clipping": 0.5,
        "compression": {"codec": codec, "error_feedback": True},
    }
    model, reference = _model(width), _model(width)
    trainer(setting, model, "pytorch-ddp", transport, **given).fit(data, epochs=1)
    plain = Trainer(
        reference,
        backend="pytorch-ddp",
        device="cpu",
        num_processes=ranks,
        tracking={"progress": "off"},
        **given,
    )
    plain.launcher = shared_pool()
    plain.fit(data, epochs=1)
    yield Measured(distance(model.to("cpu"), reference), f"{ranks} ranks, 8 steps")
