"""Parameters of one rank: those of the stage that it computes with, and those that it holds."""

from __future__ import annotations

from distributed.planner.estimates.engine import Engine
from distributed.planner.estimates.numbers import ModelNumbers
from distributed.planner.estimates.split import Split

__all__ = ["held_parameters", "rank_parameters"]


def rank_parameters(numbers: ModelNumbers, split: Split, engine: Engine) -> tuple[float, float]:
    """Parameters with which a rank of the largest stage computes: of experts, and all others.

    Shards are not counted off. Without a mixture of experts, the first is 0.
    """
    dims = split.dims
    blocks = -(-numbers.layers // dims.pipeline)
    experts = blocks * numbers.expert_parameters / dims.tensor
    embedding = numbers.embedding_parameters / (dims.tensor if engine.cuts_embedding else 1)
    output = numbers.output_parameters / dims.tensor
    ends = max(embedding, output) if dims.pipeline > 1 else embedding + output
    others = blocks * numbers.shared_parameters / dims.tensor + ends
    # A number of parameters that was given beside the sizes scales both.
    scale = numbers.parameters / numbers.counted
    if numbers.experts > 1:
        return scale * experts / dims.expert, scale * others
    return 0.0, scale * (experts + others)


def held_parameters(numbers: ModelNumbers, split: Split, engine: Engine, stage: int) -> float:
    """Parameters of which a rank holds what is divided from ZeRO `stage` on.

    Args:
        stage: 1 for the optimizer's state, 2 for gradients, 3 for weights; ranks along ``shard`` divide all.
    """
    experts, others = rank_parameters(numbers, split, engine)
    shards = split.dims.shard * (split.dims.data if split.zero_stage >= stage else 1)
    # The ranks that hold different experts are among the shards, and have divided experts already.
    return others / shards + experts / max(1, shards // split.dims.expert)
