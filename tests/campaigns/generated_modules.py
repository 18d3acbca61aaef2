"""Modules that Hypothesis puts together from features of real ones, under each backend and plain PyTorch.

    python -m tests.campaigns.generated_modules [--count N] [--seed N] [--backend NAME ...]

Prints, for each backend, how many of the modules were trained exactly, how many were refused with which
words, and the recipe of each that was trained differently. Exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from distributed import Trainer
from distributed.errors import UserError, WorkerError
from distributed.interfaces.launcher import Launcher
from distributed.testing.rank_pool import RankPool

__all__ = ["BACKENDS", "Recipe", "check", "recipes", "try_all"]

WIDTH, CLASSES, BATCH, STEPS = 6, 3, 2, 4
EXACT, ROUNDED = 1e-9, 1e-5
"""Largest distance in float64, and where a part of the module computes in float32."""

HANG = 10.0
"""Seconds without progress after which a run is ended."""

BACKENDS: dict[str, tuple[str, int, Mapping[str, Any]]] = {
    "serial": ("serial", 1, {}),
    "ddp 2": ("pytorch-ddp", 2, {}),
    "ddp 3": ("pytorch-ddp", 3, {}),
    "fsdp 2": ("fsdp", 2, {}),
    "fsdp 3": ("fsdp", 3, {}),
    **{f"zero {stage}": ("deepspeed", 2, {"zero_stage": stage}) for stage in range(4)},
    "horovod 2": ("horovod", 2, {}),
}
"""Name -> (backend, ranks, options)."""


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


# -- comparison ------------------------------------------------------------------------------------


def _data(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(length, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (length,), generator=generator)


def check(recipe: Recipe, name: str, launcher: Launcher | None = None) -> str:
    """Train `recipe` by a backend of `BACKENDS`.

    Returns:
        ``exact``, the first words of the refusal, ``ended by hang_timeout`` (ZeRO 3 gathers the parameters
        of other modules on each rank), or why plain PyTorch cannot train it.

    Raises:
        AssertionError: it was trained differently.
        UserError: it was refused without a remedy.
    """
    backend, ranks, options = BACKENDS[name]
    size = BATCH * ranks * recipe.accumulation
    x, y = _data(size * STEPS)
    try:
        plain = _train_plainly(recipe, x, y, size)
    except RuntimeError as error:
        return f"impossible in plain PyTorch: {str(error)[:40]}"
    model = recipe.model()
    trainer = Trainer(
        recipe.model if recipe.factory else model,
        optimizer=recipe.make_optimizer if recipe.factory else recipe.make_optimizer(model),
        backend=backend, num_processes=ranks, device="cpu", batch_size=BATCH, data={"shuffle": False},
        gradient_accumulation_steps=recipe.accumulation, gradient_clipping=recipe.clipping,
        find_unused_parameters=recipe.unused_allowed and backend == "pytorch-ddp",
        tracking={"progress": "off"}, log_every_n_steps=2, hang_timeout=HANG, **options,
    )  # fmt: skip
    trainer.launcher = launcher if ranks > 1 else None
    try:
        trainer.fit((x, y), max_steps=STEPS)
    except UserError as refusal:
        if not refusal.remedy:
            raise
        return f"refused: {str(refusal).partition(':')[2].strip()[:70]}"
    except WorkerError as failure:
        if "hang_timeout" not in str(failure):
            raise
        return "ended by hang_timeout"
    trained = dict(trainer.model.named_parameters())
    pairs = [(trained[name].detach(), p.detach()) for name, p in plain.named_parameters() if p.numel()]
    distance = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    assert distance <= recipe.limit, f"{name}: {distance:.1e} from plain PyTorch: {recipe}"
    return "exact"


def _train_plainly(recipe: Recipe, x: Tensor, y: Tensor, size: int) -> nn.Module:
    model = recipe.model()
    optimizer = recipe.make_optimizer(model)
    limit = float("inf") if recipe.clipping is None else recipe.clipping
    for start in range(0, len(x), size):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[start : start + size]), y[start : start + size]).backward()
        if recipe.clipping is not None:
            dense = [p for p in model.parameters() if p.grad is not None and not p.grad.is_sparse]
            _clip(dense, [p for p in model.parameters() if p.grad is not None and p.grad.is_sparse], limit)
        optimizer.step()
    return model


def _clip(dense: list[nn.Parameter], sparse: list[nn.Parameter], limit: float) -> None:
    """Clip the norm of all gradients together; torch's own function takes no sparse ones."""
    values = [p.grad for p in dense]
    for parameter in sparse:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.coalesce()
        values.append(parameter.grad._values())
    nn.utils.clip_grads_with_norm_(dense, limit, norm := nn.utils.get_total_norm(values))
    for value in values[len(dense) :]:
        value.mul_((limit / (norm + 1e-6)).clamp(max=1.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=500, help="number of modules (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="of their recipes (default: 0)")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="default: all")
    args = parser.parse_args()
    wrong = 0
    for name in args.backend or BACKENDS:
        found: Counter[str] = Counter()
        with closing(RankPool()) as pool:
            wrong += try_all(name, args.count, args.seed, pool, found)
        print(name, *(f"\n  {number:5d}  {text}" for text, number in found.most_common()), flush=True)
    return 1 if wrong else 0


def try_all(name: str, count: int, number: int, pool: RankPool, found: Counter[str]) -> int:
    """Count what `check` returns for `count` recipes in `found`; the number that were trained differently."""

    @seed(number)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(recipes)
    def try_one(recipe: Recipe) -> None:
        try:
            found[check(recipe, name, pool)] += 1
        except Exception as error:  # noqa: BLE001 - each is counted and printed, whatever it is
            found["DIFFERENT"] += 1
            print(f"{type(error).__name__}: {error}\n  {recipe}", file=sys.stderr, flush=True)

    try_one()
    return found["DIFFERENT"]


if __name__ == "__main__":
    sys.exit(main())
