"""Every plan for two to eight CPU ranks trains as one process in plain PyTorch does: a Markdown table.

    python -m tests.campaigns.plans                 # 2, 3, 4, 6 and 8 ranks
    python -m tests.campaigns.plans --ranks 2 4
    python -m tests.campaigns.plans --ranks 8 --every 8

A plan is written as YAML and read by the `Trainer`, as ``train --config`` reads it. The largest difference of
any weight of a Llama after 4 steps of AdamW in float64: masked tokens, clipping, a ragged last window.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distributed.config import Layer
from distributed.interfaces.launcher import Launcher
from distributed.operations.planning.options import PlanOptions
from distributed.operations.planning.plan_numbers import plan_numbers
from distributed.operations.planning.plans import Plans
from distributed.planner.estimates.split import describe
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.parallel.models import (
    LENGTH,
    VOCABULARY,
    Reference,
    seeded,
    tokens,
    train_plainly,
    with_exact_norms,
)
from tests.parallel.test_tensor_parallel import difference
from tests.support.training import make_trainer

__all__ = ["BATCH", "distance", "expected", "llama", "plans_on"]

BATCH, STEPS, MAX_NORM = 8, 4, 0.5
DATA = tokens(21)
_SIZES = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 64}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=_SIZES["hidden"],
            intermediate_size=_SIZES["ffn"],
            num_hidden_layers=_SIZES["layers"],
            num_attention_heads=_SIZES["heads"],
            num_key_value_heads=_SIZES["kv_heads"],
            max_position_embeddings=LENGTH,
        )
    )
    return with_exact_norms(model)


llama = seeded(_llama)


def expected() -> Reference:
    """What one process comes to."""
    return train_plainly(llama(), DATA, global_batch_size=BATCH, steps=STEPS, max_norm=MAX_NORM)


def plans_on(ranks: int) -> Plans:
    """Every plan on so many CPU ranks."""
    sizes = {**_SIZES, "vocabulary": VOCABULARY, "sequence": LENGTH}
    asked = Layer("flag", {"global_batch_size": BATCH})
    return plan_numbers(sizes, [], [asked], PlanOptions("CPU", ranks, 10**6))


def distance(plans: Plans, index: int, reference: Reference, pool: Launcher) -> float:
    """Train with a plan's file; the largest difference of any weight."""
    model = llama()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.yaml")
        plans.save(path, index)
        given: dict[str, Any] = {
            "config": path,
            "optimizer": partial(torch.optim.AdamW, eps=1e-4),
            "learning_rate": 0.01,
            "gradient_clipping": MAX_NORM,
        }
        trainer = make_trainer(model, plans.space.world_size, pool, **given)
        trainer.fit(DATA, max_steps=STEPS)
    return difference(model, reference.weights)


def rows(ranks: Sequence[int], every: int = 1) -> Iterator[tuple[int, str, float | str]]:
    """(ranks, plan, distance or error)

    Args:
        every: train the first plan of so many only.
    """
    reference = expected()
    for number in ranks:
        with closing(RankPool(timeout=300.0)) as pool:
            plans = plans_on(number)
            for index, row in list(enumerate(plans.rows))[::every]:
                try:
                    found: float | str = distance(plans, index, reference, pool)
                except Exception as error:  # noqa: BLE001 - a plan that fails is a result
                    found = f"{type(error).__name__}: {error}".splitlines()[0]
                yield number, describe(row.split), found


def main() -> int:
    """Print the table; 1 if a plan does not train exactly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 6, 8])
    parser.add_argument("--every", type=int, default=1)
    chosen, wrong, count = parser.parse_args(), 0, 0
    most = 0.0
    for number, name, found in rows(chosen.ranks, chosen.every):
        count += 1
        exact = isinstance(found, float) and found < EXACT
        wrong += not exact
        most = max(most, found) if isinstance(found, float) else most
        if not exact or count % 50 == 0:
            print(f"| {number} | {name} | {found} |", flush=True)
    print(f"{count} plans, {wrong} wrong, largest difference {most:.2g}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
