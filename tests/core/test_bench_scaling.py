"""`bench scaling`: what is run, what is made of it, and a small real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distributed.cli import main
from distributed.commands.bench import _remarks
from distributed.errors import UserError
from distributed.testing.scaling import Case, Figure, Plan, _results, cases_of


def plan(**values) -> Plan:
    defaults = {"backends": ["serial"], "ranks": [1, 2], "modes": ["strong", "weak"], "batch_size": 64}
    return Plan(**{**defaults, "steps": 12, "repeats": 3, **values})


def test_strong_keeps_the_global_batch_and_weak_each_ranks() -> None:
    cases = cases_of(plan(ranks=[2, 4], batch_size=32))
    assert cases["serial", "strong", 2] == cases["serial", "weak", 2] == Case("serial", 2, 32)
    assert cases["serial", "strong", 4] == Case("serial", 4, 16)
    assert cases["serial", "weak", 4] == Case("serial", 4, 32)


def test_a_batch_that_cannot_be_cut_is_refused_and_a_good_one_named() -> None:
    with pytest.raises(UserError) as error:
        cases_of(plan(ranks=[2, 3, 4], batch_size=7))
    assert error.value.allowed == "multiples of 6"
    cases_of(plan(ranks=[2, 3, 4], batch_size=6))


def test_efficiency_is_taken_within_a_repeat() -> None:
    one = plan(modes=["weak"])
    rates = {Case("serial", 1, 64): [100.0, 200.0, 50.0], Case("serial", 2, 64): [180.0, 360.0, 100.0]}
    alone, both = _results(one, cases_of(one), rates)
    assert alone.efficiency == Figure((1.0, 1.0, 1.0))
    assert both.efficiency == Figure((0.9, 0.9, 1.0))
    assert (both.throughput.median, both.throughput.low, both.throughput.high) == (180.0, 100.0, 360.0)
    assert both.efficiency.median == 0.9


def test_more_ranks_than_cores_are_remarked_upon() -> None:
    assert any("4096 ranks share" in text for text in _remarks(plan(ranks=[1, 4096])))
    assert not any("share" in text for text in _remarks(plan(ranks=[1])))
    assert any("little about noise" in text for text in _remarks(plan(repeats=2)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backends", "pytorch-dpd"], "Did you mean 'pytorch-ddp'"),
        (["--backends", ","], "no backend is named"),
        (["--ranks", "1,none"], "--ranks"),
        (["--steps", "0"], "--steps"),
        (["--script", "nowhere.py"], "no such file"),
        (["--ranks", "2,3", "--batch-size", "5"], "multiples of 3"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "scaling", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_run_that_fails_is_told_with_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--backends", "serial", "--ranks", "1", "--set", "optimizer=none"]
    assert main(["bench", "scaling", *words]) == 2
    err = capsys.readouterr().err
    assert "serial on 1 ranks failed: error: optimizer" in err
    assert "distributed.cli train" in err


def test_a_small_real_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "scaling.html"
    words = ["--ranks", "1,2", "--mode", "weak", "--steps", "12", "--repeats", "1", "--width", "32"]
    assert main(["bench", "scaling", *words, "--json", "--output", str(page)]) == 0
    found = capsys.readouterr()
    results = json.loads(found.out[: found.out.rindex("}") + 1])["results"]
    assert [(r["backend"], r["ranks"], r["batch_size"]) for r in results] == [
        ("pytorch-ddp", 1, 64),
        ("pytorch-ddp", 2, 64),
    ]
    assert results[0]["efficiency"]["median"] == 1.0
    assert 0 < results[1]["efficiency"]["median"] < 2
    assert all(r["samples_per_second"]["median"] > 0 for r in results)
    assert "1/1  pytorch-ddp, 2 x 64" in found.err
    assert "<h3>Efficiency</h3>" in page.read_text()
