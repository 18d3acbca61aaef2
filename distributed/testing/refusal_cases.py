"""Models and callbacks with the habits of real ones, for the contract of refusal (C11).

Every case is written as its users write it in plain PyTorch, where it has one meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from distributed.interfaces.callback import Callback, Context
from distributed.testing.reference_problem import problem, small_model

__all__ = ["CASES", "CHANGE_AFTER", "Case"]

CHANGE_AFTER = 4
"""Optimizer steps before a callback makes its change, and after it."""

_MOMENTUM = partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.05)


def _keep(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Change nothing."""


def _random(length: int) -> tuple[Tensor, Tensor]:
    return problem(length)


@dataclass(frozen=True)
class Case:
    """A training with one habit.

    Attributes:
        build: the model, the same weights every time.
        optimizer: the optimizer over a model, as plain PyTorch has it; hooks included.
        factory: give `build` and `optimizer` themselves to the trainer, not what they build.
        change: what a callback does to (model, optimizer) after `CHANGE_AFTER` steps.
        all_ranks: the callback acts on all ranks; None without a callback.
        data: ``(length) -> (inputs, classes)``, read in order.
        accumulation: micro-batches per step.
        options: further configuration.
    """

    build: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    factory: bool = False
    change: Callable[[nn.Module, torch.optim.Optimizer], None] = _keep
    all_ranks: bool | None = None
    data: Callable[[int], tuple[Tensor, Tensor]] = _random
    accumulation: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def callbacks(self) -> list[Callback]:
        """The callback that makes the change, if there is one."""
        return [] if self.all_ranks is None else [_Change(self.change, self.all_ranks)]


def _all(model: nn.Module) -> torch.optim.Optimizer:
    return _MOMENTUM(model.parameters())


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().double()


# -- parameters that only some samples use ---------------------------------------------------------


