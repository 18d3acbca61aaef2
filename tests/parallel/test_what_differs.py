"""What would train something else on ranks that share a model is refused before its first step is taken.

Each case is a model or a plan that a user may have, and whose ranks differ without an error of their own.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn

from distributed import UserError
from distributed.parallel.automatic_pairs import find_pairs
from distributed.testing.rank_pool import RankPool
from tests.parallel.models import VOCABULARY, WIDTH, Perceptron, tokens
from tests.parallel.test_tensor_parallel import trainer_of

DATA = tokens(12)


class ByNumber(nn.Module):
    """Attention-like: what a head computes depends on its number, which each rank counts from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        heads = self.up(self.tokens(tokens)).unflatten(-1, (-1, 4))
        slopes = torch.arange(heads.shape[-2], dtype=heads.dtype)[:, None]
        logits: Tensor = self.down((heads * slopes).flatten(-2))
        return logits


class OverTheWidth(ByNumber):
    """A softmax over the hidden layer, of which each rank has a part."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.down(self.up(self.tokens(tokens)).softmax(-1))
        return logits


class FixedHeads(ByNumber):
    """A view with a fixed number of heads."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.up(self.tokens(tokens))
        logits: Tensor = self.down(hidden.view(*hidden.shape[:-1], 4, 4).tanh().flatten(-2))
        return logits


class OwnNoise(Perceptron):
    """Noise of a generator of its own, seeded by the process."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.training:
            generator = torch.Generator().manual_seed(os.getpid())
            x = x + 0.1 * torch.randn(x.shape, dtype=x.dtype, generator=generator)
        logits: Tensor = self.layers(x)
        return logits


class Scaled(ByNumber):
    """A weight for each feature of the hidden layer, of which each rank needs a part."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.down(self.up(self.tokens(tokens)).tanh() * self.scale)
        return logits


PAIR = {"up": "colwise", "down": "rowwise"}


@pytest.mark.parametrize("kind", [ByNumber, OverTheWidth])
def test_a_layer_that_needs_its_whole_width(kind: type[nn.Module], rank_pool: RankPool) -> None:
    trainer = trainer_of(kind(), "pytorch-ddp", 2, rank_pool, {"tensor": 2, "tensor_plan": PAIR})
    with pytest.raises(UserError, match="computes something else when 2 ranks cut it"):
        trainer.fit(DATA, max_steps=1)


def test_a_layer_that_counts_on_its_width(rank_pool: RankPool) -> None:
    trainer = trainer_of(FixedHeads(), "pytorch-ddp", 2, rank_pool, {"tensor": 2, "tensor_plan": PAIR})
    with pytest.raises(UserError, match="cannot be computed when 2 ranks cut it: RuntimeError"):
        trainer.fit(DATA, max_steps=1)


def test_it_has_no_pair_of_layers_that_could_be_cut(rank_pool: RankPool) -> None:
    for kind in (ByNumber, OverTheWidth):
        trainer = trainer_of(kind(), "pytorch-ddp", 2, rank_pool, {"tensor": 2})
        with pytest.raises(UserError, match="no module of the model can be cut"):
            trainer.fit(DATA, max_steps=1)


class Gated(nn.Module):
    """Three layers make what three read."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("value", "out", "gate", "more", "scale", "rest"):
            setattr(self, name, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.value(x) * self.gate(x).sigmoid() + self.scale(x)
        found: Tensor = self.out(hidden) + self.rest(hidden) + self.more(hidden)
        return found


def test_pairs_are_in_the_order_of_their_calls_on_every_hash_seed() -> None:
    """This process has one of many seeds; of 720 orders, one is right."""
    model = Gated()
    found = find_pairs(model, lambda: model(torch.randn(2, 8)))
    assert list(found) == ["value", "gate", "scale", "out", "rest", "more"]
    assert list(found.values()) == ["colwise"] * 3 + ["rowwise"] * 3


def test_random_numbers_that_differ(rank_pool: RankPool) -> None:
    trainer = trainer_of(OwnNoise().double(), "pytorch-ddp", 2, rank_pool, {"tensor": 2})
    with pytest.raises(UserError, match=r"different inputs for it\. The step was not taken"):
        trainer.fit(DATA, max_steps=1)


@pytest.mark.parametrize(("backend", "ranks"), [("pytorch-ddp", 2), ("fsdp", 4)])
def test_a_weight_between_the_layers_gets_a_part_of_its_gradient(
    backend: str, ranks: int, rank_pool: RankPool
) -> None:
    trainer = trainer_of(Scaled(), backend, ranks, rank_pool, {"tensor": 2, "tensor_plan": PAIR})
    with pytest.raises(UserError, match=r"the gradient of 'scale' differs .* The step was not taken"):
        trainer.fit(DATA, max_steps=1)


class OnlyInTraining(Perceptron):
    """Cannot be computed before the run, as a kernel for GPUs on a CPU."""

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.training:
            raise RuntimeError("no kernel")
        return super().forward(tokens)


@pytest.mark.starts_processes
def test_a_model_that_was_not_compared_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    plan = {"layers.0": "colwise", "layers.2": "rowwise"}
    for model, expected in ((OnlyInTraining(), True), (Perceptron(), False)):
        parallel = {"tensor": 2, "tensor_plan": plan}
        trainer_of(model.double(), "pytorch-ddp", 2, None, parallel).fit(DATA, max_steps=1)
        assert ("was not compared" in capfd.readouterr().out) == expected
