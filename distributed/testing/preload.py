"""Imports of a fork server, for the ranks of torch backends and for the command line."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from types import ModuleType

_MODULES = (
    "distributed.commands.train",
    "distributed.launch",
    "distributed.training.loop",
    "distributed.testing.rank_pool",
    "distributed.torchrun",
    "distributed.trainers",
    "distributed.operations.tuning.trial_channel",
    "distributed.launch.rank_process",
    "distributed_backends.ddp.backend",
    "distributed_backends.fsdp.backend",
    "distributed_backends.ray.figures_callback",
    "encodings.idna",
    "psutil",
    "rich._emoji_codes",
    "rich.console",
    "rich.progress",
    "sklearn.datasets",
    "stringprep",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.run",
    "torch.utils.serialization",
    "torch.utils.tensorboard",
)


def torch_ranks() -> None:
    """Import what a rank imports before and while it trains, and take one optimizer step: the first one
    imports ``torch._dynamo``, which takes over a second. Modules that are not installed are left out."""
    import torch

    # Without it, tensorboard imports TensorFlow, which doubles the memory of every fork.
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    for name in _MODULES:
        with suppress(ImportError):
            import_module(name)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
