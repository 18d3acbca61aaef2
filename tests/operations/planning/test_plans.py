"""Plans: what is kept, what a file of a plan makes of a run, and that a plan changes no training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distributed
from distributed import UserError
from distributed.config import load
from distributed.interfaces.plan import Facts, Resources
from distributed.operations.planning import plans as planned
from distributed.operations.planning.options import PlanOptions, left_out
from distributed.operations.planning.plans import Plans
from distributed.operations.planning.shorter_model import keep_blocks
from distributed.planner.estimates.comparison import compare, kendall_tau
from distributed.planner.estimates.ledger import MemoryParts
from distributed.planner.estimates.split import describe
from distributed.planner.estimates.split_of_plan import split_of
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.campaigns import plans as campaign

pytest.importorskip("transformers")

SIZES = {"layers": 4, "hidden": 256, "heads": 4, "vocabulary": 1024, "sequence": 128, "global_batch": 16}


def chain() -> nn.Module:
    """Five blocks of two layers, and a head."""
    blocks = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(5)]
    return nn.Sequential(*blocks, nn.Linear(16, 4))


def mlp() -> nn.Module:
    """No list of blocks, so that no pipeline can divide it; its widths are not divisible by 3 either."""
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def vectors(number: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(number, 16, generator=generator)
    return inputs, torch.randint(0, 4, (number,), generator=generator)


# -- the table ---------------------------------------------------------------------------------------


def test_plans_from_numbers_fit_and_are_sorted() -> None:
    plans = distributed.plan(SIZES, hardware="H100", num_devices=8, num_plans=20, mixed_precision="bf16")
    seconds = [row.time.total for row in plans.rows]
    assert len(plans) == 20
    assert seconds == sorted(seconds)
    for row in plans.rows:
        assert row.memory.total <= plans.profile.memory
        assert 0.0 < row.mfu < 1.0
        assert row.split.precision == "bf16"
        low, high = row.time.interval(plans.profile.achievable.spread)
        assert low < row.time.total < high
    assert sum(plans.table.reasons().values()) > 100


def test_what_is_asked_for_is_kept() -> None:
    fields: dict[str, Any] = {"backend": "fsdp", "parallel": {"tensor": 2}, "batch_size": 2}
    plans = distributed.plan(SIZES, hardware="A100", num_devices=8, num_plans=99, **fields)
    assert len(plans) > 3
    for row in plans.rows:
        assert row.split.backend == "fsdp"
        assert row.split.dims.tensor == 2
        assert row.split.micro_batch == 2
    only = distributed.plan(SIZES, hardware="A100", num_devices=8, num_plans=99, axes=["data", "shard"])
    assert {row.split.dims.model_parallel_size for row in only.rows} == {1}


def test_what_a_configuration_sets_is_only_a_start() -> None:
    """Its precision is kept; its split is not, and a plan sets the fields of its split back."""
    start = {"zero_stage": 1, "mixed_precision": "bf16", "activation_checkpointing": "full"}
    plans = distributed.plan(SIZES, config=start, hardware="A100", num_devices=4, num_plans=99)
    assert {row.split.precision for row in plans.rows} == {"bf16"}
    index = next(i for i, row in enumerate(plans.rows) if row.split.backend == "pytorch-ddp")
    fields = plans.fields(index)
    assert fields["zero_stage"] is None
    assert fields["activation_checkpointing"] in ("none", "full")


def test_a_model_object_is_planned_by_its_facts() -> None:
    plans = distributed.plan(chain(), vectors(), hardware="CPU", num_devices=2, global_batch_size=16)
    names = {row.split.backend for row in plans.rows}
    assert {"pytorch-ddp", "fsdp"} <= names
    assert plans.subject == f"Sequential with {sum(p.numel() for p in chain().parameters()):,} parameters"
    assert {row.split.micro_batch * row.split.num_micro_batches for row in plans.rows} <= {8, 16}


def test_the_interval_of_memory_has_a_part_that_does_not_shrink_with_the_model() -> None:
    """A model of 5 MB is predicted within 3 %, one of 86 MB within 0.2 %."""
    plans = distributed.plan(chain(), vectors(), hardware="CPU", num_devices=2, axes=["data"], batch_size=4)
    row = plans[0]
    for total in (5e6, 86e6, 1e12):
        memory = MemoryParts(parameters=int(total))
        low, high = plans.intervals(replace(row, memory=memory))["memory"]
        assert high == pytest.approx(1.01 * total + 2**20)
        assert low == pytest.approx(total / 1.01 - 2**20)
    assert plans.intervals(row)["memory"][0] == 0.0  # all of it is less
    accelerated = distributed.plan(chain(), vectors(), hardware="A100", num_devices=2, axes=["data"])
    assert accelerated.memory_spread_bytes == 0


def test_a_gpu_is_planned_for_where_there_is_none() -> None:
    """Fake tensors on a GPU end the process in autograd, where torch finds none."""
    plans = distributed.plan(chain(), vectors(), hardware="H100", num_devices=8, axes=["data", "shard"])
    assert len(plans) > 3
    assert plans[0].memory.framework >= 10**9
    assert any("no GPU here" in note for note in plans.notes) != torch.cuda.is_available()


class Fours(torch.utils.data.BatchSampler):
    """A batch sampler whose batches stay whole."""


def test_the_batches_of_a_loader_are_kept() -> None:
    data = torch.utils.data.TensorDataset(*vectors())
    whole = Fours(torch.utils.data.SequentialSampler(data), 4, drop_last=False)
    options: dict[str, Any] = {"hardware": "CPU", "num_devices": 2, "axes": ["data", "shard"]}
    for loader, fields in (
        (torch.utils.data.DataLoader(data, batch_size=4), {}),
        (torch.utils.data.DataLoader(data, batch_sampler=whole), {"global_batch_size": 16}),
    ):
        plans = distributed.plan(chain(), loader, **fields, **options)
        assert {row.split.micro_batch for row in plans.rows} == {4}


def normalized(**given: Any) -> Plans:
    """Plans for a model with BatchNorm."""
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    return distributed.plan(model, vectors(), {"batch_size": 4}, hardware="CPU", num_plans=99, **given)


def test_statistics_over_a_micro_batch_stay_as_they_are() -> None:
    plans = normalized(num_devices=4, global_batch_size=32)
    assert {(r.split.micro_batch, r.split.num_micro_batches) for r in plans.rows} == {(4, 2)}
    assert {row.split.dims.data_parallel_size for row in plans.rows} == {4}
    assert len(plans) > 3
    assert plans.notes[0].startswith("'1' (BatchNorm1d) computes statistics over a micro-batch: every plan")
    with pytest.raises(UserError, match=r"global_batch_size: it cannot be split evenly.*multiples of 16"):
        normalized(num_devices=4, global_batch_size=24)


def test_parameters_that_a_backend_refuses_are_not_planned_under_it() -> None:
    """A hook on a parameter is refused by FSDP2 and by stages of ZeRO."""
    model = chain()
    next(model.parameters()).register_hook(lambda grad: grad)
    options: dict[str, Any] = {"hardware": "CPU", "num_devices": 2, "axes": ["data", "shard"]}
    plans = distributed.plan(model, vectors(), global_batch_size=16, num_plans=99, **options)
    assert {row.split.backend for row in plans.rows} == {"pytorch-ddp"}
    assert any("has a hook" in reason for reason in plans.table.reasons())


# -- the file of a plan ------------------------------------------------------------------------------


def runs_of(plans: Plans, folder: Path) -> list[tuple[str, str]]:
    """(split of each plan, split of a run with its file)"""
    found = []
    for index, row in enumerate(plans.rows):
        plans.save(folder / "plan.yaml", index)
        config = load(folder / "plan.yaml")
        resources = Resources(num_gpus=0 if plans.profile.device == "cpu" else plans.space.world_size)
        run = resolve(config, get_catalog(), Facts(), resources)
        assert run.config.planned.split == describe(row.split), run.notes
        assert run.config.planned.step_seconds == pytest.approx(row.time.total, rel=1e-4)
        found.append((describe(row.split), describe(split_of(run))))
    return found


def test_a_run_with_the_file_of_a_plan_has_its_split(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_devices": 4, "num_plans": 10**6, "mixed_precision": "bf16"}
    plans = distributed.plan(SIZES, hardware="H100", codecs=["fp16"], **options)
    assert len(plans) > 200
    pairs = runs_of(plans, tmp_path)
    assert [pair for pair in pairs if pair[0] != pair[1]] == []


@pytest.mark.parametrize(
    "field", ["zero_stage", "parallel.schedule", "activation_checkpointing", "parallel.tensor"]
)
def test_a_file_without_a_field_of_its_split_is_noticed(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants: plans whose file lacks a field."""
    whole = planned.plan_fields
    monkeypatch.setattr(
        planned,
        "plan_fields",
        lambda *given: {name: value for name, value in whole(*given).items() if name != field},
    )
    plans = distributed.plan(SIZES, hardware="H100", num_devices=4, num_plans=10**6)
    with pytest.raises((AssertionError, UserError)):
        runs_of(plans, tmp_path)


