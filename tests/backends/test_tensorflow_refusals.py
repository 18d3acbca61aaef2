"""What the TensorFlow backend and its neighbours refuse, and what they say then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from distributed import TensorFlowDistributedTrainer, Trainer, UserError
from distributed.config import DistributedConfig
from distributed.interfaces.framework import framework_of
from distributed.interfaces.placement import LauncherEnvironment
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog, require

keras = pytest.importorskip("keras", reason="pip install tensorflow")

DATA = (torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64))


def dense(**options: Any) -> Any:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, **options)])


def torch_model() -> torch.nn.Module:
    return torch.nn.Linear(6, 3)


def planned(joined: LauncherEnvironment | None = None, gpus: int = 0, **fields: Any) -> RunPlan:
    config = DistributedConfig(**{"backend": "tensorflow", **fields})
    return resolve(config, get_catalog(), Facts(), Resources(gpus), joined)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorFlowDistributedTrainer(torch_model()), "a torch model was given.*'pytorch-ddp'"),
        (lambda: TensorFlowDistributedTrainer(torch_model), "a torch model was given.*'pytorch-ddp'"),
        (lambda: Trainer(dense()), "a Keras model was given.*backend='tensorflow'"),
        (lambda: Trainer(dense), "a Keras model was given.*backend='tensorflow'"),
        (lambda: TensorFlowDistributedTrainer(dense(), optimizer=torch.optim.SGD), "a torch optimizer"),
        (
            lambda: TensorFlowDistributedTrainer(
                dense(), optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
            ),
            "twice",
        ),
        (
            lambda: TensorFlowDistributedTrainer(
                dense(), optimizer=keras.optimizers.SGD(gradient_accumulation_steps=2)
            ),
            "accumulated twice",
        ),
        (lambda: TensorFlowDistributedTrainer(lambda: 3), "not a trainable model"),
        (lambda: TensorFlowDistributedTrainer(dense(trainable=False)), "no trainable parameters"),
        (lambda: TensorFlowDistributedTrainer(dense(activation="softmax")), "ends in a softmax"),
        (
            lambda: TensorFlowDistributedTrainer(
                dense(), loss_fn=keras.losses.SparseCategoricalCrossentropy(reduction="sum")
            ),
            "micro-batch mean",
        ),
        (
            lambda: TensorFlowDistributedTrainer(dense(), metrics={"auc": keras.metrics.AUC()}),
            "cannot be reduced over ranks",
        ),
        (
            lambda: TensorFlowDistributedTrainer(
                dense(),
                optimizer=keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 9)),
                warmup_steps=2,
            ),
            "schedule of its own",
        ),
        (
            lambda: TensorFlowDistributedTrainer(
                dense(), optimizer=keras.optimizers.SGD(), learning_rate=0.1
            ),
            "carries its own learning rate",
        ),
        (lambda: TensorFlowDistributedTrainer(dense(), loss_fn=lambda o, t: o), "a loss must be one number"),
    ],
)
def test_a_mistake_is_named(make: Callable[[], Trainer], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make().fit(DATA, max_steps=1)


def test_an_optimizer_of_another_model_is_refused() -> None:
    optimizer = keras.optimizers.SGD()
    optimizer.build(dense().trainable_variables)
    with pytest.raises(UserError, match="built over other variables"):
        TensorFlowDistributedTrainer(dense(), optimizer=optimizer).fit(DATA, max_steps=1)


def test_the_install_command_is_in_the_error() -> None:
    spec = get_catalog().backend("tensorflow")
    assert "tensorflow" in spec.requires
    with pytest.raises(UserError, match=r"pip install 'distributed-trainer\[tensorflow\]'"):
        require(("tensorflow_that_is_not_here",), "backend 'tensorflow'", spec.install_hint)


@pytest.mark.parametrize(
    ("fields", "ranks", "replicas"),
    [
        ({"num_gpus": 4}, 1, 4),
        ({"gpus_per_node": 4}, 1, 4),
        ({"num_processes": 4}, 4, 1),
        ({"num_gpus": 4, "tensorflow": {"strategy": "multi_worker"}}, 4, 1),
        ({"num_processes": 4, "tensorflow": {"strategy": "mirrored"}}, 1, 4),
        ({"num_gpus": 4, "num_nodes": 2, "node_rank": 0, "rdzv_endpoint": "127.0.0.1:29500"}, 4, 1),
    ],
)
def test_one_process_or_several(fields: dict[str, Any], ranks: int, replicas: int) -> None:
    plan = planned(**fields)
    assert (plan.world_size, plan.num_replicas) == (ranks, replicas)
    assert plan.batch.data_parallel_size == 4
    assert plan.mode == "spawn"


def test_gpus_of_the_host_are_one_process() -> None:
    plan = planned(gpus=8)
    assert (plan.world_size, plan.num_replicas, plan.device) == (1, 8, "cuda")
    assert planned(gpus=1).mode == "in-process"


def test_ranks_of_a_launcher_are_one_device_each() -> None:
    plan = planned(LauncherEnvironment("torchrun", 0, 2, 0, 2, 0, 1, "127.0.0.1", 29500))
    assert (plan.world_size, plan.num_replicas) == (2, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"backend": "pytorch-ddp", "tensorflow": {"strategy": "mirrored"}}, "does not read TensorFlow's"),
        ({"communication_backend": "gloo"}, "TensorFlow carries gradients itself"),
        ({"num_gpus": 4, "num_nodes": 2, "tensorflow": {"strategy": "mirrored"}}, "several hosts"),
        ({"sync_batchnorm": True}, "cannot synchronise BatchNorm"),
    ],
)
def test_a_plan_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        planned(**fields)


def test_mirrored_under_a_launcher_is_refused() -> None:
    joined = LauncherEnvironment("torchrun", 0, 2, 0, 2, 0, 1, "127.0.0.1", 29500)
    with pytest.raises(UserError, match="one process was to drive all"):
        planned(joined, tensorflow={"strategy": "mirrored"})


def test_frameworks_are_told_without_importing_them() -> None:
    assert framework_of(dense()) == "tensorflow"
    assert framework_of(torch_model()) == framework_of(torch.optim.SGD) == "torch"
    assert framework_of(torch_model) is None
    assert framework_of(3) is None


def compiled_model() -> Any:
    model = dense()
    model.compile(optimizer=keras.optimizers.SGD(0.5), loss="mse")
    return model


def test_a_factory_of_a_compiled_model_is_refused() -> None:
    """It would train with the config's AdamW and cross-entropy instead."""
    trainer = TensorFlowDistributedTrainer(compiled_model, num_processes=1, device="cpu", batch_size=2)
    with pytest.raises(UserError, match=r"optimizer=SGD, loss=mse.*Pass optimizer= and loss_fn="):
        trainer.fit(DATA, max_steps=1)
