"""A network of a chosen size on random numbers: what ``bench scaling`` trains without ``--script``.

python -m distributed.cli train --script distributed/commands/bundled/random_network.py -- --width 512
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

from distributed import Trainer
from distributed.config import load_layers
from distributed.config.script_overlay import active
from distributed.registry.catalog import get_catalog

CLASSES = 10


def build_model(width: int, depth: int) -> nn.Module:
    """`depth` square layers of `width` units, then `CLASSES` outputs."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def build_keras_model(width: int, depth: int) -> Any:
    """The same in Keras."""
    import keras

    layers = [keras.layers.Dense(width, activation="relu") for _ in range(depth)]
    return keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(CLASSES)])


def main() -> None:
    """Train; the flags set the number of epochs and ranks."""
    parser = argparse.ArgumentParser()
    for name, default in (("--width", 256), ("--depth", 4), ("--samples", 8192)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()
    script = active()
    spec = get_catalog().backend(load_layers(script.layers if script else []).backend)
    torch.manual_seed(0)
    x = torch.randn(args.samples, args.width)
    y = torch.randint(0, CLASSES, (args.samples,))
    keras = spec.framework == "tensorflow"
    model: Any = (lambda: build_keras_model(args.width, args.depth)) if keras else None
    Trainer(model or build_model(args.width, args.depth), learning_rate=1e-3).fit((x, y))


if __name__ == "__main__":
    main()
