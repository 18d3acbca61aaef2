"""Three axes at once, and axes of 4 and 8: one pool of eight ranks, and all checks in it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from distributed.interfaces.parallel_dims import ParallelDims
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.parallel.models import ENTRIES, train_plainly
from tests.parallel.places import OPTIONS, trainer_at
from tests.parallel.test_mesh_memory import Weighing
from tests.parallel.test_tensor_parallel import DATA, STEPS, difference, reference, trainer_of


@pytest.mark.parametrize(
    ("backend", "dims", "name"),
    [
        ("fsdp", ParallelDims(data=2, shard=2, tensor=2), "llama tied"),
        ("pytorch-ddp", ParallelDims(data=4, tensor=2), "llama tied"),
        ("pytorch-ddp", ParallelDims(data=2, tensor=4), "dilated"),
        ("fsdp", ParallelDims(shard=2, tensor=4), "bert with a plan"),
        ("pytorch-ddp", ParallelDims(tensor=8), "perceptron"),
        ("pytorch-ddp", ParallelDims(data=2, context=2, tensor=2), "llama tied"),
    ],
    ids=str,
)
def test_eight_ranks_train_as_one_process_does(
    backend: str, dims: ParallelDims, name: str, rank_pool: RankPool
) -> None:
    """With the bytes on each rank that the formula gives, for the model that it is written for."""
    entry = ENTRIES[name]
    model = entry.build()
    parallel = {axis: dims.size(axis) for axis in ("data", "context", "tensor")} | {"tensor_plan": entry.plan}
    weighing = partial(Weighing, dims=dims, eps=1e-4)
    plain = partial(torch.optim.AdamW, eps=1e-4)
    optimizer = weighing if name == "llama tied" else plain
    history = trainer_of(model, backend, 8, rank_pool, parallel, optimizer=optimizer).fit(
        DATA, max_steps=STEPS
    )
    assert history.batch["data_parallel_size"] == dims.data_parallel_size
    assert difference(model, reference(name, entry.build).weights) < EXACT


def test_a_checkpoint_of_three_axes_continues_in_one_process(rank_pool: RankPool, tmp_path: Path) -> None:
    """And its checkpoint on the three axes again."""
    build = ENTRIES["dilated"].build
    for number, place in enumerate(("data 2 x shard 2 x tensor 2", "serial", "data 2 x shard 2 x tensor 2")):
        model = build()
        history = trainer_at(place, model, rank_pool, tmp_path).fit(DATA, max_steps=4 * number + 4)
        assert history.steps["step"] == list(range(4 * number + 1, 4 * number + 5))
    assert difference(model, train_plainly(build(), DATA, steps=12, **OPTIONS).weights) < EXACT
