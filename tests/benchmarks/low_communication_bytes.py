"""Bytes that a rank sends in a step, by mode: ``python -m tests.benchmarks.low_communication_bytes``.

Two CPU ranks train a perceptron of 0.79 million parameters in float32. The kernel's own count of written
bytes (``wchar`` of /proc/self/io) is read after steps 20 and 60, so that whole periods lie between.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from distributed import Callback, Trainer

SECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "local-sgd": {"mode": "local-sgd", "period": 10},
    "diloco": {"mode": "diloco", "period": 20},
    "streaming-diloco": {"mode": "streaming-diloco", "period": 20, "fragments": 4, "overlap_steps": 2},
    "diloco, int8": {"mode": "diloco", "period": 20},
}
FIRST, LAST = 20, 60


class Written(Callback):
    """Write the bytes of rank 0 in a step into a file."""

    def __init__(self, file: Path) -> None:
        self.file, self.before = file, 0

    def on_step_end(self, context: Any) -> None:
        if context.progress.step == FIRST:
            self.before = _written()
        if context.progress.step == LAST:
            self.file.write_text(str((_written() - self.before) / (LAST - FIRST)), encoding="utf-8")


def _written() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("wchar")).split()[1])


def measure(name: str, folder: Path) -> float:
    """Bytes in a step of a run with the section `name`."""
    layers = nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)
    draw = torch.Generator().manual_seed(0)
    data = torch.randn(1280, 256, generator=draw), torch.randint(10, (1280,), generator=draw)
    file = folder / "bytes"
    Trainer(
        nn.Sequential(*layers),
        num_processes=2,
        device="cpu",
        global_batch_size=16,
        log_every_n_steps=1000,
        low_communication=SECTIONS[name],
        compression={"codec": "int8" if name.endswith("int8") else "none"},
        callbacks=[Written(file)],
        tracking={"progress": "off"},
    ).fit(data)
    return float(file.read_text(encoding="utf-8"))


def main() -> None:
    """Print a row for each section."""
    from tempfile import TemporaryDirectory

    dense = 0.0
    for name, section in SECTIONS.items():
        with TemporaryDirectory() as folder:
            found = measure(name, Path(folder))
        dense = dense or found
        settings = ", ".join(f"{key} {value}" for key, value in section.items() if key != "mode")
        print(f"| {name} | {settings} | {found / 1e6:.4f} | {found / dense:.4f} |")


if __name__ == "__main__":
    main()
