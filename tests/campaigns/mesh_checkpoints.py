"""Checkpoints of every mesh and backend, resumed under every other: a Markdown table.

    python -m tests.campaigns.mesh_checkpoints

A model with tied and fused weights and with experts trains 4 steps of AdamW in float64 under one (rows), and
saves within an epoch: masked tokens, clipping, a smaller last batch. Another (columns) trains 4 further steps
from there. A cell is the largest difference of any weight, or of any number of the optimizer's state, from a
serial run of 8 steps that was not interrupted; the weights of that run are compared with plain PyTorch. A
value above 1e-9 is bold, and the exit status is then 1. One pool of ranks for each number of ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

from distributed.testing.checkpoint_compare import state_distance
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.parallel.expert_models import EXPERT_ENTRIES
from tests.parallel.models import tokens, train_plainly
from tests.parallel.places import OPTIONS, PLACES, is_installed, trainer_at
from tests.parallel.test_tensor_parallel import difference

__all__ = ["MeshCheckpoints"]

DATA = tokens(21)
BUILD = EXPERT_ENTRIES["moe"].build
BEFORE, TOTAL = 4, 8
"""Steps until the checkpoint, and in all; an epoch has three."""


class MeshCheckpoints:
    """Saves and loads in a directory.

    Args:
        pool: starts the ranks.
        folder: for the checkpoints.
    """

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        model = BUILD()
        self._uninterrupted = self._train("serial", model, folder / "uninterrupted", TOTAL)
        plain = train_plainly(BUILD(), DATA, steps=TOTAL, **OPTIONS)
        assert difference(model, plain.weights) < EXACT

    def _train(
        self, place: str, model: nn.Module, folder: Path, steps: int, resume: str | None = None
    ) -> str:
        """Train until `steps`; the path of the last checkpoint."""
        trainer = trainer_at(place, model, self._pool, folder, resume_from_checkpoint=resume or False)
        with redirect_stdout(StringIO()):
            history = trainer.fit(DATA, max_steps=steps)
        assert history.steps["step"] == list(range(BEFORE + 1 if resume else 1, steps + 1))
        assert history.checkpoint is not None
        return history.checkpoint

    def row(self, saver: str, loaders: Sequence[str]) -> Iterator[float]:
        """Distance of each of `loaders` from the uninterrupted run, from a checkpoint of `saver`."""
        saved = self._train(saver, BUILD(), self._folder / saver, BEFORE)
        for loader in loaders:
            resumed = self._train(loader, BUILD(), self._folder / f"{saver} to {loader}", TOTAL, saved)
            yield state_distance(resumed, self._uninterrupted)


def main() -> int:
    """Print the table; 1 if a distance is too large."""
    installed = [place for place in PLACES if is_installed(place)]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--places", nargs="*", choices=installed, default=installed)
    places = parser.parse_args().places
    worst = 0.0
    print(f"| saved by, loaded by | {' | '.join(places)} |\n|{' --- |' * (len(places) + 1)}", flush=True)
    with closing(RankPool(timeout=300.0)) as pool, TemporaryDirectory() as folder:
        meshes = MeshCheckpoints(pool, Path(folder))
        for saver in places:
            row = list(meshes.row(saver, places))
            worst = max(worst, *row)
            cells = [f"{off:.0e}" if off <= EXACT else f"**{off:.0e}**" for off in row]
            print(f"| {saver} | {' | '.join(cells)} |", flush=True)
    print(f"\nLargest distance: {worst:.1e}")
    return int(worst > EXACT)


if __name__ == "__main__":
    sys.exit(main())
