"""`parity`: sound backends agree, and a broken one is told by the mistake that was made in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distributed.cli import main
from distributed.errors import UserError
from distributed.registry.catalog import get_catalog
from distributed.testing.parity.diagnosis import Divergence, compare, first_divergence
from distributed.testing.parity.measure import Exercise, Record, Side, parse_side, record
from distributed.testing.parity.table import render
from distributed.testing.rank_pool import RankPool
from tests.campaigns import mutants
from tests.campaigns.mutant_table import Mutant, mutant_spec

EXERCISE = Exercise(steps=6, global_batch_size=12, accumulation=3, samples=29)
"""Three steps an epoch; the third takes 5 samples."""


@pytest.fixture(scope="module")
def reference() -> Record:
    return record(Side("serial"), EXERCISE)


@contextmanager
def registered(kind: type[Any]) -> Iterator[str]:
    catalog, mutant = get_catalog(), Mutant(kind, "")
    catalog.backends[mutant.name] = mutant_spec(mutant, catalog)
    try:
        yield mutant.name
    finally:
        del catalog.backends[mutant.name]


def diverges(reference: Record, kind: type[Any], pool: RankPool, exercise: Exercise) -> Divergence | None:
    with registered(kind) as name:
        other = record(Side(name, ranks=2), exercise, launcher=pool)
    return first_divergence(reference, other, exercise, 1e-9)


def test_sound_backends_agree_at_every_step(reference: Record, rank_pool: RankPool) -> None:
    other = record(Side("pytorch-ddp", ranks=2), EXERCISE, launcher=rank_pool)
    rows = compare(reference, other)
    assert first_divergence(reference, other, EXERCISE, 1e-9) is None
    assert [row.step for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row.distance is not None and row.distance < 1e-9 for row in rows)
    assert rows[0].loss[0] != rows[5].loss[0]


def test_weights_are_those_of_their_step(reference: Record) -> None:
    """Cut off after two steps, the run ends on the weights that the long one had there."""
    short = record(Side("serial"), replace(EXERCISE, steps=2))
    assert all((a == b).all() for a, b in zip(short.weights[-1], reference.weights[2], strict=True))
    assert any((a != b).any() for a, b in zip(short.weights[-1], reference.weights[3], strict=True))


@pytest.mark.parametrize(
    ("kind", "step", "figure", "cause"),
    [
        (mutants.SumsGradients, 1, "gradient norm", "summed over 2 ranks, not averaged"),
        (mutants.AveragesTwice, 1, "gradient norm", "averaged over 2 ranks twice"),
        (mutants.DividesByAccumulationTwice, 1, "gradient norm", "divided by 3 accumulation steps twice"),
        (mutants.ForgetsToReduce, 1, "gradient norm", "not reduced over the ranks"),
        (mutants.RoundsToHalf, 1, "gradient norm", "half precision"),
        (mutants.ReportsOneRanksLoss, 1, "loss", "the gradients agree: the loss is reported from one rank"),
        (mutants.AveragesMicroBatches, 3, "loss", "smaller batch: padded with repeated samples, or"),
        (mutants.PadsTheLastBatch, 3, "loss", "smaller batch: padded with repeated samples, or"),
        (mutants.DropsTheRaggedBatch, 3, "gradient norm", "leaves this batch out, the epoch's last"),
        (mutants.ScalesTheRateByRanks, 1, "learning rate", "multiplied by 2 ranks"),
        (mutants.StepsTheScheduleTwice, 1, "learning rate", "the schedule advances differently"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mistake_is_told_by_where_it_shows(
    reference: Record, rank_pool: RankPool, kind: type[Any], step: int, figure: str, cause: str
) -> None:
    found = diverges(reference, kind, rank_pool, EXERCISE)
    assert found is not None
    assert (found.step, found.figure) == (step, figure)
    assert cause in found.causes[0]


def test_clipping_shows_in_the_weights_alone(rank_pool: RankPool) -> None:
    exercise = replace(EXERCISE, steps=2, options={"gradient_clipping": 0.05})
    found = diverges(record(Side("serial"), exercise), mutants.ClipsEveryMicroBatch, rank_pool, exercise)
    assert found is not None
    assert found.figure in ("gradient norm", "weights")
    assert "clip" in " ".join(found.causes)


def test_another_optimizer_shows_in_the_first_update() -> None:
    plain = record(Side("serial"), replace(EXERCISE, steps=2))
    decayed = record(Side("serial"), replace(EXERCISE, steps=2, optimizer="adamw"))
    found = first_divergence(plain, decayed, EXERCISE, 1e-9)
    assert found is not None
    assert (found.step, found.figure) == (1, "weights")
    assert "the optimizer: another kind" in found.causes[0]


def test_another_order_of_the_data_shows_in_the_first_loss(reference: Record) -> None:
    found = first_divergence(reference, record(Side("serial", {"seed": 3}), EXERCISE), EXERCISE, 1e-9)
    assert found is not None
    assert (found.step, found.figure) == (1, "loss")
    assert "data order: the ranks do not take" in found.causes[0]


def test_other_weights_at_the_start_are_told() -> None:
    plain = record(Side("serial"), replace(EXERCISE, steps=1))
    assert plain.weights[0] is not None
    moved = replace(plain, weights=[[w + 0.1 for w in plain.weights[0]], plain.weights[1]])
    found = first_divergence(plain, moved, EXERCISE, 1e-9)
    assert found is not None
    assert found.figure == "initial weights"


def test_a_side_may_carry_fields_of_its_own() -> None:
    side = parse_side("pytorch-ddp:bucket_cap_mb=1,data.verify=false", 2)
    assert side == Side("pytorch-ddp", {"bucket_cap_mb": 1, "data.verify": False}, 2)
    assert str(side) == "pytorch-ddp:bucket_cap_mb=1,data.verify=False"
    assert parse_side("serial", 2).ranks == 1
    with pytest.raises(UserError, match="Did you mean 'bucket_cap_mb'"):
        parse_side("pytorch-ddp:bucket_cap=1", 2)


# -- the command -----------------------------------------------------------------------


@pytest.mark.starts_processes
def test_the_command_says_that_two_backends_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "serial", "pytorch-ddp", "--ranks", "2", "--steps", "6"]) == 0
    output = capsys.readouterr().out
    assert "serial on 1 rank and pytorch-ddp on 2 ranks agree within 1e-09 over 6 steps" in output
    assert output.count("\n 6 ") + output.count("\n6 ") == 1


def test_the_command_names_the_first_divergence(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--steps", "4", "--json", "--tolerance", "1e-9"]
    assert main(["parity", "serial", "serial:momentum=0", "--dtype", "float32", *given]) == 0
    capsys.readouterr()
    faster = ["parity", "serial", "serial:scheduler=linear", *given]
    assert main(faster) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["divergence"]["figure"] == "learning rate"
    assert found["divergence"]["step"] == 2
    assert [step["step"] for step in found["steps"]] == [1, 2, 3, 4]
    assert found["tolerance"] == 1e-9


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["serial"], "two backends"),
        (["serial", "seriel"], "Did you mean 'serial'"),
        (["serial", "serial", "--steps", "0"], "--steps"),
        (["serial", "serial", "--dtype", "float8"], "float8"),
        (["serial", "serial", "--set", "sed=1"], "Did you mean 'seed'"),
        (["serial", "pytorch-ddp", "--ranks", "5"], "global_batch_size"),
    ],
)
def test_a_mistake_in_the_command_is_told(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert main(["parity", *arguments]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.starts_processes
def test_the_table_states_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parity", "--table", "pytorch-ddp", "--ranks", "1,2", "--steps", "3"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| backend | ranks | accumulation | float64 sgd |")
    assert [line.split(" | ")[:3] for line in lines[2:]] == [
        ["| `pytorch-ddp`", ranks, accumulation] for ranks in "12" for accumulation in "12"
    ]


def test_the_committed_table_is_within_tolerance() -> None:
    page = (Path(__file__).parents[2] / "docs" / "parity.md").read_text(encoding="utf-8")
    table = page.split("<!-- parity -->\n")[1].split("<!-- end of parity -->")[0]
    head, _, *rows = table.splitlines()
    assert head == next(render([]))
    assert "**" not in table
    measured = {re.match(r"\| `([\w-]+)", row)[1] for row in rows}
    assert {"pytorch-ddp", "fsdp"} <= measured
