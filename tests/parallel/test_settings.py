"""Settings of torch that training on a mesh changes have their earlier values after the run."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor

from distributed.parallel.asynchronous import overlapped_collectives
from distributed.testing.rank_pool import RankPool
from tests.parallel.models import ENTRIES, tokens
from tests.support.training import OnStep, make_trainer


@pytest.mark.parametrize("before", [False, True])
def test_overlapped_collectives_end_with_the_run(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is asked for them; the groups over GPUs are torch's."""
    enabled: list[str] = []
    name = "torch.distributed._symmetric_memory.enable_symm_mem_for_group"
    monkeypatch.setattr(name, enabled.append)
    group: Any = SimpleNamespace(group_name="tensor")
    with inductor.patch(_micro_pipeline_tp=before):
        with overlapped_collectives(group):
            assert inductor._micro_pipeline_tp
        assert inductor._micro_pipeline_tp == before
    assert enabled == ["tensor"]


def has_fast_path(expected: bool, context: Any) -> None:
    assert torch.backends.mha.get_fastpath_enabled() == expected


@pytest.mark.starts_processes
def test_the_fast_path_of_attention_is_off_in_a_run_that_cuts_the_model() -> None:
    """And on again in the next run of the same ranks, which no other test has used."""
    with closing(RankPool()) as pool:
        for tensor in (2, 1):
            model, parallel = ENTRIES["encoder"].build(), {"tensor": tensor}
            trainer = make_trainer(model, 2, pool, backend="pytorch-ddp", parallel=parallel, batch_size=4)
            trainer.callbacks = [OnStep(partial(has_fast_path, tensor == 1))]
            trainer.fit(tokens(8), max_steps=1)
