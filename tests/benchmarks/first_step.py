"""Seconds from the command to the first optimizer step, for each backend.

    python tests/benchmarks/first_step.py [--backend NAME ...] [--ranks 2] [--rounds 3]

The command is ``python -m distributed.cli train --backend NAME --num-processes RANKS`` on the bundled
digits. Beside it, in the same turns: torchrun with a hand-written DDP loop on as many ranks over data
of the same shape, the least that PyTorch itself can do. Figures are the least of all rounds, and the
ratio to torchrun's.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

RAW = """
import os, time, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.rand(1437, 64), torch.randint(0, 10, (1437,)))
sampler = torch.utils.data.DistributedSampler(data)
for x, y in torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler):
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print("first step", time.time(), flush=True)
    os._exit(0)
"""

SCRIPT = """
import time
from distributed import Callback
from distributed.commands.script import bundled_script
import distributed.trainer

class First(Callback):
    def on_step_end(self, context):
        print("first step", time.time(), flush=True)

class Timed(distributed.trainer.Trainer):
    def __init__(self, *args, **given):
        super().__init__(*args, **given)
        self.callbacks.append(First())

import distributed
distributed.trainer.Trainer = distributed.Trainer = Timed
source = bundled_script()
exec(compile(source.read_text(), str(source), "exec"), {"__name__": "__main__"})
"""


def first_step(command: list[str], cwd: str) -> float:
    """Seconds from starting `command` to the moment that its rank 0 said ``first step``."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": cwd}
    start = time.time()
    done = subprocess.run(
        command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    said = [line for line in done.stdout.splitlines() if "first step" in line]
    if not said:
        raise SystemExit(f"{command} took no step:\n{done.stdout[-2000:]}")
    return float(said[0].split("first step")[1].split()[0]) - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = ["serial", "pytorch-ddp", "fsdp", "deepspeed", "horovod", "ray", "tensorflow"]
    parser.add_argument("--backend", nargs="*", default=names)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        Path(folder, "raw.py").write_text(RAW)
        Path(folder, "timed.py").write_text(SCRIPT)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={args.ranks}"]
        commands = {"torchrun, by hand": [*torchrun, "--master-port", port, "raw.py"]}
        for name in args.backend:
            ranks = "1" if name == "serial" else str(args.ranks)
            given = ["--backend", name, "--num-processes", ranks, "--max-steps", "2"]
            commands[name] = [
                sys.executable, "-m", "distributed.cli", "train", "--script", "timed.py", *given,
            ]  # fmt: skip
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(args.rounds):
            for name, command in commands.items():
                seconds[name].append(first_step(command, folder))
    base = min(seconds["torchrun, by hand"])
    print(f"{args.ranks} ranks, least of {args.rounds}")
    for name, found in seconds.items():
        print(f"{name:<20} {min(found):6.2f} s   ratio {min(found) / base:.2f}")


if __name__ == "__main__":
    main()
