"""Model and variants for `transfers`, with indivisible shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distributed.testing.parity.diagnosis import TOLERANCES

_WORDS, _WIDTH = 11, 7


class OddModel(nn.Module):
    """Words to the logits of the next ones. 7 and 11 rows, one element and none of a dimension are
    what sharding trips over; three ranks of four hold nothing of some tensors.

    Args:
        tied: whether the head's weight is the embedding's.
        frozen: whether one layer does not learn.
    """

    def __init__(self, tied: bool, frozen: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, _WIDTH)
        self.norm = nn.LayerNorm(_WIDTH)
        self.enter, self.leave = nn.Linear(_WIDTH, 5), nn.Linear(5, _WIDTH)
        self.gate = nn.Parameter(torch.ones(1))
        self.heat = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("shift", torch.randn(_WIDTH))
        self.head = nn.Linear(_WIDTH, _WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.enter.requires_grad_(not frozen)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        x = x + self.shift.to(x.dtype)
        x = x + self.gate * self.leave(torch.tanh(self.enter(self.norm(x))))
        logits: Tensor = self.head(x) * self.heat
        return logits


def words(length: int = 26) -> tuple[Tensor, Tensor]:
    """`length` sequences of four words, and the next words, a third of them masked."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, _WORDS, (length, 4), generator=generator)
    y = torch.randint(0, _WORDS, (length, 4), generator=generator)
    return x, torch.where(torch.rand(length, 4, generator=generator) < 0.3, -100, y)


def _adamw(model: nn.Module, *, eps: float = 1e-8) -> torch.optim.Optimizer:
    """Another rate and no weight decay for parameters of one dimension or none."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if p.dim() > 1]},
        {"params": [p for p in trainable if p.dim() < 2], "lr": 0.02, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, eps=eps)


def _four_groups(model: nn.Module) -> torch.optim.Optimizer:
    """A group each for three layers, and then the rest: another order than the model's."""
    own = {"embed": 0.01, "enter": 0.02, "head": 0.04}
    groups: dict[float, list[nn.Parameter]] = {rate: [] for rate in (*own.values(), 0.03)}
    for name, p in model.named_parameters():
        groups[own.get(name.split(".")[0], 0.03)].append(p)
    return torch.optim.AdamW([{"params": p, "lr": rate, "weight_decay": rate} for rate, p in groups.items()])


def _sgd(model: nn.Module, *, momentum: float) -> torch.optim.Optimizer:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trainable, lr=0.1, momentum=momentum)


def _adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([p for p in model.parameters() if p.requires_grad], lr=0.01)


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    """Takes matrices alone; the others keep their first values."""
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01)


@dataclass(frozen=True)
class Case:
    """One training that every backend begins and finishes.

    Attributes:
        name: name in the table.
        optimizer: function from the model to its optimizer.
        tolerance: largest distance from the weights of the uninterrupted run.
        tied, frozen: arguments of `OddModel`.
        options: configuration fields for every backend.
        own: further fields for single backends, by name.
    """

    name: str
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    tolerance: float = TOLERANCES["float64", "adamw"]
    dtype: torch.dtype = torch.float64
    tied: bool = False
    frozen: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def model(self) -> OddModel:
        """The same weights every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return OddModel(self.tied, self.frozen).to(self.dtype)


BASE = Case("AdamW, two groups", _adamw)
"""Case for every ordered pair of backends."""

_F32 = torch.float32
_NEAR = partial(_adamw, eps=1e-4)
_OFFLOAD = {f"deepspeed-{stage}": {"zero.offload_optimizer": "cpu"} for stage in (1, 2, 3)}

VARIANTS = [
    Case("SGD, momentum", partial(_sgd, momentum=0.9)),
    Case("Adafactor", _adafactor),
    # It orthogonalises in bfloat16, whatever the dtype of the weights.
    Case("Muon", _muon, TOLERANCES["bf16", "sgd"]),
    Case("tied parameters", _adamw, tied=True),
    Case("frozen parameters", _adamw, frozen=True),
    Case("tied and frozen, SGD", partial(_sgd, momentum=0.9), tied=True, frozen=True),
    Case("four groups", _four_groups),
    Case("CPU offload", _adamw, own={"fsdp": {"fsdp.cpu_offload": True}, **_OFFLOAD}),
    Case("float32, SGD", partial(_sgd, momentum=0.0), TOLERANCES["float32", "sgd"], _F32),
    Case("float32, AdamW eps=1e-4", _NEAR, TOLERANCES["float32", "adamw"], _F32),
    Case("bf16", _NEAR, TOLERANCES["bf16", "adamw"], _F32, options={"mixed_precision": "bf16"}),
    Case(
        "fp16, with scaler",
        _NEAR,
        TOLERANCES["bf16", "adamw"],
        _F32,
        options={"mixed_precision": "fp16", "scaler_init_scale": 1024.0, "scaler_growth_interval": 3},
    ),
    Case(
        "bf16 weights, float32 masters",
        _NEAR,
        TOLERANCES["bf16", "adamw"],
        _F32,
        options={"mixed_precision": "bf16"},
        own={f"deepspeed-{n}": {"deepspeed_config": {"bf16": {"enabled": True}}} for n in (1, 2, 3)},
    ),
]
"""Cases for a ring of backends: each loads its neighbour's checkpoint."""