class _Routed(nn.Module):
    """Each sample takes one of two branches, by the sign of its first number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, width)
        self.back = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden, left = self.first(x), x[..., 0] < 0
        out = torch.zeros_like(hidden)
        if left.any():
            out = out + self.left(hidden) * left[..., None]
        if not left.all():
            right = self.right(hidden)
            out = out + (right if right.shape[-1] == 8 else self.back(right)) * ~left[..., None]
        result: Tensor = self.last(out)
        return result


class _Equal(_Routed):
    """Branches of equal size."""

    def __init__(self) -> None:
        super().__init__(8)
        del self.back


class _Experts(nn.Module):
    """Each sample takes one of two blocks of unequal size, by the sign of its first number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8)) for width in (8, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden, chosen = self.first(x), (x[..., 0] < 0).long()
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            if (chosen == number).any():
                out = out + expert(hidden) * (chosen == number)[..., None]
        result: Tensor = self.last(out)
        return result


def _with_signs(signs: list[float], length: int) -> tuple[Tensor, Tensor]:
    """Samples whose first numbers have `signs`, repeated."""
    x, y = problem(length)
    x[:, 0] = x[:, 0].abs() * torch.tensor(signs).repeat(-(-length // len(signs)))[:length]
    return x, y


def _in_turns(length: int) -> tuple[Tensor, Tensor]:
    """Pairs of samples that take the same branch."""
    return _with_signs([1.0, 1.0, -1.0, -1.0], length)


def _together(length: int) -> tuple[Tensor, Tensor]:
    """All samples of a step on one to three ranks take the same branch."""
    return _with_signs([1.0] * 12 + [-1.0] * 12, length)


def _in_turns_later(length: int) -> tuple[Tensor, Tensor]:
    """As `_in_turns`, but in the first half both samples of each pair take different branches."""
    x, y = _in_turns(length)
    x[: length // 2] = _with_signs([1.0, -1.0], length)[0][: length // 2]
    return x, y


class _Idle(nn.Module):
    """A layer that takes no part in any step."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.idle = small_model(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        return result


# -- what hangs on tensors -------------------------------------------------------------------------


def _halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def _clamp(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


def _clamp_grad(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


def _halve_grad(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def _decay(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)


def _with_hook() -> nn.Module:
    model = small_model()
    next(model.parameters()).register_hook(_halve)
    return model


def _with_accumulate_hook() -> nn.Module:
    model = small_model()
    next(model.parameters()).register_post_accumulate_grad_hook(_halve_grad)
    return model


def _clamped() -> nn.Module:
    """Gradients of the whole batch are clamped: a mean of clamped gradients is another one."""
    model = small_model()
    for parameter in model[0].parameters():
        parameter.register_hook(_clamp)
    for parameter in model[2].parameters():
        parameter.register_post_accumulate_grad_hook(_clamp_grad)
    return model


def _with_step_hook(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = _all(model)
    optimizer.register_step_post_hook(_decay)
    return optimizer


def _with_attribute() -> nn.Module:
    model = small_model()
    for parameter in model.parameters():
        vars(parameter)["no_weight_decay"] = parameter.dim() == 1
    return model


def _by_attribute(model: nn.Module) -> torch.optim.Optimizer:
    plain = [p for p in model.parameters() if not getattr(p, "no_weight_decay", False)]
    spared = [p for p in model.parameters() if getattr(p, "no_weight_decay", False)]
    groups = [{"params": plain, "weight_decay": 0.2}, {"params": spared, "weight_decay": 0.0}]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.3)


# -- shapes and modes ------------------------------------------------------------------------------


def _orthogonal() -> nn.Module:
    return _seeded(
        lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3))
    )


class _Column(nn.Module):
    """A parameter and a buffer that are transposed views: not row-major."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8, dtype=torch.float64).t())
        self.register_buffer("scale", torch.rand(4, 8, dtype=torch.float64).t())
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last((x @ self.weight.t()) * self.get_buffer("scale").sum(1))
        return result


class _Buffers(nn.Module):
    """Buffers of dtypes and strides that collectives of torch do not take."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_model()
        self.register_buffer("levels", torch.arange(3, dtype=torch.int16))
        self.register_buffer("phase", torch.polar(torch.ones(3), torch.arange(3.0)).to(torch.complex64))
        self.register_buffer("shift", torch.tensor([[0.25]], dtype=torch.float64).expand(1, 3))
        self.register_buffer("nothing", torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        levels, phase, shift = self.get_buffer("levels"), self.get_buffer("phase"), self.get_buffer("shift")
        result: Tensor = self.body(x) * (levels + 1) + phase.real + shift
        return result


def _frozen_norm() -> nn.Module:
    """A BatchNorm that its user has put into evaluation mode, with statistics of its own."""

    def build() -> nn.Module:
        norm = nn.BatchNorm1d(8)
        for statistic in (norm.running_mean, norm.running_var):
            assert statistic is not None
            statistic.uniform_(0.5, 2.0)
        return nn.Sequential(nn.Linear(6, 8), norm.eval(), nn.Linear(8, 3))

    return _seeded(build)


class _FreezesItsNorm(nn.Module):
    """A model whose own ``train`` keeps its BatchNorm in evaluation mode, as for fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def train(self, mode: bool = True) -> _FreezesItsNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(self.first(x)))
        return result


# -- what a forward pass changes, or takes from its micro-batch ------------------------------------


class _Rows(nn.Module):
    """An embedding of the signs of a sample's first two numbers, beside a layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 8, **options)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        index = (x[:, 0] < 0).long() * 2 + (x[:, 1] < 0).long()
        result: Tensor = self.last(torch.tanh(self.first(x) + self.rows(index)))
        return result


class _Constrained(nn.Module):
    """A layer whose weights are clamped in place before they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.clamp_(-0.2, 0.2)
        result: Tensor = self.last(torch.tanh(self.first(x)))
        return result


# -- what callbacks change -------------------------------------------------------------------------


def _frozen_first() -> nn.Module:
    model = small_model()
    model[0].requires_grad_(False)
    return model


def _thaw(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.requires_grad_(True)


def _slow_down(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.1


class _Change(Callback):
    """Applies `change` to model and optimizer, once."""

    def __init__(self, change: Callable[[nn.Module, torch.optim.Optimizer], None], all_ranks: bool) -> None:
        self.change, self.all_ranks = change, all_ranks

    def on_step_end(self, context: Context) -> None:
        if context.progress.step == CHANGE_AFTER:
            self.change(context.model, context.optimizer)


_UNUSED = {"find_unused_parameters": True}

CASES: dict[str, Case] = {
    "branches": Case(partial(_seeded, _Equal), _all, data=_in_turns),
    "branches-unused-allowed": Case(partial(_seeded, _Equal), _all, data=_in_turns, options=_UNUSED),
    "experts": Case(partial(_seeded, _Experts), _all, data=_in_turns, options=_UNUSED),
    "experts-later": Case(partial(_seeded, _Experts), _all, data=_in_turns_later, options=_UNUSED),
    "experts-together": Case(partial(_seeded, _Experts), _all, data=_together, options=_UNUSED),
    "idle-layer": Case(partial(_seeded, _Idle), _all),
    "idle-layer-unused-allowed": Case(partial(_seeded, _Idle), _all, options=_UNUSED),
    "tensor-hook": Case(_with_hook, _all),
    "accumulation-hook": Case(_with_accumulate_hook, _all),
    "tensor-hook-factory": Case(_with_hook, _all, factory=True),
    "accumulation-hook-factory": Case(_with_accumulate_hook, _all, factory=True),
    "clamping-hooks": Case(_clamped, _all),
    "clamping-hooks-accumulated": Case(_clamped, _all, accumulation=2),
    "optimizer-hook": Case(small_model, _with_step_hook),
    "parameter-attributes": Case(_with_attribute, _by_attribute),
    "parameter-attributes-factory": Case(_with_attribute, _by_attribute, factory=True),
    "orthogonal": Case(_orthogonal, _all),
    "orthogonal-factory": Case(_orthogonal, _all, factory=True),
    "transposed": Case(partial(_seeded, _Column), _all),
    "transposed-factory": Case(partial(_seeded, _Column), _all, factory=True),
    "odd-buffers": Case(_Buffers, _all),
    "odd-buffers-factory": Case(_Buffers, _all, factory=True),
    "norm-in-eval": Case(_frozen_norm, _all),
    "norm-frozen-by-train": Case(lambda: _seeded(_FreezesItsNorm).train(), _all),
    "renormalized-embedding": Case(partial(_seeded, partial(_Rows, max_norm=0.5)), _all),
    "gradients-by-frequency": Case(partial(_seeded, partial(_Rows, scale_grad_by_freq=True)), _all),
    "clamped-in-forward": Case(partial(_seeded, _Constrained), _all),
    "thawed-layer": Case(_frozen_first, _all, change=_thaw, all_ranks=True),
    "rate-changed-by-all": Case(small_model, _all, change=_slow_down, all_ranks=True),
    "rate-changed-by-rank-0": Case(small_model, _all, change=_slow_down, all_ranks=False),
}
"""Cases by the habit that they have."""
