"""Ranks that share a model keep the contracts: no backend has to be data-parallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.interfaces.backend_spec import BackendSpec
from distributed.registry.catalog import get_catalog
from distributed.testing.conformance import BackendConformance, distance, problem, small_model
from distributed.testing.rank_pool import RankPool

NAME = "shared-model"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[BackendSpec]:
    # Ranks import from where the caller does.
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from shared_model import one_slice

    catalog = get_catalog()
    spec = replace(
        catalog.backend("pytorch-ddp"),
        name=NAME,
        target="shared_model:SharedModelBackend",
        data_parallel_size=one_slice,
    )
    catalog.backends[NAME] = spec
    yield spec
    del catalog.backends[NAME]


@pytest.fixture
def suite(rank_pool: RankPool) -> BackendConformance:
    kit = BackendConformance()
    kit.backend, kit.sizes, kit.pool = NAME, (2,), rank_pool
    return kit


def test_a_global_batch_is_one_slice(suite: BackendConformance) -> None:
    suite.test_c1_global_batch_is_kept_on_any_number_of_ranks()
    suite.test_c2_c3_parity_with_the_oracle(13, 4)
    suite.test_c3_every_sample_is_used_once_an_epoch()


def test_a_rank_that_sees_no_loss_reports_none(suite: BackendConformance) -> None:
    suite.test_c2_masked_tokens_weigh_alike(2)
    suite.test_c6_clips_the_whole_gradient_once()


def test_a_rank_that_sees_no_output_evaluates_nothing(suite: BackendConformance) -> None:
    suite.test_c5_every_validation_sample_counts_once()


def test_state_known_in_part_by_each_rank_is_saved_whole(suite: BackendConformance) -> None:
    """Two groups of AdamW, each with its moments and counters on another rank, in two halves."""
    x, y = problem(25)
    whole, parts = small_model(), small_model()
    suite.trainer(whole, 2, batch_size=2, optimizer=_two_groups).fit((x, y), max_steps=20)
    trainer = suite.trainer(parts, 2, batch_size=2, optimizer=_two_groups)
    trainer.fit((x, y), max_steps=7)
    trainer.fit((x, y), max_steps=13)
    assert distance(whole, parts) < 1e-9


@pytest.mark.parametrize(("first", "second"), [(NAME, "pytorch-ddp"), ("pytorch-ddp", NAME)])
def test_other_backends_resume_it_and_it_resumes_them(
    suite: BackendConformance, first: str, second: str, tmp_path: Path
) -> None:
    x, y = problem(25)
    whole, parts = small_model(), small_model()
    given = {"global_batch_size": 4, "optimizer": _two_groups, "gradient_clipping": 0.5}
    suite.trainer(whole, 2, **given).fit((x, y), max_steps=12)
    for backend, steps, model in ((first, 6, small_model()), (second, 12, parts)):
        suite.backend = backend
        suite.trainer(
            model,
            2,
            **given,
            checkpoint_dir=str(tmp_path),
            resume_from_checkpoint=True,
            checkpoint={"every_n_steps": 6},
        ).fit((x, y), max_steps=steps)
    assert distance(whole, parts) < 1e-9


def test_a_spec_that_cuts_the_batch_unevenly_is_refused(suite: BackendConformance) -> None:
    catalog = get_catalog()
    catalog.backends[NAME] = replace(catalog.backends[NAME], data_parallel_size=partial(_slices, 3))
    with pytest.raises(ValueError, match="cuts a global batch into 3 slices for 2 ranks"):
        suite.trainer(small_model(), 2).fit(problem(4), max_steps=1)


def test_a_backend_that_contradicts_its_spec_is_refused(suite: BackendConformance) -> None:
    catalog = get_catalog()
    catalog.backends[NAME] = replace(catalog.backends[NAME], data_parallel_size=None)
    with pytest.raises(Exception, match="cuts a global batch into 1 slices and its spec states 2"):
        suite.trainer(small_model(), 2).fit(problem(4), max_steps=1)


def _slices(number: int, config: Any, num_ranks: int) -> int:
    return number


def _two_groups(model: torch.nn.Sequential) -> torch.optim.Optimizer:
    first, _, last = model
    groups = [{"params": first.parameters()}, {"params": last.parameters(), "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01)
