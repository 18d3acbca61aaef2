"""A small language model with what sharding trips over: rows that nothing divides, tied and frozen
parameters, one without a dimension, blocks side by side."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed import Callback, Trainer
from distributed.checkpoint.reader import PortableReader
from distributed.interfaces.callback import Context
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer

WORDS, WIDTH = 11, 7


class Block(nn.Module):
    """x + tanh(norm(x)) through five cells; counts how often it runs."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.enter, self.leave = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        Block.calls += 1
        out: Tensor = x + self.leave(torch.tanh(self.enter(self.norm(x))))
        return out


class TinyLM(nn.Module):
    """Words to the logits of the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.shift = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.heat = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def features(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.shift
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(words)) * self.heat
        return logits


def tiny(dtype: torch.dtype = torch.float64) -> TinyLM:
    """The same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TinyLM().to(dtype)


def words(length: int = 26) -> tuple[Tensor, Tensor]:
    """`length` sequences of four words, and the next words, a third of them masked."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, WORDS, (length, 4), generator=generator)
    y = torch.randint(0, WORDS, (length, 4), generator=generator)
    return x, torch.where(torch.rand(length, 4, generator=generator) < 0.3, -100, y)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with another rate for parameters of one dimension or none."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() > 1]},
        {"params": [p for p in trainable if p.dim() < 2], "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def own_loss(model: Any, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A training step that reaches past the model's forward."""
    logits = F.linear(model.features(batch[0]), model.embed.weight) * model.heat
    total = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum")
    return total, (batch[1] != -100).sum()


def trainer_of(
    backend: str, ranks: int = 1, pool: RankPool | None = None, model: Any = None, **given: Any
) -> Trainer:
    """A trainer of `model` (a new `tiny`) with twelve sequences a step, on ranks of the pool."""
    fields = {"global_batch_size": 12, "optimizer": two_groups, "gradient_clipping": 0.5, **given}
    return make_trainer(tiny() if model is None else model, ranks, pool, backend=backend, **fields)


class HoldsWhatWasSaved(Callback):
    """Fails where a rank, having loaded a checkpoint, would save other bits or not all of it."""

    all_ranks = True

    def __init__(self, path: str) -> None:
        self.path = path

    def on_run_start(self, context: Context) -> None:
        backend: Any = context.backend  # type: ignore[attr-defined]
        reader, state = PortableReader(self.path), backend.export_state()
        sizes: dict[str, int] = {}
        for chunk in state.chunks:
            stored = reader.read(chunk.key, chunk.name, chunk.start, len(chunk.data))
            assert torch.equal(stored, chunk.data), (chunk.key, chunk.name)
            assert reader.tensors()[chunk.key, chunk.name] == chunk.shape
            sizes[f"{chunk.key} {chunk.name}"] = sizes.get(f"{chunk.key} {chunk.name}", 0) + len(chunk.data)
        ranks = backend.gather_objects((sizes, state.scalars))
        for (key, name), shape in reader.tensors().items():
            found = sum(part.get(f"{key} {name}", 0) for part, _ in ranks)
            assert found == torch.Size(shape).numel(), (key, name)
        assert ranks[0][1] == reader.scalars
        assert [group["names"] for group in state.groups] == [group["names"] for group in reader.groups]
