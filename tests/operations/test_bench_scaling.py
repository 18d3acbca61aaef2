"""`bench scaling`: what is run, what is made of it, and a small real one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from distributed.cli import main
from distributed.commands.bench import _remarks
from distributed.errors import UserError
from distributed.operations.bench.scaling import Case, Figure, Plan, _cause, _results, cases_of, measure
from tests.support.records import write_attempt


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
    assert any("not enough to estimate noise" in text for text in _remarks(plan(repeats=2)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backends", "pytorch-dpd"], "Did you mean 'pytorch-ddp'"),
        (["--backends", ","], "no backend given"),
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


@pytest.mark.starts_processes
def test_a_run_that_fails_is_told_with_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--backends", "serial", "--ranks", "1", "--set", "optimizer=none"]
    assert main(["bench", "scaling", *words]) == 2
    err = capsys.readouterr().err
    assert "serial on 1 ranks failed: error: optimizer" in err
    assert "distributed.cli train" in err


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("beware\nerror: --lr: too high. Lower it.\n", "error: --lr: too high. Lower it."),
        (
            "beware\nrank 1 (here, pid 7) raised ValueError: no\n\nTraceback\n  ...\nValueError: no\n",
            "rank 1",
        ),
        ("beware\nTraceback\n  ...\nKeyError: 'gone'\n", "KeyError: 'gone'"),
        ("rank 0 of 2 is here\nKilled\n", "Killed"),
        ("", ""),
    ],
)
def test_of_what_a_failed_run_said_the_line_that_says_why_is_told(said: str, cause: str) -> None:
    assert _cause(said).startswith(cause)
    assert bool(_cause(said)) == bool(cause)


@pytest.mark.starts_processes
def test_a_script_of_your_own_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "own.py"
    script.write_text("import warnings\nwarnings.warn('beware')\nraise OSError('the disk is on fire')\n")
    assert main(["bench", "scaling", "--backends", "serial", "--ranks", "1", "--script", str(script)]) == 2
    assert "serial on 1 ranks failed: OSError: the disk is on fire." in capsys.readouterr().err


def test_of_a_script_that_trains_several_times_the_last_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--record-dir") + 1])
        for run, rate in (("warm-up", 100.0), ("long", 300.0)):
            write_attempt(folder, run, run=run, rate=rate)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("subprocess.run", ran)
    told: list[str] = []
    (result,) = measure(plan(ranks=[1], modes=["weak"], repeats=1), told.append)
    assert result.throughput.median == pytest.approx(300.0)
    assert told == ["1/1  serial, 1 x 64: 300 samples/s in the last of 2 trainings"]


@pytest.mark.starts_processes
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
    alone, both = (r["samples_per_second"]["median"] for r in results)
    assert alone > 0
    # How fast this machine happens to be is no part of the test; that the figures fit together is.
    assert results[1]["efficiency"]["median"] == pytest.approx(both / 2 / alone)
    assert "1/1  pytorch-ddp, 2 x 64" in found.err
    assert "<h3>Efficiency</h3>" in page.read_text()
