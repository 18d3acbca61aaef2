"""Measure the peak of runs in a process of their own: ``python -m tests.support.measure_memory JSON``."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.support.peak_memory import MeasurePeak, count_mappings
from tests.support.small_transformers import MODELS, Samples
from tests.support.training import make_trainer

__all__ = ["measure"]


def measure(name: str, samples: int, ranks: int, steps: int = 3, **fields: Any) -> int:
    """Train a model of `tests.support.small_transformers`: the peak of the rank that needs most, in bytes.

    Args:
        samples: of a micro-batch.
        fields: of the configuration.
    """
    torch.manual_seed(0)
    build, batch = MODELS[name]
    model = build()
    window = samples * ranks * fields.get("gradient_accumulation_steps", 1)
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [MeasurePeak(Path(folder))]
        fields = {"batch_size": samples, "max_steps": steps, "optimizer": "adamw", **fields}
        trainer = make_trainer(model, ranks, callbacks=callbacks, **fields)
        trainer.fit(Samples(batch(window * steps)))
        return max(int(file.read_text(encoding="utf-8")) for file in Path(folder).iterdir())


def main() -> None:
    """Print the peaks of the runs whose arguments are given as JSON."""
    count_mappings()
    torch.set_num_threads(1)
    print(json.dumps([measure(**run) for run in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
