"""How long training stands still for a save: asynchronous, synchronous, and plain `torch.save`.

    OMP_NUM_THREADS=1 python tests/benchmarks/save_stall.py [--gigabytes 0.1 1] [--saves 5] [--ranks 1]

Model and AdamW state of the given size, float32. For an asynchronous save the time counts in which the
training loop does nothing else: copying the state, and learning how the save before ended. The
three are measured in turn in one process, every one to the same folder; a save begins when the one
before is on the disk. Each figure is wall time and, in brackets, processor time of the training thread,
which other programs do not stretch. Bytes are those of the checkpoint's files over its tensors'.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import nn

from distributed import Callback, Trainer
from distributed.checkpoint.reader import PortableReader

LAYERS = 20
EVERY = 2


class Stack(nn.Module):
    """`LAYERS` square layers of which a step uses all, cheaply."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        width = int((parameters / LAYERS) ** 0.5)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.expand(len(x), self.width)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden[:, :2]


def now() -> list[float]:
    return [perf_counter(), thread_time()]


def since(start: list[float]) -> list[float]:
    return [end - begin for begin, end in zip(start, now(), strict=True)]


def typical(times: list[list[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*times, strict=True)]


def shown(times: list[float]) -> str:
    return f"{times[0] * 1e3:.0f} ms ({times[1] * 1e3:.0f})"


class Clock(Callback):
    """Times what the loop spends on saving, and beside it a `torch.save` of the same state."""

    def __init__(self, folder: str, plain: bool) -> None:
        self.folder, self.plain = folder, plain
        self.saves: list[list[float]] = []
        self.torch_saves: list[list[float]] = []

    def on_run_start(self, context: Any) -> None:
        self._depth, self._spent = 0, [0.0, 0.0]
        for name in ("save_if_due", "finish"):
            setattr(context.saver, name, self._timed(getattr(context.saver, name)))

    def _timed(self, method: Any) -> Any:
        def timed(*args: Any, **given: Any) -> Any:
            start = now()
            self._depth += 1
            try:
                return method(*args, **given)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._spent = [a + b for a, b in zip(self._spent, since(start), strict=True)]

        return timed

    def on_step_end(self, context: Any) -> None:
        step = context.progress.step
        if step % EVERY != 1:
            return
        if context.saver.pending is not None:  # enough steps between two saves
            context.saver.pending[0]._thread.join()
            context.finish_saving()
        if step > 1:
            self.saves.append(self._spent)
        self._spent = [0.0, 0.0]
        if self.plain:
            path = os.path.join(self.folder, "plain.pt")
            start = now()
            torch.save(
                {"model": context.model.state_dict(), "optimizer": context.optimizer.state_dict()}, path
            )
            self.torch_saves.append(since(start))
            os.unlink(path)

    def on_run_end(self, context: Any, status: str) -> None:
        text = json.dumps({"saves": self.saves, "torch": self.torch_saves})
        Path(self.folder, "clock.json").write_text(text)


def measure(gigabytes: float, saves: int, ranks: int, asynchronous: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Stack(int(gigabytes * 1e9 / 12))
    with tempfile.TemporaryDirectory(prefix="save-stall-") as folder:
        trainer = Trainer(
            model,
            num_processes=ranks,
            device="cpu",
            batch_size=2,
            optimizer=torch.optim.AdamW,
            callbacks=[Clock(folder, plain=True)],
            checkpoint_dir=os.path.join(folder, "saved"),
            checkpoint={
                "every_n_steps": EVERY,
                "keep_last": 1,
                "asynchronous": asynchronous,
                "keep_best": False,
            },
            tracking={"progress": "off"},
            log_every_n_steps=1000,
            max_steps=EVERY * (saves + 1) + 1,
        )
        x = torch.randn(2 * ranks * EVERY * (saves + 2), 1)
        history = trainer.fit((x, (x[:, 0] > 0).long()))
        found: dict[str, Any] = json.loads(Path(folder, "clock.json").read_text())
        path = Path(str(history.checkpoint))
        reader = PortableReader(str(path))
        tensors = sum(entry.nbytes for entry in reader.entries())
        found["bytes"] = sum(file.stat().st_size for file in path.iterdir()) / tensors
        found["gigabytes"] = tensors / 1e9
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.1, 1.0])
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_args()
    print("| state | torch.save | synchronous | asynchronous: first | later | of torch.save | bytes |")
    print("|---|---|---|---|---|---|---|")
    for gigabytes in args.gigabytes:
        later = measure(gigabytes, args.saves, args.ranks, asynchronous=True)
        waited = measure(gigabytes, args.saves, args.ranks, asynchronous=False)
        plain, stall = typical(later["torch"] + waited["torch"]), typical(later["saves"][1:])
        ratios = [ours / theirs for ours, theirs in zip(stall, plain, strict=True)]
        print(
            f"| {later['gigabytes']:.2f} GB | {shown(plain)} | {shown(typical(waited['saves']))}"
            f" | {shown(later['saves'][0])} | {shown(stall)} | {ratios[0]:.1%} ({ratios[1]:.1%})"
            f" | {later['bytes']:.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
