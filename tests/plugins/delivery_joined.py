"""Trains with a tracker on joined ranks, for test_delivery_joined."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distributed import Trainer
from distributed.interfaces.tracker import Tracker
from tests.support.training import Die, make_trainer

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
DATA = (X, X[:, :2].argmax(dim=1))


def trainer(folder: Path, uri: str | None, **given: Any) -> Trainer:
    torch.manual_seed(0)
    fields = {
        "mlflow_tracking": uri is not None,
        "tracking": {"progress": "off", "mlflow_tracking_uri": uri},
        "checkpoint": {"every_n_steps": 4, "asynchronous": False},
        "backend": "pytorch-ddp",
        "global_batch_size": 4,
    }
    return make_trainer(nn.Linear(3, 2), 2, folder=folder, **{**fields, **given})


def weights_of(made: Trainer) -> list[list[float]]:
    return [parameter.tolist() for parameter in made.model.parameters()]


def report(name: str, made: Trainer) -> None:
    print(
        json.dumps({"name": name, "rank": int(os.environ["RANK"]), "weights": weights_of(made)}), flush=True
    )


def main(phase: str, path: str, stores: str) -> None:
    """Train; each rank prints the weights of each training, and rank 0 dies at the end of the first phase."""
    folder, uris = Path(path), json.loads(stores)
    if phase == "again":
        made = trainer(folder / "killed", uris["killed"], resume_from_checkpoint=True)
        made.fit(DATA)
        report("killed", made)
        return
    made = trainer(folder / "plain", None)
    made.fit(DATA)
    report("plain", made)
    Tracker.limit = 0.2
    made = trainer(folder / "silent", uris["silent"])
    made.fit(DATA)
    report("silent", made)
    Tracker.limit = 6.0
    made = trainer(folder / "second", uris["second"])
    made.fit(DATA, max_steps=5)
    made.fit(DATA, max_steps=7)
    report("second", made)
    trainer(folder / "resumed", uris["resumed"]).fit(DATA, max_steps=6)
    made = trainer(folder / "resumed", uris["resumed"], resume_from_checkpoint=True)
    made.fit(DATA)
    report("resumed", made)
    trainer(folder / "killed", uris["killed"], callbacks=[Die(8, 0)]).fit(DATA)


if __name__ == "__main__":
    main(*sys.argv[1:])
