"""Search spaces as Ray Tune has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import tune
from ray.tune.search.sample import Domain, Function

from distributed.operations.tuning.search_space import Range

_MAKERS: dict[str, Any] = {
    "uniform": tune.uniform,
    "loguniform": tune.loguniform,
    "quniform": tune.quniform,
    "randint": tune.randint,
    "lograndint": tune.lograndint,
    "normal": tune.randn,
}


def translate(space: Mapping[str, Any]) -> dict[str, Any]:
    """`space` with every `Range` made Ray Tune's object."""
    return {name: _translated(value) for name, value in space.items()}


def _translated(value: Any) -> Any:
    if isinstance(value, Mapping):
        return translate(value)
    if not isinstance(value, Range):
        return value
    if value.kind == "choice":
        return tune.choice(list(value.values))
    if value.kind == "grid":
        return tune.grid_search(list(value.values))
    return _MAKERS[value.kind](*value.values)


def describe(space: Mapping[str, Any]) -> dict[str, str]:
    """Description of each parameter; equal for equal ranges."""
    return {name: _described(value) for name, value in translate(space).items()}


def _described(value: Any) -> str:
    if isinstance(value, Function):
        return f"sample_from {getattr(value.func, '__qualname__', 'a function')}"
    if isinstance(value, Domain):
        sampler = value.get_sampler()
        step = f" step {sampler.q}" if hasattr(sampler, "q") else ""
        inner = getattr(sampler, "sampler", sampler)
        shape = {n: v for n, v in vars(inner).items() if isinstance(v, int | float)}
        return f"{type(value).__name__} {type(inner).__name__} {value.domain_str} {shape or ''}{step}".strip()
    if isinstance(value, Mapping):
        return str({name: _described(inner) for name, inner in value.items()})
    return repr(value)


def count_grid(space: Mapping[str, Any]) -> int:
    """Number of trials per sample of the translated `space`."""
    total = 1
    for value in space.values():
        if isinstance(value, Mapping):
            grid = value.get("grid_search")
            total *= len(grid) if isinstance(grid, list) else count_grid(value)
    return total
