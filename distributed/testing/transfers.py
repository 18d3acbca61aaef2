"""Every backend resumes from every other's checkpoints, on another number of ranks.

::

    python -m distributed.testing.transfers

trains five steps under one backend, which saves in the middle of an epoch and of the warm-up; loads that
under another, which writes what it holds at once: by name, both hold the same bits. Ten further steps end
at the weights of a process that was never interrupted. Prints two Markdown tables; a wrong value is
bold, and the exit status is then 1. Takes some minutes on two cores.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import nn

from distributed import Trainer
from distributed.config import load
from distributed.errors import UserError
from distributed.registry.catalog import get_catalog, missing_modules
from distributed.testing.checkpoint_compare import ExportOnLoad, state_differences
from distributed.testing.rank_pool import RankPool
from distributed.testing.reference_problem import distance
from distributed.testing.transfer_cases import BASE, VARIANTS, Case, words

PLACES: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "pytorch-ddp": {"backend": "pytorch-ddp"},
    "fsdp": {"backend": "fsdp"},
    **{f"deepspeed-{n}": {"backend": "deepspeed", "zero_stage": n} for n in (1, 2, 3)},
    "horovod": {"backend": "horovod"},
    # Ranks that wait for their turn hold their CPUs.
    "ray": {"backend": "ray", "ray.num_cpus_per_rank": 0.25},
}
"""Backends by the name that the tables give them, with the fields that make them so."""

SIZES = (1, 2, 4)
"""Numbers of ranks; `serial` has 1 alone."""

_BEFORE, _AFTER = 5, 10
_EPOCH = 26
"""Samples: steps of 12, 12 and 2, so that five steps end within an epoch."""


class Place(NamedTuple):
    """A key of `PLACES`, and ranks."""

    name: str
    ranks: int


class Found(NamedTuple):
    """Result of a transfer.

    Attributes:
        differences: differences between saved and loaded state, one line each.
        distance: largest distance of any weight after the further steps from the uninterrupted run's.
        tolerance: largest accepted distance.
    """

    differences: list[str]
    distance: float
    tolerance: float

    @property
    def good(self) -> bool:
        """No difference, and near enough."""
        return not self.differences and self.distance <= self.tolerance

    def __str__(self) -> str:
        text = f"{self.distance:.0e}" if not self.differences else f"{len(self.differences)} differ"
        return text if self.good else f"**{text}**"


class Transfers:
    """Save once per case and place, and load any number of times."""

    def __init__(self, pool: RankPool, folder: str) -> None:
        self.pool, self.folder = pool, folder
        self._saved: dict[tuple[str, Place], str] = {}
        self._references: dict[str, nn.Module] = {}

    def save(self, case: Case, place: Place) -> str:
        """Train `case` for five steps and return the checkpoint's path.

        Raises:
            UserError: the backend cannot do it.
        """
        if (case.name, place) not in self._saved:
            folder = Path(self.folder, f"saved-{len(self._saved)}")
            trainer = self.trainer(case, place, case.model(), checkpoint_dir=str(folder))
            path = _fit(trainer, _BEFORE)
            assert path is not None
            self._saved[case.name, place] = path
        return self._saved[case.name, place]

    def transfer(self, case: Case, saver: Place, loader: Place) -> Found:
        """Hand over from `saver` to `loader`.

        Raises:
            UserError: the loader's backend cannot do it, or the saver's.
        """
        path, model = self.save(case, saver), case.model()
        trainer = self.trainer(case, loader, model, resume_from_checkpoint=path)
        with TemporaryDirectory(dir=self.folder) as loaded:
            trainer.callbacks = [ExportOnLoad(loaded)]
            _fit(trainer, _BEFORE + _AFTER)
            differences = state_differences(path, str(Path(loaded, Path(path).name)))
        return Found(differences, self.distance(case, model), case.tolerance)

    def distance(self, case: Case, model: nn.Module) -> float:
        """Largest between any weight of `model` and the uninterrupted run's at its end."""
        if case.name not in self._references:
            reference = self._references[case.name] = case.model()
            _fit(self.trainer(case, Place("serial", 1), reference), _BEFORE + _AFTER)
        return distance(model, self._references[case.name])

    def trainer(self, case: Case, place: Place, model: nn.Module, **given: Any) -> Trainer:
        """A trainer of `model` at `place`; `given` are further configuration fields."""
        fields = {
            "device": "cpu",
            "tracking.progress": "off",
            "log_every_n_steps": 1,
            "global_batch_size": 12,
            "gradient_clipping": 0.5,
            "num_processes": place.ranks,
            "scheduler_interval": "step",
            **PLACES[place.name],
            **case.options,
            **case.own.get(place.name, {}),
            **given,
        }
        warm_up = partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.1, total_iters=8)
        trainer = Trainer(model, load(overrides=fields), optimizer=case.optimizer, scheduler=warm_up)
        trainer.launcher = self.pool
        return trainer


def _fit(trainer: Trainer, until_step: int) -> str | None:
    # Ranks would print over the table; their errors come as exceptions.
    with redirect_stdout(StringIO()):
        return trainer.fit(words(_EPOCH), max_steps=until_step).checkpoint


