"""A script on the ranks of torchrun that uses the names of hand-written loops (test_communication_names)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from distributed import (
    CustomCommunication,
    OverlappedTrainer,
    cleanup_distributed,
    profile_communication,
    profile_communication_overhead,
    setup_distributed,
)
from distributed.cli import main

world = setup_distributed(device="cpu")
own = torch.arange(3) + world.rank

# allreduce_example, allgather_example and broadcast_example as one line each
summed = own.clone()
dist.all_reduce(summed)
gathered = [torch.empty_like(own) for _ in range(world.size)]
dist.all_gather(gathered, own)
broadcast = own.clone()
dist.broadcast(broadcast, src=0)

ring = CustomCommunication(world_size=world.size, rank=world.rank).ring_allreduce(own.clone())

torch.manual_seed(0)
model = nn.Linear(3, 2).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
trainer = OverlappedTrainer(model, optimizer, world.size, device="cpu")
x = torch.arange(24.0, dtype=torch.float64).reshape(8, 3) / 24
part = slice(4 * world.rank, 4 * world.rank + 4)
losses = [trainer.train_step_overlapped(x[part], (torch.arange(8) % 2)[part]) for _ in range(3)]

rows = [profile_communication([1024, 4096], iterations=2), profile_communication_overhead([2048])]
result = {
    "allreduce": summed.tolist(),
    "allgather": [values.tolist() for values in gathered],
    "broadcast": broadcast.tolist(),
    "ring": ring.tolist(),
    "weights": model.weight.tolist(),
    "losses": losses,
    "sizes": [[row.nbytes for row in found] for found in rows],
}
(Path(sys.argv[1]) / f"{world.rank}.json").write_text(json.dumps(result))
cleanup_distributed()

# The command on the ranks of torchrun. In this process, because starting ranks takes most of a test's time.
flags = ["--operations", "all_reduce,broadcast", "--max-bytes", "1K", "--device", "cpu"]
sys.exit(main(["bench", "comm", *flags]))
