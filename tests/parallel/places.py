"""Backends and meshes that save and load the checkpoints of one run."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distributed import Trainer
from distributed.interfaces.launcher import Launcher
from tests.support.training import make_trainer

__all__ = ["OPTIONS", "PLACES", "is_installed", "trainer_at"]

PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "serial": (1, {"backend": "serial"}),
    "ddp 2": (2, {"backend": "pytorch-ddp"}),
    "shard 2": (2, {"backend": "fsdp"}),
    "data 2 x shard 2": (4, {"backend": "fsdp", "parallel": {"data": 2}}),
    "zero 1": (2, {"backend": "deepspeed", "zero_stage": 1}),
    "zero 2": (2, {"backend": "deepspeed", "zero_stage": 2}),
    "zero 3": (2, {"backend": "deepspeed", "zero_stage": 3}),
    "horovod 2": (2, {"backend": "horovod"}),
    "tensor 2": (2, {"backend": "pytorch-ddp", "parallel": {"tensor": 2}}),
    "tensor 4": (4, {"backend": "pytorch-ddp", "parallel": {"tensor": 4}}),
    "data 2 x tensor 2": (4, {"backend": "pytorch-ddp", "parallel": {"tensor": 2}}),
    "shard 2 x tensor 2": (4, {"backend": "fsdp", "parallel": {"tensor": 2}}),
    "data 2 x shard 2 x tensor 2": (8, {"backend": "fsdp", "parallel": {"data": 2, "tensor": 2}}),
    "pipeline 2": (2, {"backend": "pytorch-ddp", "parallel": {"pipeline": 2}}),
    "context 2": (2, {"backend": "pytorch-ddp", "parallel": {"context": 2}}),
    "expert 2": (2, {"backend": "pytorch-ddp", "parallel": {"expert": 2}}),
    "pipeline 2 x data 2 x tensor 2": (
        8,
        {"backend": "pytorch-ddp", "parallel": {"pipeline": 2, "tensor": 2}},
    ),
    "pipeline 2 x shard 2 x context 2, expert 2": (
        8,
        {"backend": "fsdp", "parallel": {"pipeline": 2, "context": 2, "expert": 2}},
    ),
}
"""Name -> (number of ranks, fields). Axes without a name of their own belong to the backend's default."""

OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "data 4, expert 2": (4, {"backend": "pytorch-ddp", "parallel": {"expert": 2}}),
    "shard 4, expert 2": (4, {"backend": "fsdp", "parallel": {"expert": 2}}),
}
"""More of them, for models with experts."""

OPTIONS: dict[str, Any] = {"global_batch_size": 8, "max_norm": 0.5}
"""Arguments of `tests.parallel.models.train_plainly` for the same run."""


def is_installed(place: str) -> bool:
    """Whether the backend of `place` is one of torch, or its package is here."""
    backend = PLACES[place][1]["backend"]
    return backend not in ("deepspeed", "horovod") or importlib.util.find_spec(backend) is not None


def trainer_at(place: str, model: Any, pool: Launcher | None, folder: Path, **given: Any) -> Trainer:
    """A trainer that resumes from the checkpoints in `folder` and saves there."""
    ranks, fields = {**PLACES, **OTHERS}[place]
    common = {
        "global_batch_size": OPTIONS["global_batch_size"],
        "optimizer": partial(torch.optim.AdamW, eps=1e-4),
        "learning_rate": 0.01,
        "gradient_clipping": OPTIONS["max_norm"],
        "checkpoint_dir": str(folder),
        "resume_from_checkpoint": True,
    }
    return make_trainer(model, ranks, pool, **{**common, **fields, **given})
