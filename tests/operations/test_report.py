"""What `report` makes of records: whole ones, torn ones, somebody else's, several beside each other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.cli import main
from distributed.errors import UserError
from distributed.operations.report.compare import differences, names_of, scalings
from distributed.operations.report.page import report
from distributed.operations.report.record_format import NAME, append
from distributed.operations.report.stitch import read_runs
from distributed.operations.report.time_shares import over_steps, whole
from tests.support.records import lines, one_run, train, write_attempt, write_end


def refused(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["report", *words, "--output", "out.html"]) == 2
    assert not Path("out.html").exists()
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# -- what cannot be read -------------------------------------------------------------------------------


def test_a_folder_without_a_record_names_those_below(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such directory" in refused("nowhere", capsys=capsys)
    write_attempt(Path("below"))
    message = refused(".", capsys=capsys)
    assert "no run record found here (found some in below" in message
    assert "checkpoint_dir" in message


def test_somebody_elses_lines_are_no_record(capsys: pytest.CaptureFixture[str]) -> None:
    Path("theirs").mkdir()
    Path("theirs", NAME).write_text('{"event": "login"}\n{"kind": "log", "level": "info"}\n')
    assert "not a run record" in refused("theirs", capsys=capsys)
    Path("theirs", NAME).write_bytes(bytes(range(256)) * 40)
    assert "not a run record" in refused("theirs", capsys=capsys)
    Path("theirs", NAME).write_text("")
    assert "not a run record" in refused("theirs", capsys=capsys)


def test_a_newer_record_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write_attempt(Path("run"), record=7)
    message = refused("run", capsys=capsys)
    assert "newer version: its format is 7" in message
    assert "pip install --upgrade" in message


def test_a_record_that_cannot_be_opened(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run", NAME).mkdir(parents=True)
    assert "cannot be read" in refused("run", capsys=capsys)


def test_an_output_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    write_attempt(Path("run"))
    assert main(["report", "run", "--output", "no/such/out.html"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main(["report", "run", "--output", "run"]) == 2
    assert "is a directory" in capsys.readouterr().err


@pytest.mark.parametrize("cut", [1, 40, 300])
def test_a_torn_last_line_is_normal(cut: int) -> None:
    write_attempt(Path("run"))
    data = Path("run", NAME).read_bytes()
    Path("run", NAME).write_bytes(data[:-cut])
    run = one_run(Path("run"))
    assert run.series("loss").steps[:4] == [10, 20, 30, 40]
    assert run.notes == (
        ["The last line is incomplete: the run is writing it, or was killed while writing it."]
        if cut > 1
        else []
    )


def test_damage_in_the_middle_costs_only_those_lines_and_is_told() -> None:
    write_attempt(Path("run"))
    write_end(Path("run"))
    texts = Path("run", NAME).read_text().splitlines()
    texts[2] = texts[2][:30]
    texts[4] = '{"kind": "wonder", "time": 1}'
    Path("run", NAME).write_text("\n".join(texts) + "\n")
    run = one_run(Path("run"))
    assert run.series("loss").steps == [10, 30, 50]
    assert run.status == "finished"
    assert "Line 3 of the record cannot be read (damaged) and is left out." in run.notes
    assert any(note.startswith("Line 5 of the record is not of a kind") for note in run.notes)
    page = report([run])
    assert all(note in page for note in run.notes)


def test_an_attempt_without_its_first_line_is_still_shown() -> None:
    write_attempt(Path("run"))
    write_end(Path("run"))
    texts = Path("run", NAME).read_text().splitlines()
    Path("run", NAME).write_text("\n".join(texts[1:]) + "\n")
    run = one_run(Path("run"))
    assert run.series("loss").steps == [10, 20, 30, 40, 50]
    assert any("first line of an attempt is lost" in note for note in run.notes)
    assert "Loss" in report([run])


def test_every_prefix_of_a_record_is_a_report_or_a_plain_refusal() -> None:
    write_attempt(Path("whole"), "a", steps=range(10, 40, 10), finish=None)
    write_attempt(Path("whole"), "b", run="s", steps=range(30, 60, 10), checkpoint="x")
    write_end(Path("whole"), "s", error={"summary": "it broke", "rank": 1, "host": "beta"}, totals={})
    data = Path("whole", NAME).read_bytes()
    Path("part").mkdir()
    told, refusals = 0, set()
    for size in range(0, len(data), 97):
        Path("part", NAME).write_bytes(data[:size])
        try:
            runs = read_runs(Path("part"))
        except UserError as error:
            refusals.add(error.message)
            continue
        assert runs[-1].status
        told += 1
        if told % 8 == 0:
            assert "<h1>" in report(runs)
    assert told > 20
    assert refusals == {"not a run record: no line could be parsed"}


@pytest.mark.starts_processes
def test_without_plotly_the_command_to_install_it_is_told() -> None:
    write_attempt(Path("run"))
    program = (
        "import sys\n"
        "class No:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'plotly': raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, No())\n"
        "from distributed.cli import main\n"
        "print(main(['runs']), main(['report', 'run']), 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "0 2 False", done.stdout + done.stderr
    assert "pip install 'distributed-trainer[report]'" in done.stderr


# -- what is said -------------------------------------------------------------------------------------


def test_a_page_about_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, history = train(tmp_path / "run", epochs=2)
    assert main(["report", "run"]) == 0
    assert "1 run" in capsys.readouterr().out
    page = Path("report.html").read_text()
    body = page[: page.index('<script type="application/json"')]
    assert "finished after 20 steps, 2 epochs" in body
    assert "on 1 rank (CPU" in body
    assert f"{100 * history.best_accuracy:.2f} %" in body
    for title in (
        "Loss",
        "Validation accuracy",
        "Learning rate",
        "Gradient norm",
        "Throughput",
        "Memory of rank 0",
    ):
        assert f"<h3>{title}</h3>" in body
    for field, value in (("global_batch_size", "8"), ("gradient_clipping", "1"), ("epochs", "2")):
        assert re.search(rf"<td[^>]*>{field}</td><td[^>]*>{value}</td><td[^>]*>argument</td>", body), field
    assert page.count("plotly.js v") == 1
    figures = json.loads(page.partition('id="figures">')[2].partition("</script>")[0])
    assert len(figures) == body.count('class="plot"')
    (training,) = [trace for trace in figures[0]["data"] if trace["name"] == "training"]
    assert training["x"] == [log["step"] for log in history.logs]


def test_everything_is_escaped() -> None:
    evil = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    write_attempt(
        Path("run"), config={"tracking.run_name": evil}, name=evil, script=evil, versions={evil: evil}
    )
    append("run", "log", {"attempt": "a", "step": 60, "figures": {f"{evil}": 1.0, "loss": 1.0}})
    write_end(
        Path("run"), status="failed", error={"summary": evil, "host": evil, "traceback": evil, "rank": 0}
    )
    write_attempt(Path("other"), name=evil)
    for page in (report([one_run(Path("run"))]), report([one_run(Path("run")), one_run(Path("other"))])):
        assert "<img src=x" not in page
        assert "<script>alert" not in page
        assert "&lt;img src=x onerror=alert(1)&gt;" in page
        figures = page.partition('id="figures">')[2].partition("</script>")[0]
        assert "<" not in figures


def test_failure_reports_without_a_line_are_added() -> None:
    write_attempt(Path("run"), finish=None)
    Path("run", "failure_report_1.txt").write_text(
        "rank 1 (beta) has made no progress for 31 s\n  stack here\n"
    )
    run = one_run(Path("run"))
    assert run.failures[0].summary == "rank 1 (beta) has made no progress for 31 s (failure_report_1.txt)"
    assert "stack here" in report([run])


def test_the_metric_that_the_run_asked_for_decides_what_is_best() -> None:
    for step, (accuracy, error) in ((10, (0.9, 0.5)), (20, (0.8, 0.2))):
        figures = {"epoch": 0.0, "val_accuracy": accuracy, "val_error": error, "val_loss": 1.0}
        for name, metric in (("plain", None), ("asked", "error")):
            if step == 10:
                write_attempt(Path(name), config={"checkpoint.metric": metric})
            append(name, "epoch", {"attempt": "a", "step": step, "figures": figures})
    assert one_run(Path("plain")).best() == ("val_accuracy", 0.9, 10)
    assert one_run(Path("asked")).best() == ("val_error", 0.2, 20)


def test_of_each_step_the_last_attempt_counts() -> None:
    write_attempt(Path("run"), "a", steps=range(10, 60, 10), finish=None)
    write_attempt(Path("run"), "b", run="s", steps=range(30, 50, 10), rate=500.0, finish=None)
    write_attempt(Path("run"), "c", run="t", steps=range(40, 80, 10), rate=250.0)
    run = one_run(Path("run"))
    assert run.series("loss").steps == [10, 20, 30, 40, 50, 60, 70]
    assert run.series("samples_per_second").values == [1000, 1000, 500, 250, 250, 250, 250]
    assert [series.steps for series in run.repeated("loss")] == [[30, 40, 50], [40]]
    assert run.resumes() == [20, 30]
    assert run.steps == 70


def test_an_earlier_run_of_the_folder_is_shown_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    write_attempt(Path("run"), "a", run="first", steps=range(10, 100, 10))
    write_attempt(Path("run"), "b", run="second")
    assert len(read_runs(Path("run"))) == 2
    assert main(["report", "run"]) == 0
    assert "holds 1 earlier run, which --all shows" in capsys.readouterr().out
    assert main(["report", "run", "--all"]) == 0
    assert "2 runs" in capsys.readouterr().out


def test_shares_of_time() -> None:
    # 10 steps of 8 samples at 1000/s are 80 ms an interval; 10 % of it is not told.
    write_attempt(Path("run"), steps=range(10, 40, 10), batch=8, rate=1000.0)
    told = lines(Path("run"))
    at = told[-1]["time"]
    append("run", "epoch", {"attempt": "a", "step": 30, "figures": {"epoch": 0.0, "val_loss": 1.0}})
    texts = Path("run", NAME).read_text().splitlines()
    for index, moment in ((1, at), (2, at + 0.08), (3, at + 0.16), (5, at + 0.66)):
        texts[index] = json.dumps(json.loads(texts[index]) | {"time": moment})
    Path("run", NAME).write_text("\n".join(texts) + "\n")
    run = one_run(Path("run"))
    shares = over_steps(run)
    assert shares["backward"].values == pytest.approx([30.0, 30.0, 30.0])
    assert sum(series.values[0] for series in shares.values()) == pytest.approx(100.0)
    seconds = whole(run)
    assert seconds["forward"] == pytest.approx(0.2 * 0.24)
    assert seconds["other"] == pytest.approx(0.1 * 0.24)
    assert seconds["validation"] == pytest.approx(0.5)


# -- several runs ---------------------------------------------------------------------------------------


def test_strong_and_weak_scaling_are_told_apart_by_the_global_batch() -> None:
    for folder, ranks, batch, rate in (
        ("one", 1, 64, 1000.0),
        ("strong", 2, 64, 1600.0),
        ("weak", 2, 128, 1900.0),
        ("four", 4, 64, 2000.0),
    ):
        write_attempt(Path(folder), ranks=ranks, batch=batch, rate=rate)
        write_end(Path(folder))
    runs = [one_run(Path(name)) for name in ("one", "strong", "weak", "four")]
    found = {item.kind: item for item in scalings(runs)}
    assert found["strong"].ranks == [1, 2, 4]
    assert found["strong"].efficiency == pytest.approx([1.0, 0.8, 0.5])
    assert found["weak"].ranks == [1, 2]
    assert found["weak"].efficiency == pytest.approx([1.0, 0.95])
    page = report(runs)
    assert "strong (global batch stays)" in page
    assert "80 %" in page


def test_runs_that_differ_in_more_than_ranks_do_not_scale() -> None:
    write_attempt(Path("a"), ranks=1, config={"learning_rate": 0.1})
    write_attempt(Path("b"), ranks=2, config={"learning_rate": 0.2})
    write_attempt(Path("c"), ranks=2, config={"learning_rate": 0.1}, finish="failed")
    write_end(Path("c"), status="failed")
    assert scalings([one_run(Path(name)) for name in "abc"]) == []


def test_what_differs_is_told_and_places_are_not() -> None:
    write_attempt(Path("a"), config={"learning_rate": 0.1, "checkpoint_dir": "a"})
    write_attempt(Path("b"), ranks=4, config={"learning_rate": 0.2, "checkpoint_dir": "b"})
    rows = dict(differences([one_run(Path("a")), one_run(Path("b"))]))
    assert rows == {"ranks": ["2", "4"], "batch size": ["4", "2"], "learning_rate": ["0.1", "0.2"]}


def test_runs_of_one_name_get_names_of_their_own() -> None:
    for folder in ("x/run", "y/run"):
        write_attempt(Path(folder))
    runs = [one_run(Path("x/run")), one_run(Path("y/run")), one_run(Path("y/run"))]
    assert len(set(names_of(runs))) == 3


def test_the_median_of_an_even_number_is_between_the_two(tmp_path: Path) -> None:
    write_attempt(tmp_path, steps=range(10, 20, 10), rate=100.0, finish=None)
    append(tmp_path, "log", {"attempt": "a", "step": 20, "figures": {"samples_per_second": 200.0}})
    assert one_run(tmp_path).throughput() == 150.0


def test_no_word_of_a_record_is_markup_in_a_comparison(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_attempt(tmp_path / name, finish=None)
        write_end(tmp_path / name, status="x onmouseover=alert(1)")
    assert main(["report", str(tmp_path / "one"), str(tmp_path / "two"), "--output", "page.html"]) == 0
    assert "<span class=x onmouseover" not in Path("page.html").read_text()
