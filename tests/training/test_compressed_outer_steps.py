"""Outer steps by a codec that rounds or leaves out are what the oracle of the codec computes.

The oracle of the algorithm (low_communication_oracle) simulates all workers, and adds up their changes by the
oracle of the codec (codec_oracle), whose error feedback is from one outer step to the next. Ranks agree with
both to 1e-9 in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed.testing.conformance import distance
from distributed.testing.rank_pool import RankPool
from tests.communication import codec_oracle
from tests.support.training import make_trainer
from tests.training import low_communication_mutants
from tests.training.low_communication_oracle import Oracle
from tests.training.test_compression import CODECS, WITH_FEEDBACK, build, data
from tests.training.test_low_communication import DILOCO, LOCAL, OUTER, STREAMING

BATCH, EPOCHS = 12, 2  # four whole batches and one of four samples
RATIO = 0.3
momentum = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
PARTS = [[0, 1, 2], [3, 4, 5]]  # of the model: 1960 of 2114 elements, and the others
ALGORITHMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "local SGD": ({**LOCAL, "period": 2}, {"period": 2}),
    "DiLoCo": ({**DILOCO, "period": 2}, {"period": 2, **OUTER}),
    "streaming": (
        {**STREAMING, "period": 2, "overlap_steps": 1},
        {"period": 2, "parts": PARTS, "overlap": 1, "mixing": 0.5, **OUTER},
    ),
}
OPTIONS = {"top-k": {"ratio": RATIO}, "random-k": {"ratio": RATIO}, "powersgd": {"rank": codec_oracle.RANK}}


class Coded(Oracle):
    """The workers send their weighted changes by a codec; `exchanges` counts how often they have sent."""

    def __init__(self, codec: str, ranks: int, **numbers: Any) -> None:
        super().__init__(build, momentum, ranks, **numbers)
        self.names = [name for name, _ in self.workers[0].named_parameters()]
        rows = codec_oracle.first_rows(self.names)
        self.codec = codec_oracle.ErrorFeedback(codec, rows, feeds_back=codec in WITH_FEEDBACK, ratio=RATIO)
        self.exchanges = 0

    def _send(self, part: int) -> None:
        super()._send(part)
        self.exchanges += 1

    def _added_up(self, i: int, changes: Sequence[Tensor]) -> Tensor:
        return self.codec(changes, self.names[i], self.exchanges)


def off(pool: RankPool, name: str, codec: str, ranks: int, **given: Any) -> float:
    """Largest distance of trained parameters from the oracle's."""
    section, numbers = ALGORITHMS[name]
    model = build()
    fields = {
        "low_communication": section,
        "compression": {"codec": codec, **OPTIONS.get(codec, {})},
        "seed": codec_oracle.SEED,
        "global_batch_size": BATCH,
        "data": {"shuffle": False},
        "optimizer": momentum,
    }
    make_trainer(model, ranks, pool, **{**fields, **given}).fit(data(), epochs=EPOCHS)
    oracle = Coded(codec, ranks, **numbers)
    oracle.train(*data(), BATCH, EPOCHS, shuffle=False)
    return distance(model, oracle.workers[-1])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_outer_steps_are_those_of_the_codecs_oracle(rank_pool: RankPool, codec: str, ranks: int) -> None:
    """Six outer steps, of which those at the end of an epoch come after a single inner step."""
    assert off(rank_pool, "DiLoCo", codec, ranks) < 1e-9


@pytest.mark.parametrize(
    ("name", "codec"), [("local SGD", "int8"), ("local SGD", "powersgd"), ("streaming", "int8")]
)
def test_other_algorithms_send_by_a_codec(rank_pool: RankPool, name: str, codec: str) -> None:
    assert off(rank_pool, name, codec, 3) < 1e-9


@pytest.mark.parametrize(("mutant", "codec"), low_communication_mutants.OF_CODECS.items())
def test_broken_forms_are_noticed(mutant: str, codec: str, rank_pool: RankPool) -> None:
    with low_communication_mutants.registered(mutant):
        assert off(rank_pool, "DiLoCo", codec, 3, backend=mutant) > 1e-6
