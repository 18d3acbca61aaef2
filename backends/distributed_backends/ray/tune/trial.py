"""One trial, in an actor of Ray Tune."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray import tune

from distributed.communication.task_file import load_task
from distributed.operations.tuning.trial import ORDER, Session, TrialOrder, run_trial


class _RaySession(Session):
    def __init__(self, name: str, checkpoint: str | None) -> None:
        self.name, self.checkpoint = name, checkpoint

    def report(self, figures: Mapping[str, Any], checkpoint: str | None) -> None:
        saved = tune.Checkpoint.from_directory(checkpoint) if checkpoint else None
        tune.report(dict(figures), checkpoint=saved)


def run(order: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    """Run the trial that this actor was made for, with the sampled `parameters`."""
    if os.path.isdir(order["cwd"]):
        os.chdir(order["cwd"])
    told: TrialOrder = load_task(Path(order["folder"], ORDER))
    # Ray counts a thread for each CPU of the trial; its ranks have one CPU each.
    os.environ["OMP_NUM_THREADS"] = "1"
    # Trials may follow one another in a process, and each begins in the same way.
    random.seed(order["seed"])
    np.random.seed(order["seed"] % 2**32)
    torch.manual_seed(order["seed"])
    name, checkpoint = str(tune.get_context().get_trial_id()), tune.get_checkpoint()
    with checkpoint.as_directory() if checkpoint else nullcontext() as path:
        run_trial(told, parameters, _RaySession(name, path))
