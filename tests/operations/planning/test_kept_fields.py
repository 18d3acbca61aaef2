"""Fields that a plan keeps because they were asked for, and fields of a start that it sets back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import distributed
from distributed import UserError
from distributed.cli import main
from distributed.config import load
from distributed.interfaces.plan import Facts, Resources
from distributed.operations.planning.plans import Plans
from distributed.operations.planning.shorter_model import shortened
from distributed.planner.estimates.numbers import model_numbers
from distributed.planner.resolve import rescale, resolve
from distributed.registry.catalog import get_catalog
from tests.operations.planning.test_plans import SIZES, chain, vectors

STAGES = ["0", "4"]


def planned(config: Any = None, model: Any = None, **fields: Any) -> Plans:
    """Plans for `chain` on two CPU ranks."""
    given = {"hardware": "CPU", "num_devices": 2, "global_batch_size": 16, "num_plans": 99} | fields
    return distributed.plan(chain() if model is None else model, vectors(), config, **given)


# -- what is asked for -------------------------------------------------------------------------------


def test_stages_that_are_asked_for_are_those_of_every_plan() -> None:
    plans = planned(parallel={"pipeline": 2, "stages": STAGES})
    assert len(plans) > 3
    for index in range(len(plans)):
        assert list(plans.fields(index)["parallel.stages"]) == STAGES
    usual = planned(parallel={"pipeline": 2})
    assert {row.time.total for row in plans.rows}.isdisjoint(row.time.total for row in usual.rows)


def test_stages_of_a_start_do_not_decide_what_is_predicted() -> None:
    """The file of a plan sets them back, so that predictions have to be those without them."""
    usual = planned(axes=["pipeline"])
    started = planned({"parallel": {"pipeline": 2, "stages": STAGES}}, axes=["pipeline"])
    assert [(r.split, r.time, r.memory) for r in started.rows] == [
        (r.split, r.time, r.memory) for r in usual.rows
    ]
    assert all(not started.fields(index)["parallel.stages"] for index in range(len(started)))


@pytest.mark.parametrize(
    ("start", "asked"),
    [
        ({"parallel": {"pipeline": 2, "schedule": "gpipe"}}, {"parallel": {"schedule": "1f1b"}}),
        ({"parallel": {"pipeline": 2, "num_microbatches": 2}}, {"batch_size": 8}),
        ({"parallel": {"context": 2, "context_attention": "ring"}}, {}),
        ({"parallel": {"tensor": 2}, "num_nodes": 1, "node_rank": 0}, {"node_rank": 0}),
    ],
)
def test_fields_of_an_axis_do_not_keep_plans_without_it_away(
    start: dict[str, Any], asked: dict[str, Any]
) -> None:
    plans = planned(start, **asked)
    kinds = {row.split.dims.model_parallel_size for row in plans.rows}
    assert {1, 2} <= kinds
    if "schedule" in asked.get("parallel", {}):
        assert {row.split.schedule for row in plans.rows if row.split.dims.pipeline > 1} == {"1f1b"}


@pytest.mark.parametrize(
    ("start", "text"),
    [
        (
            {"gradient_as_bucket_view": False},
            "gradient_as_bucket_view: time and memory with this value are not predicted.*Got False",
        ),
        ({"compile": "blocks"}, "compile: time and memory with this value are not predicted"),
    ],
)
def test_a_start_whose_memory_is_not_predicted_names_its_field(start: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=f"^{text}"):
        planned(start)


def test_offloading_that_changes_nothing_on_a_cpu_is_kept() -> None:
    plans = planned(optimizer_offload=True, axes=["data", "shard"])
    assert len(plans) > 3
    assert plans.fields(0)["optimizer_offload"] is True


def test_the_codec_of_a_start_is_kept() -> None:
    plans = distributed.plan(
        SIZES, config={"compression": {"codec": "fp16"}}, hardware="H100", num_devices=2, num_plans=99
    )
    codecs = {row.split.codec for row in plans.rows if row.split.dims.data > 1}
    assert codecs == {"fp16"}


def test_a_file_repeats_the_configuration_that_was_given(tmp_path: Path) -> None:
    plans = planned({"learning_rate": 0.25, "momentum": 0.5, "optimizer": "sgd"}, axes=["data"])
    plans.save(tmp_path / "plan.yaml")
    found = load(tmp_path / "plan.yaml")
    assert (found.learning_rate, found.momentum, found.optimizer) == (0.25, 0.5, "sgd")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_processes": 4}, "num_processes: plans for this hardware on 2 devices .*Got 4. Allowed: 2"),
        ({"num_nodes": 2}, "num_nodes: plans for this hardware .*Got 2. Allowed: 1"),
        ({"num_gpus": 2}, "num_gpus: plans for this hardware .*Got 2. Allowed: none, ranks are placed"),
        ({"device": "cuda"}, "device: plans for this hardware .*Got 'cuda'. Allowed: cpu"),
        ({"hardware": "H100", "device": "cpu"}, "device: plans for this hardware .*Allowed: cuda"),
    ],
)
def test_places_that_no_plan_has_are_refused(fields: dict[str, Any], text: str) -> None:
    for model in (chain(), SIZES):
        data = None if model is SIZES else vectors()
        given = {"hardware": "CPU", "num_devices": 2} | fields
        with pytest.raises(UserError, match=f"^{text}"):
            distributed.plan(model, data, **given)


@pytest.mark.parametrize(
    "fields", [{"num_processes": None}, {"num_processes": 2, "num_nodes": 1}, {"device": "auto"}]
)
def test_places_that_say_nothing_else_are_accepted(fields: dict[str, Any]) -> None:
    assert len(planned(axes=["data"], **fields)) > 1


def test_gpus_of_the_only_node_are_accepted() -> None:
    plans = distributed.plan(SIZES, hardware="H100", num_devices=8, num_nodes=1, gpus_per_node=8)
    assert plans[0].split.dims.world_size == 8


def test_devices_fill_whole_nodes() -> None:
    with pytest.raises(UserError, match=r"num_devices: the nodes of H100 have 8.*Got 12.*nearest: 8"):
        distributed.plan(SIZES, hardware="H100", num_devices=12)
    plans = distributed.plan(SIZES, hardware="H100", num_devices=16, num_nodes=2, gpus_per_node=8)
    assert plans.fields(0)["num_nodes"] == 2


# -- objects of a training ---------------------------------------------------------------------------


def normalized() -> nn.Module:
    """A model whose BatchNorm is found only when it is built."""
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))


def test_statistics_of_a_model_from_a_factory_are_kept() -> None:
    plans = planned({"batch_size": 4}, normalized)
    assert {(row.split.micro_batch, row.split.num_micro_batches) for row in plans.rows} == {(4, 2)}
    assert plans.notes[0].startswith("'1' (BatchNorm1d) computes statistics")


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Any loss."""
    return nn.functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    "given", [{"optimizer": torch.optim.SGD}, {"loss_fn": loss}, {"training_step": loss}]
)
def test_objects_beside_numbers_are_refused(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(UserError, match=f"{name}: numbers of a transformer were given together"):
        distributed.plan(SIZES, hardware="H100", num_devices=8, **given)


def test_unknown_words_beside_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--layers", "2", "--hidden", "64", "--devcies", "2"]) == 2
    assert "--devices" in capsys.readouterr().err


@pytest.mark.parametrize(("momentum", "each"), [(0.0, 0), (0.9, 4)])
def test_momentum_is_part_of_memory_and_time(momentum: float, each: int) -> None:
    options: dict[str, Any] = {"hardware": "H100", "num_devices": 1}
    given = {"optimizer": "sgd", "momentum": momentum}
    plans = distributed.plan(SIZES, config=given, **options)
    assert plans[0].memory.optimizer == pytest.approx(each * model_numbers(**SIZES).parameters)
    without = distributed.plan(SIZES, config=given | {"momentum": 0.0}, **options)
    assert (plans[0].time.optimizer > without[0].time.optimizer) is bool(each)


# -- a shorter model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [lambda: chain(), chain])
def test_a_factory_is_shortened_when_it_is_called(build: Callable[[], nn.Module]) -> None:
    factory, optimizer = shortened(build, torch.optim.SGD, 2)
    assert len(factory()) == 3
    assert optimizer is torch.optim.SGD
    with pytest.raises(UserError, match=r"--verify-layers: .*Got 9"):
        shortened(build, None, 9)[0]()


def test_an_optimizer_object_keeps_the_parameters_that_are_left() -> None:
    model = chain()
    groups = [{"params": model[:4].parameters()}, {"params": model[4].parameters()}]
    rest = {"params": model[5].parameters(), "lr": 0.5}
    whole = torch.optim.SGD([*groups, rest], lr=0.1, momentum=0.9)
    model(vectors(3)[0]).sum().backward()
    whole.step()  # it has a state
    short, optimizer = shortened(model, whole, 2)
    assert len(optimizer.state_dict()["state"]) == 10
    assert [len(group["params"]) for group in optimizer.param_groups] == [8, 2]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in short.parameters()}


