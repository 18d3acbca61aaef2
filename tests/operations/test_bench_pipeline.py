"""`bench pipeline`: timelines, bubbles beside their formulas, and a small measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distributed.cli import main


def test_timelines_and_bubbles_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "zbv.svg"
    flags = ["--schedule", "zbv", "--ranks", "2", "--microbatches", "4", "--output", str(picture)]
    assert main(["bench", "pipeline", *flags]) == 0
    text = capsys.readouterr().out
    assert "rank 1  .  F0" in text
    assert "bubble: formula 0.0400, simulated 0.0400" in text
    assert picture.read_text().count("<title>") == 2 * 4 * 2 * 3


@pytest.mark.starts_processes
def test_a_measurement_runs_the_schedule_of_real_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ["--schedule", "gpipe", "--ranks", "2", "--microbatches", "2"]
    assert main(["bench", "pipeline", *numbers, "--measure", "--unit-ms", "100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    kinds = [kind for spans in found["actions"].values() for kind, *_ in spans]
    assert sorted(kinds) == ["B"] * 4 + ["F"] * 4
    assert [found["formula"], found["simulated"]] == pytest.approx([1 / 3, 1 / 3])
    # Each rank waits for the other's first forward and last backward, whatever else the machine does.
    assert found["measured"] > 0.0


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--schedule", "dualpipev", "--microbatches", "2"], "--microbatches"),
        (["--ranks", "1"], "--ranks"),
        (["--schedule", "zbv", "--measure"], "--schedule"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    flags: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "pipeline", *flags]) == 2
    assert field in capsys.readouterr().err
