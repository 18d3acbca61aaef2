"""Parameters of one rank: those of the stage that it computes with, and those that it holds."""

from __future__ import annotations

from typing import NamedTuple

from distributed.planner.estimates.engine import Engine
from distributed.planner.estimates.numbers import ModelNumbers
from distributed.planner.estimates.split import Split

__all__ = ["RankShare", "rank_share"]


class RankShare(NamedTuple):
    """Parameters with which a rank of the largest stage computes; shards are not counted off.

    Attributes:
        experts: of experts, where the model is a mixture of them.
        others: of everything else.
        block: of one block.
        embedding: of the embedding, whatever the stage.
        output: of the output layer, whatever the stage; 0 where it is the embedding.
    """

    experts: float
    others: float
    block: float
    embedding: float
    output: float

    @property
    def whole(self) -> float:
        """All of them."""
        return self.experts + self.others

    def held(self, split: Split, stage: int) -> float:
        """Parameters of which a rank holds what is divided from ZeRO `stage` on.

        Args:
            stage: 1 for the optimizer's state, 2 for gradients, 3 for weights; ranks along ``shard`` divide
                all.
        """
        shards = split.dims.shard * (split.dims.data if split.zero_stage >= stage else 1)
        # The ranks that hold different experts are among the shards, and have divided experts already.
        return self.others / shards + self.experts / max(1, shards // split.dims.expert)


def rank_share(numbers: ModelNumbers, split: Split, engine: Engine) -> RankShare:
    """The parameters of one rank under `split`."""
    dims = split.dims
    # A number of parameters that was given beside the sizes scales all of them.
    scale = numbers.parameters / numbers.counted
    each = scale / dims.tensor
    experts = each * numbers.expert_parameters / dims.expert
    shared = each * numbers.shared_parameters
    embedding = numbers.embedding_parameters * (each if engine.cuts_embedding else scale)
    output = each * numbers.output_parameters
    ends = max(embedding, output) if dims.pipeline > 1 else embedding + output
    blocks = -(-numbers.layers // dims.pipeline)
    block = shared + experts
    if numbers.experts > 1:
        return RankShare(blocks * experts, blocks * shared + ends, block, embedding, output)
    return RankShare(0.0, blocks * block + ends, block, embedding, output)
