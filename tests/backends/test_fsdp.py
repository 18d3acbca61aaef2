"""fsdp: what is sharded, and that no way of sharding changes the training."""

from __future__ import annotations

import os
import re
import sys
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed_backends.fsdp.sharded_model import _groups
from torch import Tensor, nn

from distributed import Callback, DistributedConfig, FSDPTrainer, Trainer, UserError
from distributed.commands.config import to_yaml
from distributed.config import load
from distributed.interfaces.callback import Context
from distributed.interfaces.plan import Facts, Resources
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from distributed.testing.conformance import distance, problem, small_model
from distributed.testing.rank_pool import RankPool
from tests.backends.fsdp_model import Block, TinyLM, own_loss, tiny, trainer_of, words
from tests.support import commands

EXACT = 1e-9
STEPS = 9


@pytest.fixture(scope="module")
def expected() -> tuple[TinyLM, list[float], list[float]]:
    """(weights, losses, norms) of one process without any of it."""
    model = tiny()
    history = trainer_of("serial", model=model, optimizer=_adamw).fit(words(), max_steps=STEPS)
    return model, history.steps["loss"], [log["grad_norm"] for log in history.logs]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)


# -- what is sharded ---------------------------------------------------------------------


class HoldsItsShareAlone(Callback):
    """Fails where a rank holds more than its rows of a parameter, its gradient or its moments."""

    all_ranks = True

    def __init__(self, shards: int) -> None:
        self.shards = shards

    def on_step_end(self, context: Context) -> None:
        sizes = {}
        for name, parameter in context.model.named_parameters():
            state = context.optimizer.state.get(parameter, {})
            for tensor in [parameter, *(state[slot] for slot in ("exp_avg", "exp_avg_sq") if state)]:
                if parameter.dim() == 0:
                    assert type(tensor.data) is Tensor
                    continue
                rows = -(-parameter.shape[0] // self.shards)
                assert tensor.to_local().numel() <= rows * prod(parameter.shape[1:]), name
                assert tensor.shape == parameter.shape
            if parameter.dim():
                sizes[name] = (parameter.to_local().numel(), parameter.numel())  # type: ignore[attr-defined]
        ranks = context.backend.gather_objects(sizes)
        copies = len(ranks) // self.shards
        for name, (_, whole) in sizes.items():
            assert sum(rank[name][0] for rank in ranks) == whole * copies, name


@pytest.mark.parametrize(("ranks", "copies"), [(2, 1), (3, 1), (4, 2)])
def test_every_rank_holds_its_share_alone(
    ranks: int, copies: int, expected: Any, rank_pool: RankPool
) -> None:
    trainer = trainer_of("fsdp", ranks, rank_pool, optimizer=_adamw, fsdp={"replicate": copies})
    trainer.callbacks = [HoldsItsShareAlone(ranks // copies)]
    history = trainer.fit(words(), max_steps=STEPS)
    check(trainer, history, expected)


def check(trainer: Trainer, history: Any, expected: Any) -> None:
    model, losses, norms = expected
    assert distance(trainer.model, model) < EXACT
    assert history.steps["loss"] == pytest.approx(losses, abs=EXACT)
    assert [log["grad_norm"] for log in history.logs] == pytest.approx(norms, abs=EXACT)


# -- no option changes the training --------------------------------------------------------


@pytest.mark.parametrize(
    "fsdp",
    [
        {"wrap": "whole"},
        {"wrap": "blocks", "block_classes": ["Block"]},
        {"wrap": "blocks", "block_classes": ["Linear", "Block"], "reshard_after_forward": False},
        {"wrap": "size", "min_params": 30},
        {"reshard_after_forward": False},
        {"cpu_offload": True},
        {"reduce_every_micro_batch": True},
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "wrap": "size", "min_params": 30, "cpu_offload": True},
    ],
    ids=lambda fsdp: "-".join(fsdp),
)
def test_no_option_changes_the_training(fsdp: dict[str, Any], expected: Any, rank_pool: RankPool) -> None:
    trainer = trainer_of("fsdp", 2, rank_pool, optimizer=_adamw, fsdp=fsdp, gradient_accumulation_steps=2)
    check(trainer, trainer.fit(words(), words(5), max_steps=STEPS), expected)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_training_step_may_reach_past_forward(ranks: int, expected: Any, rank_pool: RankPool) -> None:
    trainer = trainer_of(
        "fsdp", ranks, rank_pool, optimizer=_adamw, gradient_accumulation_steps=2, training_step=own_loss
    )
    check(trainer, trainer.fit(words(), words(5), max_steps=STEPS), expected)


@pytest.mark.slow
def test_a_rank_alone_needs_no_group_and_gets_its_model_back(expected: Any) -> None:
    model = tiny()
    Block.calls = 0
    trainer = FSDPTrainer(
        model, global_batch_size=12, optimizer=_adamw, gradient_clipping=0.5, log_every_n_steps=1,
        device="cpu", num_processes=1, fsdp={"activation_checkpointing": True},
    )  # fmt: skip
    check(trainer, trainer.fit(words(), max_steps=STEPS), expected)
    assert Block.calls == 3 * STEPS * 2, "each block runs once forward and once again in backward"
    assert not torch.distributed.is_initialized()
    assert not any("forward" in vars(module) for module in model.modules())


def test_gradients_travel_in_the_dtype_asked_for(rank_pool: RankPool) -> None:
    exact, rounded = small_model(torch.float32), small_model(torch.float32)
    for model, dtype in ((exact, None), (rounded, "bf16")):
        trainer = trainer_of(
            "fsdp", 2, rank_pool, model, optimizer="sgd", learning_rate=0.3, fsdp={"reduce_dtype": dtype}
        )
        trainer.fit(problem(24, torch.float32), max_steps=5)
    assert 1e-5 < distance(exact, rounded) < 1e-2


# -- which modules are gathered together ---------------------------------------------------------


@pytest.mark.parametrize(
    ("fsdp", "names"),
    [
        ({}, {"blocks.0", "blocks.1", "blocks.2"}),
        ({"wrap": "whole"}, set()),
        ({"wrap": "blocks", "block_classes": ["LayerNorm"]}, {f"blocks.{i}.norm" for i in range(3)}),
        # The head's weight is the embedding's too: neither can be gathered without the other.
        ({"wrap": "blocks", "block_classes": ["Embedding", "Linear"]},
         {f"blocks.{i}.{part}" for i in range(3) for part in ("enter", "leave")}),
        ({"wrap": "size", "min_params": 96}, {"blocks.0", "blocks.1", "blocks.2"}),
        ({"wrap": "size", "min_params": 42}, {f"blocks.{i}.leave" for i in range(3)}
         | {"blocks.0", "blocks.1", "blocks.2"}),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, set) else str(value),
)  # fmt: skip
def test_what_is_gathered_together(fsdp: dict[str, Any], names: set[str]) -> None:
    from distributed_backends.fsdp.units import find_units

    model = tiny()
    units = find_units(model, DistributedConfig(fsdp=fsdp).fsdp)
    found = {name for name, module in model.named_modules() if module in units}
    assert found == names
    inside = {inner: i for i, unit in enumerate(units) for inner in unit.modules()}
    assert all(inside[unit] >= i for i, unit in enumerate(units)), "inner units come first"


def test_modules_that_read_into_others_are_not_taken_apart() -> None:
    from distributed_backends.fsdp.units import find_units

    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 8))
    units = find_units(model, DistributedConfig(fsdp={"wrap": "size", "min_params": 1}).fsdp)
    assert {type(unit) for unit in units} == {nn.MultiheadAttention, nn.Linear, nn.TransformerEncoderLayer}