def test_predictions_for_another_split_are_dropped_with_a_note(tmp_path: Path) -> None:
    plans = distributed.plan(SIZES, hardware="CPU", num_devices=2)
    plans.save(tmp_path / "plan.yaml")
    batch = 2 * plans[0].split.micro_batch
    other = {"batch_size": batch, "global_batch_size": None, "gradient_accumulation_steps": 3}
    run = resolve(load(tmp_path / "plan.yaml", other), get_catalog(), Facts(), Resources())
    assert run.config.planned.step_seconds is None
    assert any("`planned` are ignored" in note and "this run is" in note for note in run.notes)


def test_every_kind_of_plan_trains_as_one_process_does(rank_pool: RankPool) -> None:
    """One plan for each backend, stage of ZeRO, schedule and axis, on 2 and 4 ranks, with and without
    recomputation; `tests.campaigns.plans` trains all of them."""
    reference = campaign.expected()
    for number in (2, 4):
        plans, seen = campaign.plans_on(number), set[Any]()
        for index, row in enumerate(plans.rows):
            split = row.split
            kinds = {
                (split.backend, split.zero_stage, split.activation_checkpointing),
                (split.schedule, split.dims.pipeline),
                *(axis for axis in ("tensor", "context", "shard") if split.dims.size(axis) == number),
                ("accumulates", split.num_micro_batches > 1, split.dims.context > 1),
            }
            if not kinds <= seen:
                seen |= kinds
                assert campaign.distance(plans, index, reference, rank_pool) < EXACT, describe(split)
        assert len(seen) > 12