# -- pairs of saver and loader ---------------------------------------------------------------------


def installed() -> list[str]:
    """The keys of `PLACES` whose backend can be used here."""
    backends = get_catalog().backends
    return [
        name
        for name, fields in PLACES.items()
        if fields["backend"] in backends and not missing_modules(backends[fields["backend"]].requires)
    ]


def every_place(names: Iterable[str]) -> list[Place]:
    """Each name at each number of ranks that it can have."""
    return [Place(name, ranks) for name in names for ranks in SIZES if ranks == 1 or name != "serial"]


def ring(names: Sequence[str]) -> list[Place]:
    """Up the list on two ranks and back on four."""
    there = [Place(name, 1 if name == "serial" else 2) for name in names]
    return there + [Place(name, 4) for name in reversed(names) if name != "serial"]


def go_round(
    transfers: Transfers, case: Case, places: Sequence[Place]
) -> tuple[dict[tuple[Place, Place], Found], dict[str, str]]:
    """Each place loads what the one before it saved, the first the last's; a backend that refuses to train
    the case is left out, whatever its number of ranks.

    Returns:
        (result by (saver, loader), reason of a refusal by name).
    """
    refused: dict[str, str] = {}
    for place in places:
        if place.name not in refused:
            try:
                transfers.save(case, place)
            except UserError as error:
                refused[place.name] = str(error)
    able = [place for place in places if place.name not in refused]
    pairs = zip([able[-1], *able[:-1]], able, strict=True)
    return {pair: transfers.transfer(case, *pair) for pair in pairs}, refused


# -- tables ----------------------------------------------------------------------------------------


def render_pairs(found: Mapping[tuple[Place, Place], Found]) -> Iterator[str]:
    """Lines of a table: a row per saver, a column per loader, the worst of all sizes in each cell."""
    names = list(dict.fromkeys(saver.name for saver, _ in found))
    yield _line(["saved by, loaded by", *names])
    yield _line(["---"] * (len(names) + 1))
    for first in names:
        cells = []
        for second in names:
            results = [r for (a, b), r in found.items() if (a.name, b.name) == (first, second)]
            cells.append(f"{_worst(results)} ({len(results)})")
        yield _line([first, *cells])


def render_variants(
    rows: Mapping[str, tuple[Mapping[tuple[Place, Place], Found], Mapping[str, str]]], names: Sequence[str]
) -> Iterator[str]:
    """Lines of a table: a row per variant, a column per loader; then the reasons of refusals."""
    reasons: dict[str, int] = {}
    yield _line(["variant, loaded by", *names])
    yield _line(["---"] * (len(names) + 1))
    for title, (found, refused) in rows.items():
        cells = []
        for name in names:
            if name in refused:
                cells.append(f"refused [{reasons.setdefault(refused[name], len(reasons) + 1)}]")
            else:
                cells.append(_worst([r for (_, loader), r in found.items() if loader.name == name]))
        yield _line([title, *cells])
    for reason, number in reasons.items():
        yield f"\n[{number}] refused: {reason}"


def _worst(results: Sequence[Found]) -> str:
    return str(max(results, key=lambda result: (not result.good, result.distance)))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Run everything and print the tables; 1 when a transfer is wrong."""
    names = installed()
    for name in PLACES.keys() - names:
        _log(f"{name} is left out: it is not installed")
    with TemporaryDirectory(prefix="distributed-transfers-") as folder, closing(RankPool(120.0)) as pool:
        transfers, rows = Transfers(pool, folder), {}
        found = _every_way(transfers, every_place(names))
        print("\n".join(render_pairs(found)) + "\n", flush=True)
        for case in VARIANTS:
            _log(case.name)
            rows[case.name] = go_round(transfers, case, ring(names))
        print("\n".join(render_variants(rows, names)))
    return _conclude([found, *(part for part, _ in rows.values())])


def _every_way(transfers: Transfers, places: Sequence[Place]) -> dict[tuple[Place, Place], Found]:
    for place in places:
        _log(f"{place.name} on {place.ranks} saves")
        transfers.save(BASE, place)
    found: dict[tuple[Place, Place], Found] = {}
    for loader in places:  # by loader, so that its ranks do the same work again
        _log(f"{loader.name} on {loader.ranks} loads")
        found |= {(saver, loader): transfers.transfer(BASE, saver, loader) for saver in places}
    return found


def _conclude(tables: Sequence[Mapping[tuple[Place, Place], Found]]) -> int:
    wrong = 0
    for table in tables:
        for (saver, loader), result in table.items():
            wrong += not result.good
            for difference in result.differences:
                _log(f"{saver} to {loader}: {difference}")
    worst = max(result.distance for result in tables[0].values())
    print(f"\n{sum(map(len, tables))} transfers, {wrong} of them failed.")
    first = len(tables[0])
    print(f"The largest difference in the {first} transfers of the first table is {worst:.1e}.")
    return int(wrong > 0)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    # What ranks unpickle by name is then the same module.
    from distributed.testing import transfers

    sys.exit(transfers.main())
