"""Named trainers: a default backend each, and nothing else."""

from __future__ import annotations

import os
from typing import Any

from distributed.errors import UserError
from distributed.joined import detect
from distributed.trainer import Trainer

__all__ = ["FSDPTrainer", "HorovodTrainer", "PyTorchDDPTrainer", "TensorFlowDistributedTrainer"]


class PyTorchDDPTrainer(Trainer):
    """A `Trainer` whose backend is ``pytorch-ddp`` unless the config says otherwise."""

    default_backend = "pytorch-ddp"


class FSDPTrainer(Trainer):
    """A `Trainer` whose backend is ``fsdp`` unless the config says otherwise."""

    default_backend = "fsdp"


class TensorFlowDistributedTrainer(Trainer):
    """A `Trainer` of Keras models, whose backend is ``tensorflow`` unless the config says otherwise."""

    default_backend = "tensorflow"


class HorovodTrainer(Trainer):
    """A `Trainer` whose backend is ``horovod`` unless the config says otherwise.

    Args:
        model: as for `Trainer`, and so is everything that is not named here.
        verbose: False shows no progress bar. Only rank 0 shows one in any case.
        compression: ``none``, ``fp16`` or the class of ``hvd.Compression``: `horovod.compression`.
    """

    default_backend = "horovod"

    def __init__(
        self, model: Any, config: Any = None, *, verbose: bool = True, compression: Any = None, **given: Any
    ) -> None:
        if not verbose:
            given = {"tracking.progress": "off", **given}
        if compression is not None:
            given["horovod.compression"] = compression
        super().__init__(model, config, **given)

    def metric_average(self, value: Any, name: str | None = None) -> float:
        """The mean of `value` over all ranks. Collective where code around `fit` runs on every
        rank (horovodrun, torchrun); where `fit` starts the ranks it is `value`.

        Args:
            value: a number or a tensor of one element, this rank's.
            name: of the metric, the same on all ranks.

        Raises:
            UserError: there are several ranks and Horovod has not started.
        """
        place = detect(os.environ)
        if place is None or place.size == 1:
            return float(value)
        import horovod.torch as hvd
        import torch

        if not hvd.is_initialized():
            raise UserError(
                "Horovod has not started on these ranks",
                field="metric_average",
                remedy="Call it after `fit`, or call hvd.init() under horovodrun",
            )
        mean = hvd.allreduce(torch.tensor(float(value), dtype=torch.float64), name=name or "metric")
        return float(mean)
