"""Measure the peak of runs in a process of their own: ``python -m tests.support.measure_memory JSON``."""

from __future__ import annotations

import json
import sys
import tempfile
from math import prod
from pathlib import Path
from typing import Any

import torch

from distributed.interfaces.parallel_dims import MODEL_AXES
from distributed.operations.planning.host_peak import MeasurePeak, count_mappings, peak_of
from tests.support.small_transformers import MODELS, Pairs, Samples
from tests.support.training import make_trainer

__all__ = ["measure"]


def measure(name: str, samples: int, ranks: int, steps: int = 3, pairs: bool = False, **fields: Any) -> int:
    """Train a model of `tests.support.small_transformers`: the peak of the rank that needs most, in bytes.

    Args:
        samples: of a micro-batch.
        pairs: whether batches are (tokens, targets).
        fields: of the configuration.
    """
    torch.manual_seed(0)
    build, batch = MODELS[name]
    model = build()
    parallel = fields.get("parallel", {})
    copies = ranks // prod(parallel.get(axis, 1) for axis in MODEL_AXES)
    window = samples * copies * fields.get("gradient_accumulation_steps", 1)
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [MeasurePeak(Path(folder))]
        fields = {"batch_size": samples, "max_steps": steps, "optimizer": "adamw", **fields}
        if pairs:
            model.config.use_cache = False
        trainer = make_trainer(model, ranks, callbacks=callbacks, **fields)
        data = batch(window * steps)
        trainer.fit(Pairs(data) if pairs else Samples(data))
        peak = peak_of(Path(folder), ranks)
        assert peak is not None, "more was live before the first step than in training"
        return peak


def main() -> None:
    """Print the peaks of the runs whose arguments are given as JSON."""
    count_mappings()
    torch.set_num_threads(1)
    print(json.dumps([measure(**run) for run in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
