"""A training script without our Trainer: nothing but torch.distributed.

    python -m distributed.cli train --launch per-rank --num-processes 2 --script examples/raw_torchrun.py
    torchrun --nproc-per-node 2 examples/raw_torchrun.py

Scripts that already work under torchrun need no change: `--launch per-rank` starts them with the same
environment variables, names the rank that fails first, and leaves no process behind. What the Trainer
guarantees is not there: this loop repeats samples to make the ranks' shares even (DistributedSampler
pads), and weighs a ragged last batch like a full one.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from distributed.commands.bundled.digits import build_model, load_digits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-epochs", type=int, default=8)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    train, (val_x, val_y) = load_digits()

    torch.manual_seed(0)
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    dataset = TensorDataset(*train)
    sampler: DistributedSampler[object] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)

    for epoch in range(args.num_epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    with torch.no_grad():  # on every rank: after a reduction all hold the same weights
        accuracy = (model.module(val_x).argmax(1) == val_y).float().mean().item()
    if dist.get_rank() == 0:
        print(f"validation accuracy {accuracy:.4f} on {dist.get_world_size()} rank(s)")
    # No destroy_process_group(): gloo's threads would have to end while this one holds the interpreter's
    # lock, for which one of them may wait after the last reduction. Some runs hang then (torch 2.13).


if __name__ == "__main__":
    main()
