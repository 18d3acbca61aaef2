"""Modules that Hypothesis puts together from features of real ones, under each backend and plain PyTorch.

    python -m tests.campaigns.generated_modules [--count N] [--seed N] [--backend NAME ...]

Prints, for each backend, how many of the modules were trained exactly, how many were refused with which
words, and the recipe of each that was trained differently. Exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from contextlib import closing

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor, nn

from distributed import Trainer
from distributed.errors import UserError, WorkerError
from distributed.interfaces.launcher import Launcher
from distributed.testing.rank_pool import RankPool
from tests.campaigns.backends import BACKENDS
from tests.campaigns.module_recipes import CLASSES, WIDTH, Recipe, recipes

__all__ = ["check", "try_all"]

BATCH, STEPS = 2, 4
"""Samples of a rank's micro-batch, optimizer steps."""

HANG = 10.0
"""Seconds without progress after which a run is ended."""


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