# -- bad input ---------------------------------------------------------------------------------------


class Chooses(nn.Module):
    """Takes a branch by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * (2.0 if float(x.sum()) > 0.0 else 1.0)
        return out


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: distributed.plan({"layer": 3}), "layer: unknown number.*Did you mean 'layers'"),
        (lambda: distributed.plan(SIZES, global_batch_size=8), "global_batch_size: .*Allowed: 16"),
        (lambda: distributed.plan(SIZES, vectors()), "train_loader: numbers of a transformer"),
        (lambda: distributed.plan(SIZES, axes=["data", "tensors"]), "axes: .*Got 'tensors'"),
        (lambda: distributed.plan(SIZES, codecs=["gzip"]), "codecs: no codec is called 'gzip'"),
        (lambda: distributed.plan(SIZES, hardware="H1000"), "hardware: .*Did you mean 'H100'"),
        (
            lambda: distributed.plan(SIZES, activation_checkpointing="selective"),
            "activation_checkpointing: .*not predicted.*Allowed: none, full",
        ),
        (
            lambda: distributed.plan(Chooses(), vectors(), num_devices=2),
            "model: the control flow of the model.*depends on values",
        ),
        (
            lambda: distributed.plan({"parameters": 1e12, "global_batch": 8}, hardware="H100", num_devices=8),
            "num_devices: the model does not fit.*GB more than a device has.*devices of this kind",
        ),
        (
            lambda: distributed.plan({**SIZES, "global_batch": 7}, num_devices=6, backend="deepspeed"),
            "global_batch.*Got 7.*6 or 12",
        ),
        (
            lambda: distributed.plan(mlp(), vectors(), num_devices=3, global_batch_size=64),
            "global_batch_size: 3 ranks with .* cannot have equal shares of it.*Got 64.*63 or 66",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_a_remedy(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(UserError, match=f"^{text}") as caught:
        call()
    assert caught.value.remedy or caught.value.allowed


def test_a_refusal_of_every_split_has_its_reason_in_the_message() -> None:
    """A batch of vectors cannot be cut along a sequence: what is refused is the number of devices."""
    text = r"num_devices: .*most often \(14 splits\), the loss is a mean over samples.*Got 2\."
    with pytest.raises(UserError, match=text) as caught:
        distributed.plan(chain(), vectors(), num_devices=2, axes=["context"], hardware="CPU")
    assert caught.value.got == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda: distributed.plan(Chooses(), vectors(), num_devices=2, hardware="CPU"),
        lambda: distributed.plan({"parameters": 1e12, "global_batch": 8}, hardware="H100", num_devices=8),
        lambda: distributed.choose_parallelism_strategy(70e9, 2, 80e9),
    ],
)
def test_remedies_name_what_the_caller_can_give(call: Callable[[], Any]) -> None:
    with pytest.raises(UserError) as caught:
        call()
    assert caught.value.remedy
    for inner in ("facts_from_numbers", "offload=("):
        assert inner not in caught.value.remedy


def test_a_model_object_larger_than_the_cluster_names_one_that_is_enough() -> None:
    small = distributed.plan(chain(), vectors(), hardware="CPU", num_devices=1).profile
    tiny = small.model_copy(update={"memory": 30_000.0})
    with pytest.raises(UserError, match="GB more than a device has") as caught:
        distributed.plan(
            chain(), vectors(), hardware=tiny, num_devices=1, global_batch_size=8, axes=["shard"]
        )
    assert int(str(caught.value.allowed).split()[0]) in (2, 4, 8)


def test_no_such_row(tmp_path: Path) -> None:
    plans = distributed.plan(SIZES, hardware="CPU", num_devices=2, num_plans=2)
    with pytest.raises(UserError, match=r"number: there is no plan.*Got 3.*1 to 2"):
        plans.save(tmp_path / "plan.yaml", 2)
    with pytest.raises(UserError, match="--output: the plan cannot be written"):
        plans.save(tmp_path / "missing" / "plan.yaml")


def test_a_large_model_object_is_not_cut_unasked() -> None:
    assert left_out(60.0) is None
    assert "about 10 minutes" in str(left_out(600.0))
    PlanOptions(axes=("data", "expert"))


# -- predicted and measured --------------------------------------------------------------------------


def test_a_comparison_leaves_the_first_record_out() -> None:
    logs = [{"samples_per_second": 1.0}, {"samples_per_second": 40.0}, {"samples_per_second": 50.0}]
    planned = {"step_seconds": 0.2, "memory_bytes": 2**30}
    step, memory = compare(planned, logs, global_batch=8)
    assert step.measured == pytest.approx(8 / 45)
    assert step.error == pytest.approx(0.2 / (8 / 45) - 1)
    assert (memory.measured, memory.error) == (None, None)
    (_, seen) = compare(planned, [{"samples_per_second": 1.0, "memory_peak_mb": 512.0}], 8)
    assert seen.error == pytest.approx(1.0)
    assert compare({}, logs, 8) == []


def test_kendall_tau_by_hand() -> None:
    assert kendall_tau([(1, 10), (2, 20), (3, 30)]) == 1.0
    assert kendall_tau([(1, 30), (2, 20), (3, 10)]) == -1.0
    assert kendall_tau([(1, 10), (2, 30), (3, 20)]) == pytest.approx(1 / 3)
    assert kendall_tau([(1, 1)]) is None
    assert math.isclose(kendall_tau([(1, 1), (1, 2)]) or 0.0, 0.0)


def test_a_model_keeps_its_first_blocks() -> None:
    model = chain()
    keep_blocks(model, 2)
    assert [type(child).__name__ for child in model] == ["Sequential", "Sequential", "Linear"]
    assert model(vectors(3)[0]).shape == (3, 4)
    with pytest.raises(UserError, match=r"--verify-layers: .*Got 6.*1 to 2"):
        keep_blocks(model, 6)
