"""Dicts of a guide with settings of the model and of the run: split, they train as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed_kernels import create_distributed_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distributed import split_settings
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.seeds.dilated import LARGE, MEDIUM, SMALL
from tests.support.training import make_trainer

VOCABULARY, LENGTH, BATCH, RATE = 16, 64, 4, 1e-2


def scaled(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings with sizes divided, so that float64 takes no time: 64 tokens instead of 32,768."""
    lengths = [length // 512 for length in settings["segment_lengths"]]
    return {**settings, "embed_dim": 32, "num_heads": 4, "num_layers": 2, "segment_lengths": lengths}


def tokens() -> tuple[Tensor, Tensor]:
    """Sequences and the tokens after each of theirs, some of which do not count."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(VOCABULARY, (2 * BATCH, LENGTH + 1), generator=generator)
    keep = torch.rand(2 * BATCH, LENGTH, generator=generator) < 0.8
    return x[:, :-1], torch.where(keep, x[:, 1:], -100)


def build(arguments: dict[str, Any]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = create_distributed_model(**arguments, vocab_size=VOCABULARY, max_seq_len=LENGTH)
        return model.double()


def plain(model: nn.Module) -> nn.Module:
    """Two steps of AdamW over all samples of each batch, in plain PyTorch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    for x, y in zip(*(t.split(BATCH) for t in tokens()), strict=True):
        optimizer.zero_grad()
        cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("settings", "ranks", "parallel", "backend"),
    [
        pytest.param(SMALL, 2, {}, "deepspeed", id="small"),
        pytest.param(MEDIUM, 2, {}, "pytorch-ddp", id="medium"),
        pytest.param(MEDIUM, 4, {}, "fsdp", id="medium, sharded"),
        pytest.param(LARGE, 4, {}, "pytorch-ddp", id="large"),
        pytest.param(LARGE, 4, {"context": 1}, "fsdp", id="large, sharded"),
    ],
)
def test_a_dict_of_the_guide_trains_as_one_process(
    settings: dict[str, Any], ranks: int, parallel: dict[str, int], backend: str, rank_pool: RankPool
) -> None:
    model_part, run_part = split_settings(scaled(settings), num_processes=ranks, parallel=parallel)
    model = build(model_part)
    trainer = make_trainer(
        model,
        ranks,
        rank_pool,
        learning_rate=RATE,
        global_batch_size=BATCH,
        data={"shuffle": False},
        **run_part,
    )
    history = trainer.fit(tokens(), max_steps=2)
    assert history.backend == backend
    expected = plain(build(model_part))
    differences = [
        float((a - b).detach().abs().max())
        for a, b in zip(model.parameters(), expected.parameters(), strict=True)
    ]
    assert max(differences) < EXACT
