"""DeepSpeed configurations of guides, verbatim: what each key becomes, and that two ranks train as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_backends.deepspeed.options import bucket_size
from torch import nn

from distributed import Callback, DeepSpeedTrainer, FSDPTrainer, PyTorchDDPTrainer, Trainer
from distributed import UserError as Refused
from distributed.config import load
from distributed.interfaces.callback import Context
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.backends.fsdp_model import Block, tiny, words
from tests.support.training import make_trainer

ZERO_2 = """
{
  "train_batch_size": 64,
  "gradient_accumulation_steps": 4,
  "optimizer": {
    "type": "AdamW",
    "params": {
      "lr": 1e-4,
      "betas": [0.9, 0.95],
      "eps": 1e-8,
      "weight_decay": 0.1
    }
  },
  "zero_optimization": {
    "stage": 2,
    "allgather_partitions": true,
    "reduce_scatter": true,
    "overlap_comm": true,
    "contiguous_gradients": true
  },
  "fp16": {
    "enabled": true,
    "auto_cast": false,
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1
  },
  "gradient_clipping": 1.0
}
"""
ZERO_3 = """
{
  "train_batch_size": 64,
  "gradient_accumulation_steps": 4,
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {
      "device": "cpu",
      "pin_memory": true
    },
    "offload_param": {
      "device": "cpu",
      "pin_memory": true
    },
    "allgather_partitions": true,
    "reduce_scatter": true,
    "overlap_comm": true,
    "contiguous_gradients": true
  },
  "activation_checkpointing": {
    "partition_activations": true,
    "cpu_checkpointing": true,
    "contiguous_memory_optimization": false,
    "synchronize_checkpoint_boundary": false
  }
}
"""
BUCKETS = """
{
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        "overlap_comm": true,
        "contiguous_gradients": true,
        "reduce_bucket_size": 5e8
    }
}
"""
BATCH, STEPS, MICRO_BATCHES = 64, 2, 4


def plan_of(text: str, gpus: int = 0, **given: Any) -> RunPlan:
    config = PyTorchDDPTrainer(tiny(), num_processes=2, deepspeed_config=json.loads(text), **given).config
    return resolve(config, get_catalog(), Facts(), Resources(gpus))


# -- what each key becomes ---------------------------------------------------------------------------------


def test_zero_2_with_fp16_on_gpus() -> None:
    plan = plan_of(ZERO_2, gpus=2)
    config = plan.config
    assert (plan.spec.name, plan.precision, plan.device) == ("deepspeed", "fp16", "cuda")
    assert (plan.batch.global_batch_size, plan.batch.gradient_accumulation_steps) == (64, 4)
    assert (config.scaler_init_scale, config.scaler_growth_interval) == (2.0**16, 1000)
    assert (config.optimizer, config.learning_rate, config.weight_decay) == ("adamw", 1e-4, 0.1)
    assert (config.zero_stage, config.gradient_clipping) == (2, 1.0)
    assert not [note for note in plan.notes if "hysteresis" in note]  # it is DeepSpeed's own rule


def test_zero_3_with_offloading() -> None:
    plan = plan_of(ZERO_3, gpus=2)
    assert "ZeRO stage 3, optimizer and parameters in host memory" in plan.notes
    assert plan.config.activation_checkpointing == "offload"
    assert plan.config.origin("activation_checkpointing") == "deepspeed_config"
    assert [note for note in plan.notes if "recomputes the model's blocks" in note]


def test_a_bucket_in_floating_point_is_no_larger_than_the_model() -> None:
    given = json.loads(BUCKETS)["zero_optimization"]["reduce_bucket_size"]
    for asked, numel, expected in ((given, 1000, 1000), (given, 10**9, 500_000_000), (None, 1000, 1000)):
        found = bucket_size(asked, numel)
        assert (type(found), found) == (int, expected)
    assert bucket_size(0.5, 1000) == 0.5  # which DeepSpeed refuses


# -- training ----------------------------------------------------------------------------------------------


class Recomputed(Callback):
    """Fails unless every step of a rank runs each of the three blocks `times` times for a micro-batch."""

    all_ranks = True

    def __init__(self, times: int) -> None:
        self.times, self.before = times, 0

    def on_step_end(self, context: Context) -> None:
        calls, self.before = Block.calls - self.before, Block.calls
        if context.progress.step > 1:  # the first step may compare forward passes
            assert calls == 3 * MICRO_BATCHES * self.times


def plain(decay: float, betas: tuple[float, float], rate: float, clip: float | None) -> nn.Module:
    """AdamW in plain PyTorch over whole batches: the mean over the tokens that count."""
    model = tiny()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=betas, eps=1e-8, weight_decay=decay)
    for x, y in zip(*(t.split(BATCH) for t in words(BATCH * STEPS)), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
    return model


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", ["zero 2", "zero 3", "buckets"])
def test_two_ranks_train_as_one_process_does(name: str, rank_pool: RankPool, tmp_path: Path) -> None:
    """A mapping, and files; of the first, without fp16, which a CPU has not."""
    given: dict[str, Any] = {}
    if name == "zero 2":
        native: Any = json.loads(ZERO_2)
        del native["fp16"]
        recomputed, expected = 1, plain(0.1, (0.9, 0.95), 1e-4, 1.0)
    else:
        native = tmp_path / "ds_config.json"
        native.write_text(ZERO_3 if name == "zero 3" else BUCKETS)
        given = {"learning_rate": 1e-3}
        if name == "buckets":
            given |= {"global_batch_size": BATCH, "gradient_accumulation_steps": MICRO_BATCHES}
        recomputed, expected = 2 if name == "zero 3" else 1, plain(0.0, (0.9, 0.999), 1e-3, None)
    model = tiny()
    trainer = make_trainer(
        model,
        2,
        rank_pool,
        deepspeed_config=native,
        data={"shuffle": False},
        callbacks=[Recomputed(recomputed)],
        **given,
    )
    history = trainer.fit(words(BATCH * STEPS), max_steps=STEPS)
    assert (history.backend, history.world_size) == ("deepspeed", 2)
    assert distance(model, expected) < EXACT


def test_fp16_on_cpus_names_a_remedy_that_trains(rank_pool: RankPool) -> None:
    with pytest.raises(Refused, match=r"no fp16 weights on a CPU.*Leave it out and set mixed_precision=fp16"):
        plan_of(ZERO_2, device="cpu")
    native = json.loads(ZERO_2)
    del native["fp16"]
    trainer = make_trainer(tiny(torch.float32), 2, rank_pool, deepspeed_config=native, mixed_precision="fp16")
    history = trainer.fit(words(BATCH), max_steps=1)
    assert history.steps["step"] == [1]


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (DeepSpeedTrainer, {"zero_stage": 2}),
        (DeepSpeedTrainer, {"zero_stage": 3}),
        (FSDPTrainer, {}),
        (PyTorchDDPTrainer, {}),
    ],
)
def test_what_cpu_offload_is_here_trains(
    kind: type[Trainer], given: dict[str, Any], rank_pool: RankPool
) -> None:
    """The fields that the error names, with their values."""
    with pytest.raises(Refused) as caught:
        kind(tiny(), cpu_offload=True, **given)
    said = str(caught.value)
    named = {
        name: value
        for name, value in {
            "zero.offload_optimizer": "cpu",
            "zero.offload_parameters": "cpu",
            "fsdp.cpu_offload": True,
            "optimizer_offload": True,
        }.items()
        if f"{name}={str(value).lower()}" in said
    }
    model = tiny()
    fields: dict[str, Any] = {"learning_rate": 1e-3, "global_batch_size": BATCH, **given, **named}
    trainer = make_trainer(model, 2, rank_pool, kind=kind, data={"shuffle": False}, **fields)
    trainer.fit(words(BATCH * STEPS), max_steps=STEPS)
    assert distance(model, plain(0.0, (0.9, 0.999), 1e-3, None)) < EXACT
    where = resolve(
        load(overrides={"num_processes": 2, "backend": kind.default_backend, **given, **named}),
        get_catalog(),
        Facts(),
        Resources(2),
    )
    assert where.device == "cuda"  # a plan on GPUs accepts it, too
