"""A model of transformers returns on ranks what it returns where it was built."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.parallel.models import LENGTH, VOCABULARY, WIDTH, tokens
from tests.support.training import make_trainer

pytest.importorskip("transformers")


def neox() -> nn.Module:
    """A GPT-NeoX, which no other test builds on a rank, with hidden states among its outputs."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    config = GPTNeoXConfig(
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        output_hidden_states=True,
        use_cache=False,
    )
    model: nn.Module = GPTNeoXForCausalLM(config)  # type: ignore[no-untyped-call]
    return model.double()


def of_hidden_states(model: Any, batch: Any) -> Tensor:
    """Also of none, as a loss that only weighs them may be."""
    found = model(input_ids=batch[0])
    loss: Tensor = found.logits.square().mean((1, 2))
    for state in found.hidden_states or ():
        loss = loss + state.square().mean((1, 2))
    return loss.mean()


def test_hidden_states_are_outputs_on_every_rank(rank_pool: RankPool) -> None:
    found = []
    for ranks in (1, 2):
        model = neox()
        trainer = make_trainer(
            model, ranks, rank_pool, global_batch_size=8, training_step=of_hidden_states,
            optimizer=partial(torch.optim.AdamW, eps=1e-4),
        )  # fmt: skip
        trainer.fit(tokens(16), max_steps=2)
        found.append([p.detach() for p in model.parameters()])
    assert max(float((a - b).abs().max()) for a, b in zip(*found, strict=True)) < EXACT
