"""Small modules put together from features of real ones, as a strategy of Hypothesis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

__all__ = ["CLASSES", "WIDTH", "Recipe", "recipes"]

WIDTH, CLASSES = 6, 3
"""Numbers of a sample, and classes to tell apart."""

EXACT, ROUNDED = 1e-9, 1e-5
"""Largest distance in float64, and where a part of the module computes in float32."""


@dataclass(frozen=True)
class Recipe:
    """A module and how it is trained.

    Attributes:
        blocks: kinds of blocks, in order, from `_BLOCKS`.
        tied: the last block has the weight of the first, if both are plain.
        shared: the first block is called again after the last.
        frozen: the first block is not trained.
        buffer: dtype of a buffer that takes part, or None.
        hook: what hangs on the first trainable parameter: None, ``gradient`` or ``accumulate``.
        attribute: weights carry an attribute that the optimizer's function reads.
        optimizer: a key of `_OPTIMIZERS`.
        factory: the trainer gets functions that build model and optimizer.
        accumulation: micro-batches per step.
        clipping: largest gradient norm, or None.
        unused_allowed: ``find_unused_parameters``.
    """

    blocks: tuple[str, ...]
    tied: bool
    shared: bool
    frozen: bool
    buffer: torch.dtype | None
    hook: str | None
    attribute: bool
    optimizer: str
    factory: bool
    accumulation: int
    clipping: float | None
    unused_allowed: bool

    @property
    def limit(self) -> float:
        """Distance up to which a result is exact."""
        return ROUNDED if "float32" in self.blocks else EXACT

    def model(self) -> nn.Module:
        """The module, the same weights every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return _Built(self)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the trainable parameters."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.attribute:
            return _OPTIMIZERS[self.optimizer](parameters)
        spared = [p for p in parameters if getattr(p, "no_decay", False)]
        decayed = [p for p in parameters if not getattr(p, "no_decay", False)]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]
        return _OPTIMIZERS[self.optimizer]([group for group in groups if group["params"]])


_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, weight_decay=0.02),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.02),
    "adamw": partial(torch.optim.AdamW, lr=0.02, eps=1e-4),
}


# -- blocks: (N, WIDTH) -> (N, WIDTH) ----------------------------------------------------------------


class _Columns(nn.Module):
    """A weight that is a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t() / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class _Branches(nn.Module):
    """Each sample takes one of two layers, by the sign of its first number."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        left = x[:, 0] < 0
        out = torch.zeros_like(x)
        if left.any():
            out = out + self.left(x) * left[:, None]
        if not left.all():
            out = out + self.right(x) * ~left[:, None]
        return out


class _Gain(nn.Module):
    """A parameter without dimensions, and one without elements."""

    def __init__(self, empty: bool = False) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        if empty:
            self.nothing = nn.Parameter(torch.zeros(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + (self.nothing.sum() if hasattr(self, "nothing") else 0.0)


class _Phase(nn.Module):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.polar(torch.ones(WIDTH), torch.arange(float(WIDTH))))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.phase).real


class _Narrow(nn.Module):
    """A layer that computes in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x.to(self.layer.weight.dtype)).to(x.dtype)
        return result


class _Idle(nn.Module):
    """A layer that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.used(x)
        return result


class _Words(nn.Module):
    """An embedding of the sign of the first number."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(2, WIDTH, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.table((x[:, 0] < 0).long())
        return result


def _frozen_norm() -> nn.Module:
    return nn.BatchNorm1d(WIDTH).eval()


_BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": partial(nn.Linear, WIDTH, WIDTH),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "layer norm": partial(nn.LayerNorm, WIDTH),
    "frozen batch norm": _frozen_norm,
    "dropout in eval": lambda: nn.Dropout(0.5).eval(),
    "gru": lambda: _Recurrent(),
    "columns": _Columns,
    "branches": _Branches,
    "scalar": _Gain,
    "empty": partial(_Gain, empty=True),
    "complex": _Phase,
    "float32": _Narrow,
    "idle": _Idle,
    "embedding": _Words,
    "sparse embedding": partial(_Words, sparse=True),
}


class _Recurrent(nn.Module):
    """A GRU, whose parameters are a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.cell(x[:, None])[0][:, 0]
        return result


class _Built(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        blocks = [_BLOCKS[kind]() for kind in recipe.blocks]
        self.blocks, self.last = nn.ModuleList(blocks), nn.Linear(WIDTH, CLASSES)
        self._widen()
        first, last = blocks[0], blocks[-1]
        if recipe.tied and first is not last and type(first) is type(last) is nn.Linear:
            last.weight = first.weight
        self.again = first if recipe.shared else None
        if recipe.frozen:
            first.requires_grad_(False)
        self.has_buffer = recipe.buffer is not None
        if recipe.buffer is not None:
            self.register_buffer("shift", torch.ones(CLASSES).to(recipe.buffer))
        self._hang(recipe)

    def _widen(self) -> None:
        """float64 throughout, but for layers that compute in float32."""
        narrow = {id(p) for m in self.modules() if isinstance(m, _Narrow) for p in m.parameters()}
        for tensor in [*self.parameters(), *self.buffers()]:
            if id(tensor) not in narrow and (tensor.is_floating_point() or tensor.is_complex()):
                tensor.data = tensor.data.to(torch.complex128 if tensor.is_complex() else torch.float64)

    def _hang(self, recipe: Recipe) -> None:
        trainable = [p for p in self.parameters() if p.requires_grad]
        if recipe.hook == "gradient":
            trainable[0].register_hook(_halve)
        elif recipe.hook == "accumulate":
            trainable[0].register_post_accumulate_grad_hook(_halve_grad)
        for parameter in trainable if recipe.attribute else ():
            vars(parameter)["no_decay"] = parameter.dim() < 2

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        if self.again is not None:
            x = torch.tanh(self.again(x))
        result: Tensor = self.last(x)
        return result + self.get_buffer("shift").real if self.has_buffer else result


def _halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def _halve_grad(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


_DTYPES = (None, torch.float64, torch.float16, torch.int16, torch.bool, torch.complex64)

recipes = st.builds(
    Recipe,
    blocks=st.lists(st.sampled_from(sorted(_BLOCKS)), min_size=1, max_size=3).map(tuple),
    tied=st.booleans(),
    shared=st.booleans(),
    frozen=st.booleans(),
    buffer=st.sampled_from(_DTYPES),
    hook=st.sampled_from((None, None, "gradient", "accumulate")),
    attribute=st.booleans(),
    optimizer=st.sampled_from(sorted(_OPTIMIZERS)),
    factory=st.booleans(),
    accumulation=st.sampled_from((1, 2)),
    clipping=st.sampled_from((None, 0.5)),
    unused_allowed=st.booleans(),
)
