"""What a search keeps of its trials: their records, the best of them, and the plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distributed import UserError, WorkerError
from distributed.operations.tuning.plot import write_plot
from distributed.operations.tuning.trial_record import Trial, best_of, ranked

# -- records ---------------------------------------------------------------------------


def made(name: str, value: float | None, status: str = "finished", **given: Any) -> Trial:
    reports = [] if value is None else [{"epoch": 0, "val_loss": value}]
    trial = Trial(name, {"lr": 0.1}, status, reports=reports, **given)
    trial.judge(None, "auto")
    return trial


def test_the_best_is_neither_nan_nor_failed() -> None:
    trials = [made("a", 2.0), made("b", float("nan")), made("c", 0.5, "failed"), made("d", 1.0, "stopped")]
    assert [trial.status for trial in trials] == ["finished", "nan", "failed", "stopped"]
    assert best_of(trials, None, "auto").name == "d"
    assert [trial.name for trial in ranked(trials, "auto")][:2] == ["d", "a"]


def test_without_a_best_the_first_cause_is_named() -> None:
    failed = [made("a", None, "failed", error="no disk"), made("b", None, "failed", error="later")]
    with pytest.raises(WorkerError, match="all 2 trials failed; trial a: no disk"):
        best_of(failed, None, "auto")
    failed[0].is_mistake = True
    with pytest.raises(UserError, match="all 2 trials failed; trial a: no disk"):
        best_of(failed, None, "auto")
    with pytest.raises(UserError, match="in every trial that ended, val_loss was not a number"):
        best_of([made("a", float("inf"))], None, "auto")
    trial = Trial("a", {}, "finished", reports=[{"loss": 1.0}])
    trial.judge("gain", "auto")
    with pytest.raises(UserError, match=r"no trial reported this metric. Got 'gain'. Allowed: loss"):
        best_of([trial], "gain", "auto")


# -- the plot --------------------------------------------------------------------------


def test_the_picture_needs_nothing_and_a_name_cannot_end_its_script(tmp_path: Path) -> None:
    trials = [made(f"{n:05d}", 1.0 / (n + 1)) for n in range(4)]
    for n, trial in enumerate(trials):
        trial.parameters = {"lr": 10.0**-n, "kind": "</script><b>"[: 9 + n], "size": n}
    path = write_plot(trials, "auto", trials[3], tmp_path / "search.html", "a <title>")
    page = Path(path).read_text()
    figures, _, _ = page.partition('id="figures">')[2].partition("</script>")
    course, lines = json.loads(figures)
    assert (len(course["data"]), len(lines["data"])) == (2, len(trials))
    assert "</script><b>" not in page
    assert "a &lt;title&gt;" in page
    assert 'src="http' not in page


def test_a_trial_that_failed_is_in_the_table_alone(tmp_path: Path) -> None:
    """Its last good figure is no best so far, whatever it was."""
    trials = [made("0", 1.0), made("1", 0.1, "failed", error="no disk"), made("2", 0.5)]
    for n, trial in enumerate(trials):
        trial.parameters = {"lr": 10.0**-n}
    page = Path(write_plot(trials, "auto", trials[2], tmp_path / "search.html", "search")).read_text()
    course, lines = json.loads(page.partition('id="figures">')[2].partition("</script>")[0])
    assert course["data"][1]["y"] == [1.0, 0.5]
    assert len(lines["data"]) == 2
    assert "failed: no disk" in page
