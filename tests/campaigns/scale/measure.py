"""Real runs of 1 to 16 ranks under pytorch-ddp: what rank 0, the launcher and the disk carry."""

from __future__ import annotations

import json
import resource
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distributed import Trainer
from tests.campaigns.scale.peers import model_of
from tests.campaigns.scale.probe import Probe
from tests.support.training import Die

__all__ = ["measure"]

Results = dict[str, float]
_STEP = ("data", "forward", "backward", "optimizer", "callback")
_STEPS = 4


def measure(size: int) -> Results:
    """Train `size` ranks for an epoch with two log steps, a validation and a save; then kill one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds = _seconds()
        _fit(size, folder, [Probe(name)])
        spent = _seconds() - seconds
        ranks = [json.loads(file.read_text()) for file in sorted(folder.glob("rank_*.json"))]
        if len(ranks) != size:
            raise ValueError(f"{len(ranks)} of {size} ranks have counted")
        found = _counts(ranks[0]) | _disk(folder / "saved", ranks)
        found |= {name: ranks[0][name] for name in ("launcher descriptors", "launcher threads")}
        return found | {"launcher seconds": spent} | (_restart(size) if size > 1 else {})


def _fit(size: int, folder: Path, callbacks: list[Any], **given: Any) -> Any:
    x = torch.randn(size * _STEPS, 4, generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        model_of(2),
        backend="pytorch-ddp",
        num_processes=size,
        device="cpu",
        batch_size=1,
        loss_fn=nn.functional.mse_loss,
        log_every_n_steps=_STEPS // 2,
        epochs=1,
        checkpoint_dir=str(folder / "saved"),
        callbacks=callbacks,
        tracking={"progress": "off"},
        **given,
    )
    trainer.fit((x, x), (x, x))
    return trainer.history


def _seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _counts(rank: dict[str, Any]) -> Results:
    calls, num_bytes, group = rank["calls"], rank["bytes"], rank["group"]
    steps = sum(num_bytes.get(phase, 0) for phase in _STEP)
    return {
        "join calls": rank["joining"],
        "group store calls": sum(group.values()),
        "setup bytes": num_bytes.get("setup", 0),
        "prepare bytes": num_bytes.get("prepare", 0),
        "resume bytes": num_bytes.get("resume", 0),
        "step bytes": steps / max(1, sum(calls.get(phase, 0) for phase in _STEP)),
        "log calls": calls.get("record", 0) / 2,
        "log bytes": num_bytes.get("record", 0) / 2,
        "epoch bytes": num_bytes.get("epoch end", 0),
        "validation bytes": num_bytes.get("validation", 0),
        "save calls": calls.get("save", 0) + calls.get("finish", 0),
        "save bytes": num_bytes.get("save", 0) + num_bytes.get("finish", 0),
        "descriptors": rank["descriptors"],
        "threads": rank["threads"],
        "rank seconds": rank["seconds"],
    }


def _disk(saved: Path, ranks: list[dict[str, Any]]) -> Results:
    checkpoint = next(saved.glob("step_*"))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    return {
        "journals": ranks[0]["journals"],
        "checkpoint files": len(list(checkpoint.iterdir())),
        "manifest bytes": (checkpoint / "manifest.json").stat().st_size,
        "index entries": sum(
            len(json.loads((checkpoint / name).read_text())["chunks"]) for name in manifest["indexes"]
        ),
    }


def _restart(size: int) -> Results:
    """A rank is killed in step 2; all are restarted."""
    with tempfile.TemporaryDirectory() as name:
        death = _DieOnce(name, size - 1)
        history = _fit(
            size, Path(name), [death], elastic={"max_restarts": 1}, checkpoint={"every_n_steps": 1}
        )
        if len(history.restarts) != 1:
            raise ValueError(f"{history.restarts} instead of one restart")
        reports = len(list(Path(name, "saved").glob("failure_report_*")))
        return {"restarts": len(history.restarts), "failure reports": reports}


class _DieOnce(Die):
    """Kill a rank in the first round only."""

    def __init__(self, folder: str, rank: int) -> None:
        super().__init__(2, rank)
        self.mark = Path(folder, "died")

    def on_step_end(self, context: Any) -> None:
        if context.progress.step == self.step and context.world.rank == self.rank and not self.mark.exists():
            self.mark.touch()
            super().on_step_end(context)
