"""Facts from numbers are those of a model that has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed.errors import UserError
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.operations.planning.collect_facts import collect_facts
from distributed.operations.planning.decoder import facts_from_numbers
from distributed.planner.estimates.memory import predict_memory
from distributed.planner.estimates.split import Split
from distributed.planner.estimates.work_facts import flops_of

NUMBERS: dict[str, Any] = {
    "layers": 3,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 96,
    "vocabulary": 128,
    "sequence": 32,
}


def test_they_are_those_of_a_llama() -> None:
    """Parameters and operations are equal. transformers casts in its norms and saves a little more."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    tokens = torch.zeros(2, 32, dtype=torch.long)
    theirs = collect_facts(transformers.LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens})
    ours = facts_from_numbers(**NUMBERS)
    assert ours.num_parameters == theirs.num_parameters
    flops = [[flops_of(block.forward, 1) for block in facts.work.blocks[1:]] for facts in (ours, theirs)]
    assert flops[0] == flops[1]
    split = Split(ParallelDims(), "serial", micro_batch=64)
    ratio = predict_memory(ours, split).total / predict_memory(theirs, split).total
    assert 0.8 < ratio < 1.05


def test_a_tied_output_is_no_further_parameter() -> None:
    two, one = (facts_from_numbers(**NUMBERS, tied=tied).num_parameters for tied in (False, True))
    assert two - one == 128 * 64


@pytest.mark.parametrize(
    ("field", "number", "allowed"),
    [
        ("layers", 0, "1 or more"),
        ("sequence", -3, "1 or more"),
        ("hidden", 66, "a multiple of heads=4"),
        ("kv_heads", 3, "a multiple of kv_heads=3"),
    ],
)
def test_numbers_that_fit_no_model_are_errors(field: str, number: int, allowed: str) -> None:
    with pytest.raises(UserError) as caught:
        facts_from_numbers(**{**NUMBERS, field: number})
    assert caught.value.allowed == allowed
