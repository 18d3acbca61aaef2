"""Named trainers: a default backend each, and nothing else."""

from __future__ import annotations

from distributed.trainer import Trainer

__all__ = ["FSDPTrainer", "PyTorchDDPTrainer"]


class PyTorchDDPTrainer(Trainer):
    """A `Trainer` whose backend is ``pytorch-ddp`` unless the config says otherwise."""

    default_backend = "pytorch-ddp"


class FSDPTrainer(Trainer):
    """A `Trainer` whose backend is ``fsdp`` unless the config says otherwise."""

    default_backend = "fsdp"