# -- low precision -----------------------------------------------------------------------------


class SameWeights(Callback):
    """Fails where copies differ, or the scale of the loss."""

    all_ranks = True

    def on_run_end(self, context: Context, status: str) -> None:
        backend: Any = context.backend  # type: ignore[attr-defined]
        state = [[p.full_tensor().tolist() for p in context.model.parameters()], backend.scaler_state()]
        assert backend.broadcast_object(state) == state


def huge_on_one_rank(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The loss of a rank that was dealt the sample 99 overflows in fp16."""
    factor = 1e5 if bool((batch[0][:, 0] == 99.0).any()) else 1.0
    x = torch.where(batch[0] == 99.0, 0.5, batch[0])
    return F.cross_entropy(model(x), batch[1]) * factor


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("alone", [False, True])
def test_fp16_skips_the_steps_that_ddp_skips(ranks: int, alone: bool, rank_pool: RankPool) -> None:
    x, y = problem(24, torch.float32)
    if alone:
        x[5, 0] = 99.0
    skipped, models = [], []
    for backend in ("pytorch-ddp", "fsdp"):
        model = small_model(torch.float32)
        trainer = trainer_of(
            backend, ranks, rank_pool, model, mixed_precision="fp16", optimizer=torch.optim.SGD,
            learning_rate=0.3, scaler_init_scale=2.0**16 if alone else 2.0**30,
            training_step=huge_on_one_rank if alone else None, gradient_clipping=0.1,
        )  # fmt: skip
        trainer.callbacks = [SameWeights()] if backend == "fsdp" else []
        skipped.append(trainer.fit((x, y), max_steps=20).num_skipped_steps)
        models.append(model)
    assert 3 < skipped[0] < 20
    assert skipped[0] == skipped[1]
    assert distance(*models) < 1e-5 < distance(models[1], small_model(torch.float32))


def test_fp16_unscales_parameters_without_a_dimension_too(rank_pool: RankPool) -> None:
    found = []
    for backend in ("pytorch-ddp", "fsdp"):
        model = tiny(torch.float32)
        trainer = trainer_of(
            backend, 2, rank_pool, model, mixed_precision="fp16", scaler_init_scale=2.0**24, optimizer=_sgd
        )
        found.append((trainer.fit(words(), max_steps=20).num_skipped_steps, model))
    assert found[0][0] == found[1][0] > 3
    assert distance(found[0][1], found[1][1]) < 1e-6


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def test_bf16_is_what_it_is_under_ddp(rank_pool: RankPool) -> None:
    models = [small_model(torch.float32) for _ in range(2)]
    for backend, model in zip(("pytorch-ddp", "fsdp"), models, strict=True):
        trainer_of(
            backend, 2, rank_pool, model, mixed_precision="bf16", optimizer="sgd", learning_rate=0.3
        ).fit(problem(24, torch.float32), max_steps=9)
    assert distance(*models) < 1e-6


# -- buffers --------------------------------------------------------------------------------------


def with_norm() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("ranks", [2, 3])
def test_rank_zeros_statistics_are_validated_and_saved(ranks: int, rank_pool: RankPool) -> None:
    found = []
    for backend in ("pytorch-ddp", "fsdp"):
        model = with_norm()
        trainer = trainer_of(backend, ranks, rank_pool, model, optimizer="sgd")
        history = trainer.fit(problem(24), problem(13), epochs=2)
        found.append([history.epochs[-1]["val_loss"], *model[1].running_mean, *model[1].running_var])  # type: ignore[index]
    assert [float(v) for v in found[0]] == pytest.approx([float(v) for v in found[1]], abs=EXACT)


# -- mistakes -------------------------------------------------------------------------------------


def plan_of(resources: int = 0, **fields: Any) -> Any:
    facts = Facts(train_batch_size=2)
    config = DistributedConfig(**{"backend": "fsdp", **fields})
    return resolve(config, get_catalog(), facts, Resources(resources))


@pytest.mark.parametrize(
    ("fields", "field", "text"),
    [
        ({"num_processes": 4, "fsdp": {"replicate": 3}}, "fsdp.replicate", "1, 2, 4"),
        (
            {"num_processes": 1, "fsdp": {"cpu_offload": True}, "device": "cuda"},
            "fsdp.cpu_offload",
            "a single rank has no other rank",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_a_process_starts(
    fields: dict[str, Any], field: str, text: str
) -> None:
    with pytest.raises(UserError, match=re.escape(text)) as caught:
        plan_of(int("device" in fields), **fields)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"wrap": "blocks"}, "block_classes is missing"),
        ({"wrap": "whole", "block_classes": ["Block"]}, "has no meaning"),
        ({"wrap": "layers"}, "auto"),
        ({"replicate": 0}, "replicate"),
    ],
)
def test_contradictions_are_refused(section: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        DistributedConfig(fsdp=section)


def test_class_names_survive_the_way_through_a_file(tmp_path: Any) -> None:
    config = DistributedConfig(fsdp={"wrap": "blocks", "block_classes": ["Block", "Other"]})
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    assert load(tmp_path / "run.yaml").fsdp == config.fsdp


def test_another_backend_says_that_the_section_changes_nothing() -> None:
    assert plan_of(num_processes=2).notes == ()
    plan = plan_of(num_processes=2, backend="pytorch-ddp", fsdp={"replicate": 2})
    assert plan.notes == ("the section fsdp changes nothing under backend 'pytorch-ddp'",)


def mixed_dtypes() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8).double(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("model", "section", "text"),
    [
        (tiny, {"wrap": "blocks", "block_classes": ["Layer"]}, "no module of class Layer.*Block"),
        (small_model, {"activation_checkpointing": True}, "found no blocks in Sequential"),
        (with_norm, {"activation_checkpointing": True, "wrap": "size", "min_params": 1}, "twice"),
        (mixed_dtypes, {}, "different dtypes.*float32, float64"),
    ],
)
def test_what_the_model_does_not_allow(
    model: Any, section: dict[str, Any], text: str, rank_pool: RankPool
) -> None:
    with pytest.raises(UserError, match=text):
        trainer_of("fsdp", 2, rank_pool, model(), optimizer="sgd", fsdp=section).fit(words(), max_steps=1)


# -- from the command line -------------------------------------------------------------------------


@pytest.mark.starts_processes
def test_the_demo_learns_digits(tmp_path: Any) -> None:
    command = "-m distributed.cli train --backend fsdp --num-processes 2 --epochs 8 --set data.verify=false"
    done = commands.run(
        [sys.executable, *command.split()], cwd=tmp_path, capture_output=True, timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fsdp: 2 ranks on CPU over gloo" in done.stdout
    found = re.search(r"best validation accuracy (\S+)", done.stdout)
    assert found
    assert float(found[1]) > 0.95


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({"_fsdp_param_groups": [1, 2]}, [1, 2]),
        ({"_fsdp_param_group": 1}, [1]),
        ({"_fsdp_param_group": None}, []),
    ],
)
def test_groups_of_parameters_of_each_version_of_torch(state: dict[str, Any], found: list[int]) -> None:
    """A unit has a list of them from torch 2.12 on, and one or none before."""
    unit: Any = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(**state))
    assert _groups(unit) == found
