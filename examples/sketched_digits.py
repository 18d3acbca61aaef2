"""Handwritten digits with linear layers of thin factors: a third of the weights of the dense model.

    python examples/sketched_digits.py --epochs 8
    python -m distributed.cli train --script examples/sketched_digits.py --num-processes 2
    python -m distributed.cli train --script examples/sketched_digits.py --backend fsdp --num-processes 2

Worth a look:

- a layer's rank is a share of its inputs; one that would save nothing is refused, with the share that would;
- the output layer is so narrow that no rank pays: it stays dense;
- `--frozen` keeps half of each factor as it was drawn. It comes from a seed, so that ranks hold the same
  one without sending it, and `SynchronizeSketches` would say if they did not.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import torch
from distributed_kernels import SketchedMLP
from distributed_plugins.sketch_sync import SynchronizeSketches

from distributed import Trainer
from distributed.commands.bundled.digits import load_digits

HIDDEN = [256, 256]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--frozen", action="store_true", help="train one half of each factor alone")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = SketchedMLP(64, HIDDEN, 10, [0.5, 0.125, None], train_both=not args.frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sizes = [64, *HIDDEN, 10]
    dense = sum((into + 1) * out for into, out in pairwise(sizes))
    trained = sum(p.numel() for p in model.parameters())

    trainer = Trainer(
        model,
        optimizer=optimizer,
        global_batch_size=64,
        epochs=args.epochs,
        callbacks=[SynchronizeSketches(every_n_steps=100)],
        log_every_n_steps=10,
    )
    history = trainer.fit(*load_digits())
    if history.best_accuracy is not None:
        print(
            f"best validation accuracy {history.best_accuracy:.4f} on {history.world_size} rank(s), with"
            f" {trained:,} trained parameters where the dense model has {dense:,}"
        )


if __name__ == "__main__":
    main()
