"""C9: what one backend saved, every other goes on from, on another number of ranks.

A part of `python -m distributed.testing.transfers`, whose tables are in docs/reliability.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.interfaces.callback import Context
from distributed.testing.checkpoint_compare import ExportOnLoad, state_differences
from distributed.testing.rank_pool import RankPool
from distributed.testing.transfer_cases import BASE, VARIANTS, Case, words
from distributed.testing.transfers import (
    PLACES,
    Found,
    Place,
    Transfers,
    go_round,
    installed,
    render_pairs,
    render_variants,
)

SIZES = dict.fromkeys(PLACES, (1, 2, 3)) | {"serial": (1,), "horovod": (1, 2), "ray": (1, 2)}
"""Starting ranks of Horovod and Ray takes the longest."""
_SAVERS = {name: cycle(sizes) for name, sizes in SIZES.items()}
_LOADERS = {name: cycle(reversed(sizes)) for name, sizes in SIZES.items()}
PAIRS = [(Place(a, next(_SAVERS[a])), Place(b, next(_LOADERS[b]))) for a in PLACES for b in PLACES]
"""Every ordered pair of backends once; each saves and loads at each of its sizes."""


@pytest.fixture(scope="module")
def transfers(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Transfers]:
    with pytest.MonkeyPatch.context() as patch, closing(RankPool(120.0)) as pool:
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.02")
        yield Transfers(pool, str(tmp_path_factory.mktemp("transfers")))


def test_every_backend_is_here() -> None:
    assert installed() == list(PLACES)


@pytest.mark.parametrize(
    ("saver", "loader"),
    sorted(PAIRS, key=lambda pair: pair[::-1]),
    ids=lambda place: f"{place.name}-on-{place.ranks}",
)
def test_any_backend_goes_on_from_any_other(saver: Place, loader: Place, transfers: Transfers) -> None:
    """The same bits by name after loading; ten steps later the weights of a run never interrupted."""
    found = transfers.transfer(BASE, saver, loader)
    assert not found.differences
    assert found.distance <= 1e-9


@pytest.mark.parametrize("title", ["tied and frozen, SGD", "CPU offload", "fp16, with scaler"])
def test_variants_go_round(title: str, transfers: Transfers) -> None:
    (case,) = [case for case in VARIANTS if case.name == title]
    names = ["serial", "pytorch-ddp", "fsdp", "deepspeed-1", "deepspeed-2", "deepspeed-3"]
    found, refused = go_round(transfers, case, [Place(name, SIZES[name][:2][-1]) for name in names])
    assert len(found) == len(names)
    assert not refused
    for pair, result in found.items():
        assert result.good, (pair, result)


def test_who_refuses_is_left_out(transfers: Transfers) -> None:
    """On one rank, for a refusal ends the ranks that heard it."""
    (case,) = [case for case in VARIANTS if case.name == "Adafactor"]
    places = [Place("serial", 1), Place("deepspeed-2", 1), Place("pytorch-ddp", 2)]
    found, refused = go_round(transfers, case, places)
    assert [loader.name for _, loader in found] == ["serial", "pytorch-ddp"]
    assert all(result.good for result in found.values())
    assert "Got 'Adafactor'" in refused["deepspeed-2"]


# -- the comparison can fail -----------------------------------------------------------------------


def one_bit(context: Any) -> None:
    context.model.gate.data.view(torch.int64)[0] ^= 1


def one_bit_of_state(context: Any) -> None:
    context.optimizer.state[context.model.gate]["exp_avg"].view(torch.int64)[0] ^= 1


def a_rate(context: Any) -> None:
    context.optimizer.param_groups[1]["lr"] *= 1.0 + 1e-15


def a_count(context: Any) -> None:
    context.optimizer.state[context.model.gate]["step"] += 1


def no_state(context: Any) -> None:
    del context.optimizer.state[context.model.gate]


def the_schedule(context: Any) -> None:
    context.schedule.scheduler.last_epoch += 1


def the_place(context: Any) -> None:
    context.progress.samples += 1


def nothing(context: Any) -> None:
    """Equal, then."""


class Meddles(ExportOnLoad):
    """Exports something else than was loaded."""

    def __init__(self, directory: str, change: Callable[[Any], None]) -> None:
        super().__init__(directory)
        self.change = change

    def on_run_start(self, context: Context) -> None:
        self.change(context)
        super().on_run_start(context)


@pytest.mark.parametrize(
    ("change", "complaints"),
    [
        (nothing, []),
        (one_bit, ["model 'gate': 1 of 8 bytes"]),
        (one_bit_of_state, ["optimizer.exp_avg 'gate': 1 of 8 bytes"]),
        (a_rate, ["parameter groups: "]),
        (a_count, ["scalars: "]),
        (
            no_state,
            ["optimizer.exp_avg 'gate': in the first", "optimizer.exp_avg_sq 'gate': in", "scalars: "],
        ),
        (the_schedule, ["scheduler: "]),
        (the_place, ["progress: "]),
    ],
)
def test_what_differs_is_named(
    change: Callable[[Any], None], complaints: list[str], transfers: Transfers, tmp_path: Path
) -> None:
    path = transfers.save(BASE, Place("serial", 1))
    trainer = transfers.trainer(BASE, Place("serial", 1), BASE.model(), resume_from_checkpoint=path)
    trainer.callbacks = [Meddles(str(tmp_path), change)]
    trainer.fit(words(), max_steps=6)
    found = state_differences(path, str(tmp_path / Path(path).name))
    assert len(found) == len(complaints), found
    assert all(line.startswith(start) for line, start in zip(found, complaints, strict=True)), found


def test_another_optimizer_ends_elsewhere(transfers: Transfers) -> None:
    """What the distance is measured from does move."""
    slower: Case = replace(BASE, name="slower", optimizer=lambda model: torch.optim.AdamW(model.parameters()))
    path, model = transfers.save(slower, Place("serial", 1)), BASE.model()
    transfers.trainer(slower, Place("serial", 1), model, resume_from_checkpoint=path).fit(
        words(), max_steps=15
    )
    assert transfers.distance(BASE, model) > 1e-3


# -- the tables ------------------------------------------------------------------------------------


def test_what_is_wrong_is_bold() -> None:
    here, there = Place("serial", 1), Place("fsdp", 2)
    good, far, other = Found([], 1e-16, 1e-9), Found([], 2e-9, 1e-9), Found(["model 'a'"], 0.0, 1e-9)
    pairs = {(here, here): good, (here, there): far, (there, here): good, (there, Place("fsdp", 4)): other}
    *_, first, second = render_pairs(pairs)
    assert first == "| serial | 1e-16 (1) | **2e-09** (1) |"
    assert second == "| fsdp | 1e-16 (1) | **1 differ** (1) |"
    lines = list(render_variants({"odd": ({(here, here): good}, {"fsdp": "no"})}, ["serial", "fsdp"]))
    assert lines[2:] == ["| odd | 1e-16 | refused [1] |", "\n[1] refused: no"]


def test_the_committed_tables_are_whole_and_right() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8")
    part = page.split("## Transfers between backends\n")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in part.splitlines() if line.startswith("| ")]
    assert rows[0] == ["| saved by, loaded by", *list(PLACES)[:-1], f"{list(PLACES)[-1]} |"]
    titles = [row[0].removeprefix("| ") for row in rows]
    assert titles[2 : 2 + len(PLACES)] == list(PLACES)
    assert titles[4 + len(PLACES) :] == [case.name for case in VARIANTS]
    assert "**" not in "".join(map("".join, rows))
