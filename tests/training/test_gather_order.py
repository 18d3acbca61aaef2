"""Models of which samples use different parts, under backends that gather parameters in forward."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from distributed import UserError
from distributed.testing.conformance import distance
from distributed.testing.oracle import oracle_fit
from distributed.testing.rank_pool import RankPool
from distributed.testing.refusal_cases import CASES
from tests.support.training import make_trainer

EXACT = 1e-9
BATCH, RANKS, LENGTH = 2, 2, 48


def fit(habit: str, pool: RankPool, backend: str, **given: Any) -> nn.Module:
    """The model of a case, trained in order on two ranks."""
    case = CASES[habit]
    model = case.build()
    trainer = make_trainer(
        model, RANKS, pool, backend=backend, optimizer=case.optimizer(model), batch_size=BATCH,
        data={"shuffle": False}, **given,
    )  # fmt: skip
    trainer.fit(case.data(LENGTH), max_steps=LENGTH // (BATCH * RANKS))
    return model


def plain(habit: str) -> nn.Module:
    """The same in one process."""
    case = CASES[habit]
    model = case.build()
    size = BATCH * RANKS
    options: Any = {"global_batch_size": size, "steps": LENGTH // size, "shuffle": False}
    oracle_fit(model, case.optimizer(model), *case.data(LENGTH), **options)
    return model


@pytest.mark.parametrize("habit", ["branches", "idle-layer", "experts-together"])
def test_fsdp_trains_parameters_that_only_some_ranks_or_steps_use(habit: str, rank_pool: RankPool) -> None:
    assert distance(fit(habit, rank_pool, "fsdp"), plain(habit)) < EXACT


@pytest.mark.parametrize("habit", ["experts", "experts-later"])
def test_fsdp_refuses_blocks_that_ranks_do_not_all_call(habit: str, rank_pool: RankPool) -> None:
    with pytest.raises(UserError, match="the ranks called different modules in one micro-batch"):
        fit(habit, rank_pool, "fsdp")


def test_fsdp_trains_them_when_the_model_is_gathered_as_a_whole(rank_pool: RankPool) -> None:
    trained = fit("experts-later", rank_pool, "fsdp", fsdp={"wrap": "whole"})
    assert distance(trained, plain("experts-later")) < EXACT


def test_zero_3_refuses_a_branch_that_no_rank_uses(rank_pool: RankPool) -> None:
    """All ranks call the same modules; weight decay would move the branch that the step leaves out."""
    with pytest.raises(UserError, match="no sample of the global batch used 'experts"):
        fit("experts-together", rank_pool, "deepspeed", zero_stage=3)


@pytest.mark.parametrize("habit", ["branches", "experts-later"])
def test_zero_3_refuses_modules_that_ranks_do_not_all_call(habit: str, rank_pool: RankPool) -> None:
    with pytest.raises(UserError, match="the ranks called different modules in one micro-batch"):
        fit(habit, rank_pool, "deepspeed", zero_stage=3)
