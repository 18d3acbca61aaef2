"""fsdp: a model from a factory is built by one rank, and the others hold their shards alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import Callback
from distributed.interfaces.callback import Context
from distributed.testing.conformance import distance
from distributed.testing.rank_pool import RankPool
from tests.backends.fsdp_model import TinyLM, trainer_of, words
from tests.backends.test_fsdp_state import check_weights, together
from tests.support.ports import free_port

STEPS = 5
BUILT_ON: list[str] = []


class Rotated(TinyLM):
    """With a buffer that is computed while building and saved nowhere, as rotary tables are."""

    turn: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.linspace(0.5, 1.5, 7), persistent=False)
        BUILT_ON.append(str(self.embed.weight.device))

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(words) * self.turn) * self.heat
        return logits


class KeepsATable(Rotated):
    """With a tensor that is neither parameter nor buffer, which nobody could fill."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.linspace(0.9, 1.1, 7)

    def features(self, words: Tensor) -> Tensor:
        return super().features(words) * self.table


class ReadsItsWeights(Rotated):
    """Whose building needs values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = float(self.embed.weight.detach().norm())

    def features(self, words: Tensor) -> Tensor:
        return super().features(words) / self.norm


def rotated() -> nn.Module:
    return Rotated().double()


def keeps_a_table() -> nn.Module:
    model = KeepsATable().double()
    model.table = model.table.double()
    return model


def reads_its_weights() -> nn.Module:
    return ReadsItsWeights().double()


class WhereBuilt(Callback):
    """Fails unless each rank built its model on the device expected of it."""

    all_ranks = True

    def __init__(self, others: str) -> None:
        self.others = others

    def on_run_start(self, context: Context) -> None:
        # One that needs values is begun on the meta device, and built on the CPU.
        assert BUILT_ON[-1] == ("cpu" if context.world.rank == 0 else self.others)
        assert not any(t.is_meta for t in context.model.state_dict().values())


def serially(factory: Any) -> tuple[nn.Module, Any]:
    trainer = trainer_of("serial", model=factory)
    history = trainer.fit(words(), words(5), max_steps=STEPS)
    return trainer.model, history


@pytest.mark.parametrize(
    ("ranks", "fsdp"), [(2, {}), (3, {"wrap": "whole"}), (4, {"replicate": 2}), (2, {"cpu_offload": True})]
)
def test_one_rank_builds_for_all(ranks: int, fsdp: dict[str, Any], rank_pool: RankPool) -> None:
    expected, before = serially(rotated)
    trainer = trainer_of("fsdp", ranks, rank_pool, rotated, fsdp=fsdp)
    trainer.callbacks = [WhereBuilt("meta")]
    history = trainer.fit(words(), words(5), max_steps=STEPS)
    assert distance(trainer.model, expected) < 1e-9
    assert history.steps["loss"] == pytest.approx(before.steps["loss"], abs=1e-9)
    assert history.epochs[-1]["val_loss"] == pytest.approx(before.epochs[-1]["val_loss"], abs=1e-9)


@pytest.mark.parametrize("factory", [keeps_a_table, reads_its_weights])
def test_what_cannot_be_built_without_data_is_built_with_it(factory: Any, rank_pool: RankPool) -> None:
    expected, _ = serially(factory)
    trainer = trainer_of("fsdp", 2, rank_pool, factory)
    trainer.callbacks = [WhereBuilt("cpu")]
    trainer.fit(words(), max_steps=STEPS)
    assert distance(trainer.model, expected) < 1e-9


def test_a_second_fit_goes_on(rank_pool: RankPool) -> None:
    whole = trainer_of("fsdp", 2, rank_pool, rotated)
    whole.fit(words(), max_steps=6)
    parts = trainer_of("fsdp", 2, rank_pool, rotated)
    parts.fit(words(), max_steps=2)
    parts.fit(words(), max_steps=4)
    assert distance(whole.model, parts.model) < 1e-9


JOINED = """
import json, os
import torch
from distributed import FSDPTrainer
from tests.backends.fsdp_model import two_groups, words
from tests.backends.test_fsdp_factory import WhereBuilt, rotated

options = {"global_batch_size": 12, "gradient_clipping": 0.5, "device": "cpu"}
trainer = FSDPTrainer(rotated, optimizer=two_groups, **options)
trainer.callbacks = [WhereBuilt("meta")]
trainer.fit(words(), words(5), max_steps=2)
assert all(type(p) is torch.nn.Parameter and p.device.type == "cpu" for p in trainer.model.parameters())
assert trainer.model.head.weight is trainer.model.embed.weight
assert torch.isfinite(trainer.model(words(2)[0])).all()
trainer.fit(words(), words(5), max_steps=4)
with open(f"weights_{os.getpid()}.json", "w") as file:
    json.dump([p.tolist() for p in trainer.model.parameters()], file)
"""


def test_joined_ranks_get_the_model_whole(rank_pool: RankPool, tmp_path: Path, forking_python: Path) -> None:
    whole = trainer_of("fsdp", 2, rank_pool, rotated)
    whole.fit(words(), max_steps=6)
    script = tmp_path / "train.py"
    script.write_text(JOINED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command = [*torchrun, "--master-port", str(free_port()), str(script)]
    together(tmp_path, [command], [{}], PYTHON_EXEC=str(forking_python))
    check_weights(tmp_path, whole.model)
