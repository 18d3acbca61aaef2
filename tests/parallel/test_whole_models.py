"""Ranks that divide a model give it back whole: to callbacks, and to a script that a launcher started."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import Callback
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.parallel.models import ENTRIES
from tests.parallel.test_tensor_parallel import DATA, difference, reference, trainer_of
from tests.support import commands
from tests.support.ports import free_port

pytest.importorskip("transformers")

STEPS = 10


class Sees(Callback):
    """Fails a run whose whole model has other weights than one process came to."""

    all_ranks = True

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights

    def on_step_end(self, context: Any) -> None:
        if context.progress.step != STEPS:
            return
        parts = [id(p) for p in context.model.parameters()]
        with context.whole_model() as model:
            assert difference(model, self.weights) < EXACT
            inputs = DATA[0][:2]
            output = model(inputs)
            assert torch.isfinite(getattr(output, "logits", output)).all()
        assert parts == [id(p) for p in context.model.parameters()]


@pytest.mark.parametrize("name", ["llama tied", "dilated", "sketched"])
@pytest.mark.parametrize("backend", ["pytorch-ddp", "fsdp"])
def test_a_callback_sees_the_whole_model(backend: str, name: str, rank_pool: RankPool) -> None:
    entry = ENTRIES[name]
    mesh = {"tensor": 2, **({"tensor_plan": entry.plan} if entry.plan else {})}
    trainer = trainer_of(entry.build(), backend, 4, rank_pool, mesh)
    trainer.callbacks = [Sees(reference(name, entry.build).weights)]
    trainer.fit(DATA, max_steps=STEPS)


SCRIPT = """
import json, os, sys, torch
from functools import partial
from torch import nn
from distributed import Trainer
from tests.parallel.models import ENTRIES, tokens

model = ENTRIES["llama tied"].build()
before = [(name, id(p), type(p)) for name, p in model.named_parameters()]
kinds = [type(m) for m in model.modules()]
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
trainer = Trainer(
    model, optimizer=optimizer, device="cpu", global_batch_size=8, gradient_clipping=0.5, backend=sys.argv[1],
    parallel=json.loads(sys.argv[3]), tracking={"progress": "off"},
)
for steps in (4, 6):
    trainer.fit(tokens(21), max_steps=steps)
    assert [(name, id(p), type(p)) for name, p in model.named_parameters()] == before
    assert [type(m) for m in model.modules()] == kinds
    assert not any("forward" in vars(m) for m in model.modules())
    for p, slots in optimizer.state.items():
        assert slots["exp_avg"].shape == slots["exp_avg_sq"].shape == p.shape
model.eval()
with torch.no_grad():
    model(tokens(2)[0])
if os.environ["RANK"] == "0":
    torch.save({n: p.detach() for n, p in model.named_parameters()}, sys.argv[2])
"""


MESHES = {"pytorch-ddp": {"tensor": 2, "pipeline": 2}, "fsdp": {"tensor": 2}}


@pytest.mark.starts_processes
@pytest.mark.parametrize("backend", list(MESHES))
def test_ranks_of_torchrun_get_their_own_model_back(backend: str, tmp_path: Path) -> None:
    """The same parameters, classes and optimizer, whole; and a second fit continues with them."""
    script, saved = tmp_path / "train.py", tmp_path / "weights.pt"
    script.write_text(SCRIPT)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    words = ["-m", "torch.distributed.run", "--nproc-per-node=4", "--master-port", str(free_port())]
    done = commands.run(
        [sys.executable, *words, str(script), backend, str(saved), json.dumps(MESHES[backend])],
        env=env,
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    weights = torch.load(saved)
    expected = reference("llama tied", ENTRIES["llama tied"].build).weights
    assert max(float((weights[name] - w).abs().max()) for name, w in expected.items()) < EXACT