@pytest.mark.starts_processes
@pytest.mark.parametrize("given", ["factory", "optimizer object"])
def test_a_shortened_model_is_tried(given: str) -> None:
    model: Any = chain if given == "factory" else chain()
    optimizer = None if given == "factory" else torch.optim.SGD(model.parameters(), lr=0.1)
    data = vectors()
    plans = distributed.plan(
        model, data, hardware="CPU", num_devices=1, global_batch_size=16, axes=["data"], optimizer=optimizer
    )
    trainer = distributed.Trainer(model, device="cpu", num_processes=1, optimizer=optimizer)
    found = distributed.planning.verify(plans, trainer, data, steps=4, layers=1)
    step, _ = found.comparisons
    assert step.measured
    if optimizer is not None:
        assert sum(len(group["params"]) for group in optimizer.param_groups) == 22


# -- another number of ranks -------------------------------------------------------------------------


def test_predictions_are_dropped_when_a_run_is_rescaled(tmp_path: Path) -> None:
    plans = planned(axes=["data"], backend="pytorch-ddp")
    plans.save(tmp_path / "plan.yaml")
    values = yaml.safe_load((tmp_path / "plan.yaml").read_text(encoding="utf-8"))
    del values["parallel"]  # a run with another number of ranks along `data` is refused
    run = resolve(load(None, values), get_catalog(), Facts(), Resources())
    assert run.config.planned.split is not None
    assert rescale(run, 1, run.world_size).config.planned.split is not None
    assert rescale(run, 1, 1).config.planned.split is None
