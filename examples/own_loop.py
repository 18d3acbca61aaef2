"""Your own loop: `trainer.train_step(data, target)` is one optimizer step over all ranks.

    python examples/own_loop.py
    torchrun --nproc-per-node 2 examples/own_loop.py

Every rank brings its own samples, equally many or not; the step uses the mean over all of them, with
accumulation, precision and clipping as configured. Data order, validation, checkpoints and tracking
are yours. Flags: there is no `fit` here that the command line could reach, so `train --script` does
not apply; start it plainly (one rank) or with torchrun, srun or mpirun.
"""

from __future__ import annotations

import argparse
import os

import torch

from distributed import Trainer
from distributed.commands.bundled.digits import build_model, load_digits

GLOBAL_BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()

    (x, y), (val_x, val_y) = load_digits()
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    model = build_model()
    trainer = Trainer(model, learning_rate=2e-3, gradient_accumulation_steps=2, gradient_clipping=1.0)

    for epoch in range(args.epochs):
        # The same permutation on every rank; each takes its part of every global batch.
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(GLOBAL_BATCH):
            mine = batch.tensor_split(size)[rank]
            loss = trainer.train_step(x[mine], y[mine])
        if rank == 0:
            print(f"epoch {epoch}  loss {loss:.4f}")

    if rank == 0:
        model.eval()
        with torch.no_grad():
            accuracy = (model(val_x).argmax(1) == val_y).float().mean().item()
        print(f"validation accuracy {accuracy:.4f} on {size} rank(s)")


if __name__ == "__main__":
    main()
