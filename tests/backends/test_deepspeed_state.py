"""deepspeed: checkpoints of every stage to and from every other backend, and models that come back whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distributed import Callback, Trainer
from distributed.checkpoint.reader import PortableReader
from distributed.interfaces.callback import Context
from distributed.testing.conformance import distance
from distributed.testing.pool import RankPool
from tests.backends.fsdp_model import tiny, trainer_of, words

EXACT = 1e-9
BEFORE, AFTER = 6, 10
OFFLOAD = {"offload_optimizer": "cpu"}
PLACES: dict[str, dict[str, Any]] = {
    "zero-0": {"zero_stage": 0},
    "zero-1": {"zero_stage": 1},
    "zero-2": {"zero_stage": 2},
    "zero-3": {"zero_stage": 3},
    "zero-1-offload": {"zero_stage": 1, "zero": OFFLOAD},
    "zero-2-offload": {"zero_stage": 2, "zero": OFFLOAD},
    "zero-3-offload": {"zero_stage": 3, "zero": {**OFFLOAD, "offload_parameters": "cpu"}},
    # The least that stage 3 gathers at once and steps at once, as large models have it.
    "zero-3-parts": {
        "zero_stage": 3,
        "deepspeed_config": {
            "zero_optimization": {
                "sub_group_size": 30,
                "stage3_param_persistence_threshold": 0,
                "stage3_prefetch_bucket_size": 0,
                "stage3_max_live_parameters": 0,
                "stage3_max_reuse_distance": 0,
                "reduce_bucket_size": 20,
            }
        },
    },
}


class HoldsWhatWasSaved(Callback):
    """Fails where a rank, having loaded a checkpoint, would save other bits or not all of it."""

    all_ranks = True

    def __init__(self, path: str) -> None:
        self.path = path

    def on_run_start(self, context: Context) -> None:
        backend: Any = context.backend  # type: ignore[attr-defined]
        reader, state = PortableReader(self.path), backend.export_state()
        sizes: dict[str, int] = {}
        for chunk in state.chunks:
            stored = reader.read(chunk.key, chunk.name, chunk.start, len(chunk.data))
            assert torch.equal(stored, chunk.data), (chunk.key, chunk.name)
            assert reader.tensors()[chunk.key, chunk.name] == chunk.shape
            sizes[f"{chunk.key} {chunk.name}"] = sizes.get(f"{chunk.key} {chunk.name}", 0) + len(chunk.data)
        ranks = backend.gather_objects((sizes, state.scalars))
        for (key, name), shape in reader.tensors().items():
            found = sum(part.get(f"{key} {name}", 0) for part, _ in ranks)
            assert found == torch.Size(shape).numel(), (key, name)
        assert ranks[0][1] == reader.scalars
        assert [group["names"] for group in state.groups] == [group["names"] for group in reader.groups]


def trainer(place: tuple[str, int], pool: RankPool, model: nn.Module | None = None, **given: Any) -> Trainer:
    name, ranks = place
    if name in PLACES:
        return trainer_of("deepspeed", ranks, pool, model, **PLACES[name], **given)
    return trainer_of(name, ranks, pool, model, **given)


@pytest.fixture(scope="module")
def uninterrupted() -> nn.Module:
    """Sixteen steps of one process."""
    model = tiny()
    trainer(("serial", 1), RankPool(), model).fit(words(), max_steps=BEFORE + AFTER)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPool) -> Any:
    """(place, ranks) -> the checkpoint that they left after six steps."""
    paths: dict[tuple[str, int], str] = {}

    def path_of(place: str, ranks: int) -> str:
        if (place, ranks) not in paths:
            given = {
                "checkpoint_dir": str(tmp_path_factory.mktemp("saved")),
                "checkpoint": {"every_n_steps": BEFORE},
            }
            found = trainer((place, ranks), rank_pool, **given).fit(words(), max_steps=BEFORE).checkpoint
            assert found
            paths[place, ranks] = found
        return paths[place, ranks]

    return path_of


PAIRS = [
    (("serial", 1), ("zero-1", 2)),
    (("serial", 1), ("zero-3", 3)),
    (("pytorch-ddp", 3), ("zero-2", 2)),
    (("pytorch-ddp", 2), ("zero-3-offload", 2)),
    (("fsdp", 2), ("zero-3", 2)),
    (("fsdp", 3), ("zero-1-offload", 2)),
    (("zero-0", 2), ("zero-3", 1)),
    (("zero-1", 3), ("serial", 1)),
    (("zero-1", 2), ("zero-3-parts", 3)),
    (("zero-2", 2), ("fsdp", 3)),
    (("zero-2", 3), ("zero-2-offload", 2)),
    (("zero-3", 2), ("pytorch-ddp", 3)),
    (("zero-3", 3), ("zero-1", 1)),
    (("zero-3", 3), ("zero-3", 2)),
    (("zero-3-parts", 3), ("zero-0", 2)),
    (("zero-3-offload", 2), ("zero-2", 3)),
    (("zero-2-offload", 3), ("zero-3-offload", 3)),
    (("zero-1-offload", 2), ("serial", 1)),
]


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda place: f"{place[0]}-on-{place[1]}")
def test_any_stage_goes_on_from_any_backend(
    first: tuple[str, int], second: tuple[str, int], saved: Any, uninterrupted: nn.Module, rank_pool: RankPool
) -> None:
    """The same bits by name after loading; ten steps later the weights of a run never interrupted."""
    path = saved(*first)
    model = tiny()
    resumed = trainer(second, rank_pool, model, resume_from_checkpoint=path)
    resumed.callbacks = [HoldsWhatWasSaved(path)]
    history = resumed.fit(words(), max_steps=BEFORE + AFTER)
    assert history.steps["step"] == list(range(BEFORE + 1, BEFORE + AFTER + 1))
    assert distance(model, uninterrupted) < EXACT
