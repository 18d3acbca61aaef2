"""Records for tests: a small real run, and lines written as a run writes them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from distributed import Trainer
from distributed.interfaces.history import History
from distributed.operations.report.record_format import NAME, VERSION, append
from distributed.operations.report.runs import Run
from distributed.operations.report.stitch import read_runs

__all__ = ["lines", "one_run", "train", "write_attempt", "write_end"]


def train(folder: Path | None, **options: Any) -> tuple[Trainer, History]:
    """80 samples, 10 steps an epoch, validated; `folder` is the checkpoint_dir."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 6, generator=generator)
    y = (x[:, 0] > 0).long()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    defaults = {"global_batch_size": 8, "log_every_n_steps": 2, "gradient_clipping": 1.0, "device": "cpu"}
    if folder is not None:
        defaults["checkpoint_dir"] = str(folder)
    trainer = Trainer(model, **{**defaults, **options})
    return trainer, trainer.fit((x[:80], y[:80]), (x[80:], y[80:]))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / NAME).read_text().splitlines()]


def one_run(folder: Path) -> Run:
    (run,) = read_runs(folder)
    return run


def write_attempt(
    folder: Path,
    attempt: str = "a",
    *,
    run: str = "r",
    steps: range = range(10, 60, 10),
    ranks: int = 2,
    batch: int = 8,
    rate: float = 1000.0,
    config: dict[str, Any] | None = None,
    finish: str | None = "finished",
    process: dict[str, Any] | None = None,
    **start: Any,
) -> None:
    """An attempt that logs at `steps` (the first of which is one interval past where it begins)."""
    begin = steps[0] - (steps.step if len(steps) else 0)
    place = {
        "backend": "pytorch-ddp",
        "world_size": ranks,
        "num_nodes": 1,
        "hosts": ["alpha"],
        "device": "cpu",
        "precision": "fp32",
        "batch": {"batch_size": batch // ranks, "gradient_accumulation_steps": 1, "global_batch_size": batch},
        "step": begin,
        "checkpoint": f"step_{begin:08d}" if begin else None,
    }
    settings = {"backend": "pytorch-ddp", "num_processes": ranks, "epochs": 3, "checkpoint.metric": None}
    settings |= {"checkpoint.mode": "auto", **(config or {})}
    first = {
        "record": VERSION,
        "attempt": attempt,
        "run": run,
        "place": place,
        "config": [[name, value, "flag"] for name, value in settings.items()],
        "versions": {"torch": "2.13.0"},
        "processes": [process or {"host": "alpha", "pid": os.getpid(), "created": 0.0}],
        "script": "train.py",
    }
    append(folder, "start", {**first, **start})
    for step in steps:
        figures = {
            "epoch": 0.0,
            "loss": 1.0 / step,
            "learning_rate": 1e-3,
            "samples_per_second": rate,
            "memory_rss_mb": 300.0 + step,
            "grad_norm": 0.5,
            "time_data": 0.1,
            "time_forward": 0.2,
            "time_backward": 0.3,
            "time_communication": 0.1,
            "time_optimizer": 0.2,
            "time_save": 0.0,
            "time_validation": 0.0,
        }
        append(folder, "log", {"attempt": attempt, "step": step, "figures": figures})
    if finish is not None:
        append(folder, "finish", {"attempt": attempt, "status": finish})


def write_end(folder: Path, run: str = "r", status: str = "finished", **values: Any) -> None:
    append(folder, "end", {"run": run, "status": status, **values})
