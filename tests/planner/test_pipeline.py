"""The plan is made once, with all its notes; `fit` chooses its backend once."""

from __future__ import annotations

import pytest

from distributed import Trainer
from distributed.config import DistributedConfig
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.planner import backend_choice
from distributed.planner.resolve import resolve
from distributed.registry.catalog import build_catalog, get_catalog
from distributed.registry.hookspecs import hookimpl
from distributed.testing.conformance import problem, small_model


class Notes:
    """A plugin that has something to add."""

    @hookimpl
    def check_plan(self, plan: RunPlan) -> list[str]:
        return [f"checked {plan.world_size} ranks", "twice"]


class Silent:
    @hookimpl
    def check_plan(self, plan: RunPlan) -> None:
        assert plan.notes == ()


def test_notes_of_hooks_follow_those_of_the_planner() -> None:
    catalog = build_catalog([Notes(), Silent()], found=[])
    catalog.backends.update(get_catalog().backends)
    config = DistributedConfig(num_gpus=2, global_batch_size=4, checkpoint_dir="c", elastic={"min_ranks": 1})
    plan = resolve(config, catalog, Facts(), Resources(0))
    assert plan.notes == (
        "no GPU found: the ranks run as CPU processes over gloo", "checked 2 ranks", "twice"
    )  # fmt: skip


@pytest.mark.parametrize("zero", [{}, {"zero_stage": 1}])
def test_a_dry_plan_chooses_its_backend_once(zero: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    chosen = backend_choice.chosen_backend

    def counted(*arguments: object) -> object:
        calls.append(arguments)
        return chosen(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(backend_choice, "chosen_backend", counted)
    trainer = Trainer(small_model(), device="cpu", **zero)
    config = trainer.config
    plan = trainer._plan(config, get_catalog(), trainer.task_of(config, problem(4), None))
    assert plan.spec.name == ("deepspeed" if zero else "pytorch-ddp")
    assert len(calls) == 1
