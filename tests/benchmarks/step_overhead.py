"""What the facade costs: microseconds per step over a hand-written DDP loop.

    OMP_NUM_THREADS=1 python tests/benchmarks/step_overhead.py [--width 64] [--data dataset|tensors]

Both loops live in one process and take turns, a block of steps each, so that whatever else
the machine does hits both alike. The ratio is the median over pairs of blocks, with a
bootstrap confidence interval. "cpu" is the same for the processor time of the thread that
trains, which waiting for a core or for another rank does not lengthen. `--contender` names one
of trainer, fabric, accelerate, lightning, or all. For two ranks, whose loops take turns as well:

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 tests/benchmarks/step_overhead.py --contender trainer
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

BATCH = 32
SAMPLES = 64_000
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))


class Turns:
    """Two threads that take turns, `steps` steps each.

    Args:
        cpu_clock: seconds of processor time of the calling thread, or of the process.

    Attributes:
        seconds: of every block, by thread.
        cpu: seconds of processor time of every block, by thread.
    """

    def __init__(self, steps: int, blocks: int, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        self.steps, self.blocks, self.cpu_clock = steps, blocks, cpu_clock
        self._locks = [threading.Semaphore(0), threading.Semaphore(0)]
        self.base_is_ready = threading.Event()
        self.seconds: list[list[float]] = [[], []]
        self.cpu: list[list[float]] = [[], []]

    def clock(self, who: int) -> Callable[[], bool]:
        """Call the result after every step; it returns True when enough has been measured."""
        done, start, cpu_start = 0, 0.0, 0.0
        seconds, cpu, locks, steps = self.seconds[who], self.cpu[who], self._locks, self.steps
        cpu_clock = self.cpu_clock
        # Collectives of both set-ups must not mix: the base loop waits until the other is ready.
        if who == 0:
            self.base_is_ready.set()
        else:
            locks[0].release()
        locks[who].acquire()
        start, cpu_start = time.perf_counter(), cpu_clock()

        def tick() -> bool:
            nonlocal done, start, cpu_start
            done += 1
            if done % steps:
                return False
            cpu.append(cpu_clock() - cpu_start)
            seconds.append(time.perf_counter() - start)
            locks[1 - who].release()
            if len(seconds) >= self.blocks:
                return True
            locks[who].acquire()
            start, cpu_start = time.perf_counter(), cpu_clock()
            return False

        return tick


class Samples(Dataset[Any]):
    """Samples fetched one by one, as from most datasets."""

    def __init__(self, tensors: tuple[Tensor, Tensor]) -> None:
        self.x, self.y = tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def make_data(kind: str, width: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    tensors = (torch.randn(SAMPLES, width, generator=generator), torch.randint(0, 10, (SAMPLES,)))
    dataset: Dataset[Any] = TensorDataset(*tensors) if kind == "tensors" else Samples(tensors)
    return DataLoader(dataset, batch_size=BATCH, shuffle=True)


def make_model(width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def raw(turns: Turns, who: int, args: argparse.Namespace) -> None:
    """The loop that everybody writes."""
    model = make_model(args.width, args.depth)
    if not args.no_ddp:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch_loop(model, optimizer, args, turns.clock(who))


def torch_loop(model: nn.Module, optimizer: Any, args: argparse.Namespace, tick: Callable[[], bool]) -> None:
    """Steps until `tick` has enough."""
    loader = make_data(args.data, args.width)
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if tick():
                return


def trainer(turns: Turns, who: int, args: argparse.Namespace) -> None:
    """Ours, all default callbacks on."""
    from distributed import Callback, Trainer

    class Clock(Callback):
        all_ranks = True

        def on_run_start(self, context: Any) -> None:
            self.tick = turns.clock(who)

        def on_step_end(self, context: Any) -> None:
            if self.tick():
                raise SystemExit

    model = make_model(args.width, args.depth)
    mine = Trainer(model, device="cpu", callbacks=[Clock()], learning_rate=1e-3, weight_decay=0.01)
    try:
        mine.fit(make_data(args.data, args.width), epochs=1000)
    except SystemExit:
        return


def fabric(turns: Turns, who: int, args: argparse.Namespace) -> None:
    from lightning.fabric import Fabric

    fab = Fabric(accelerator="cpu", devices=WORLD, strategy="ddp")
    fab.launch()
    net = make_model(args.width, args.depth)
    model, optimizer = fab.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    loader = fab.setup_dataloaders(make_data(args.data, args.width))
    tick = turns.clock(who)
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            fab.backward(loss)
            optimizer.step()
            if tick():
                return


def accelerate(turns: Turns, who: int, args: argparse.Namespace) -> None:
    from accelerate import Accelerator

    acc = Accelerator(cpu=True)
    net = make_model(args.width, args.depth)
    model, optimizer, loader = acc.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-3), make_data(args.data, args.width)
    )
    tick = turns.clock(who)
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            acc.backward(loss)
            optimizer.step()
            if tick():
                return


def lightning(turns: Turns, who: int, args: argparse.Namespace) -> None:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model(args.width, args.depth)

        def training_step(self, batch: Any, index: int) -> Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Clock(L.Callback):
        def on_train_start(self, *_: Any) -> None:
            self.tick = turns.clock(who)

        def on_train_batch_end(self, *_: Any) -> None:
            if self.tick():
                raise SystemExit

    mine = L.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp",
        max_epochs=1000,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Clock()],
    )
    try:
        mine.fit(Module(), make_data(args.data, args.width))
    except SystemExit:
        return


CONTENDERS = {f.__name__: f for f in (trainer, fabric, accelerate, lightning)}


def interval(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """(median ratio, low, high): 95 % bootstrap over pairs of neighbouring blocks."""
    ratios = [theirs / base for base, theirs in pairs]
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[50], medians[-51]


def compare(turns: Turns) -> dict[str, dict[str, float]]:
    """Microseconds of a step by hand and of ours, median ratio and its interval, for ``wall`` and ``cpu``."""
    warm = max(3, turns.blocks // 10)
    found = {}
    for name, blocks in (("wall", turns.seconds), ("cpu", turns.cpu)):
        pairs = list(zip(blocks[0][warm:], blocks[1][warm:], strict=False))
        ratio, low, high = interval(pairs)
        raw, ours = (1e6 * statistics.median(part) / turns.steps for part in zip(*pairs, strict=True))
        added = 1e6 * statistics.median(theirs - base for base, theirs in pairs) / turns.steps
        found[name] = {"raw": raw, "ours": ours, "added": added, "ratio": ratio, "low": low, "high": high}
    return found


def report(name: str, found: dict[str, dict[str, float]]) -> None:
    """Print a line for each of the two times."""
    for kind, row in found.items():
        print(
            f"{name:<20} {kind:<4}  by hand {row['raw']:7.0f} us   with {row['ours']:7.0f} us"
            f"   {row['added']:+7.1f} us   ratio {row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]",
            flush=True,
        )


def measure(args: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if WORLD > 1:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    turns = Turns(args.steps, args.blocks)
    base = threading.Thread(target=raw, args=(turns, 0, args), daemon=True)
    base.start()
    turns.base_is_ready.wait()
    CONTENDERS[args.contender](turns, 1, args)
    base.join()
    if not RANK:
        report(args.contender, compare(turns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contender", default="all", choices=["all", *CONTENDERS])
    parser.add_argument("--data", default="dataset", choices=["dataset", "tensors"])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50, help="steps per block")
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--no-ddp", action="store_true", help="raw loop without DDP's wrapper")
    args = parser.parse_args()
    if args.contender != "all":
        measure(args)
        sys.stdout.flush()
        os._exit(0)
    for name in CONTENDERS:
        subprocess.run([sys.executable, __file__, "--contender", name, *sys.argv[1:]], check=True)


if __name__ == "__main__":
    main()
