"""Learn handwritten digits: scikit-learn's 1,797 scans of 8 x 8 pixels, a small MLP.

    python -m distributed.cli train --num-processes 2
    python -m distributed.cli train --num-processes 2 --backend tensorflow

The model is torch's, or Keras's under a backend that trains those. Any flag of ``train`` applies;
the validation accuracy passes 95 % within a few epochs.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distributed import Trainer, UserError
from distributed.config import load_layers
from distributed.config.script_overlay import active
from distributed.registry.catalog import get_catalog

VALIDATION = 360  # samples, about a fifth


def load_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(training, validation), each (float32 pixels in 0..1 of shape (N, 64), int64 labels)."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise UserError(
            "the bundled example reads its digits from scikit-learn, not installed here",
            remedy="pip install 'distributed-trainer[torch,examples]'",
        )
    import numpy as np

    # One line per image, pixels and label. Importing scikit-learn takes as long as importing torch.
    table = np.loadtxt(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    x = (torch.from_numpy(table[:, :-1]).float() / 16.0)[order]
    y = torch.from_numpy(table[:, -1]).long()[order]
    return (x[VALIDATION:], y[VALIDATION:]), (x[:VALIDATION], y[:VALIDATION])


def build_model() -> nn.Module:
    """64 pixels -> 128 -> 64 -> 10 classes."""
    return nn.Sequential(
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def build_keras_model() -> Any:
    """The same in Keras."""
    import keras

    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def choose_model() -> Any:
    """A model, or a function that builds one, for the framework of the backend on the command line."""
    script = active()
    spec = get_catalog().backend(load_layers(script.layers if script else []).backend)
    if spec.framework == "tensorflow":
        return build_keras_model
    torch.manual_seed(0)
    return build_model()


def main() -> None:
    """Train with defaults that any flag overrides.

    Raises:
        UserError: arguments, which a script of one's own might know.
    """
    if arguments := sys.argv[1:]:
        raise UserError(
            "the bundled example takes no arguments of its own",
            got=" ".join(arguments),
            remedy="Name a script that reads them: --script train.py",
        )
    train, validation = load_digits()
    trainer = Trainer(choose_model(), batch_size=32, epochs=10, learning_rate=2e-3, log_every_n_steps=10)
    history = trainer.fit(train, validation)
    if history.best_accuracy is not None:
        epochs = len(history.epochs)
        print(
            f"best validation accuracy {history.best_accuracy:.4f} after {epochs} epoch{'s' * (epochs != 1)},"
            f" {history.samples_per_second:,.0f} samples/s, {history.total_time:.1f} s in all"
        )


if __name__ == "__main__":
    main()
