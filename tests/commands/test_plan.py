"""``plan`` through the command line: numbers, scripts, files, a trial, and the error of earlier plans."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from distributed.cli import main

NUMBERS = ["--layers", "4", "--hidden", "256", "--heads", "4", "--vocabulary", "1024", "--sequence", "128"]

SCRIPT = """
import sys
import torch
from torch import nn
from distributed import Trainer

blocks = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(int(sys.argv[1]))]
generator = torch.Generator().manual_seed(0)
data = torch.randn(64, 16, generator=generator), torch.randint(0, 4, (64,), generator=generator)
torch.manual_seed(0)
Trainer(nn.Sequential(*blocks, nn.Linear(16, 4)), batch_size=4, max_steps=6, log_every_n_steps=2).fit(data)
raise AssertionError("a plan ends the script at fit")
"""


def said(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    assert main(["plan", *map(str, words)]) == code
    return capsys.readouterr().out


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def test_numbers_print_a_table_and_write_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--hardware", "h100", "--devices", "8", "--global-batch-size", "16"]
    files = ["-o", tmp_path / "plan.yaml", "--number", "2", "--html", tmp_path / "plan.html"]
    out = said(capsys, *NUMBERS, *chosen, *files, "--rejected")
    assert "a transformer with 3,737,856 parameters; 8 x H100, fp32, adamw, global batch 16" in out
    assert out.count("MFU") == 2
    assert "exposed communication" in out
    assert "fragmentation" in out
    assert len(re.findall(r"interval +[\d.]+ ?\S* to [\d.]+", out)) == 3
    assert "more pipeline ranks than layers=4" in out
    assert f"train --script FILE --config {tmp_path / 'plan.yaml'}" in out
    found = yaml.safe_load((tmp_path / "plan.yaml").read_text(encoding="utf-8"))
    assert found["global_batch_size"] == 16
    assert found["planned"]["hardware"] == "H100"
    assert (tmp_path / "plan.yaml").stat().st_mode & 0o077 == 0
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    for words in ("Predicted time of a step", "Predicted memory of a rank", "first reason", "class=best"):
        assert words in page


def test_json_has_every_plan_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(
        said(capsys, *NUMBERS, "--global-batch-size", 8, "--devices", 4, "--plans", 3, "--json")
    )
    assert [len(found["plans"]), found["devices"], found["hardware"]] == [3, 4, "CPU"]
    best = found["plans"][0]
    assert best["seconds"] == pytest.approx(sum(best["time"].values()))
    whole = {"time": best["seconds"], "mfu": best["mfu"], "memory": best["memory"]["total"]}
    for name, (low, high) in best["intervals"].items():
        assert low < whole[name] < high
    assert best["memory"]["total"] == sum(v for name, v in best["memory"].items() if name != "total")
    assert sum(found["reasons"].values()) > 50


@pytest.mark.starts_processes
def test_a_script_is_planned_tried_and_trained(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With fewer blocks in the trial; then the file trains, its run is in the history, and in the report."""
    file, folder = tmp_path / "plan.yaml", tmp_path / "run"
    words = ["--script", script, "--devices", 2, "--backend", "pytorch-ddp", "--axes", "data", "-o", file]
    out = said(capsys, *words, "--verify", "--steps", 6, "--verify-layers", 1, "--", 3)
    assert "Sequential with 3,284 parameters; 2 x CPU, fp32, adamw, global batch 8" in out
    assert "plan 1, 6 steps here:" in out
    rows = [line.split() for line in out[out.index("6 steps here:") :].splitlines()]
    (step,) = [row for row in rows if row[:2] == ["step", "time"]]
    assert step[-1].endswith("%")
    (memory,) = [row for row in rows if row[:1] == ["memory"]]
    assert " ".join(memory).endswith("less than a rank needs to start"), "of 3,284 parameters"

    trained = ["train", "--script", script, "--config", file, "--set", f"tracking.record_dir={folder}"]
    assert main([*map(str, trained), "--", "3"]) == 1
    printed = capsys.readouterr()
    assert "pytorch-ddp: 2 ranks" in printed.out
    assert "a plan ends the script at fit" in printed.err, "train goes on behind fit"
    assert re.search(r"^plan: step time [\d.]+ \w+, predicted [\d.]+ \w+ \([+-][\d.]+%\)$", printed.out, re.M)

    history = said(capsys, "--history", tmp_path)
    assert "pytorch-ddp, data 2" in history
    assert "step time: mean error" in history
    assert main(["report", str(folder), "--output", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Predicted and measured" in page


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([*NUMBERS, "--script", "x.py"], "--script: a script and numbers of a transformer were given"),
        (["--layers", "many"], "--layers: not a number. Got 'many'"),
        (["--hardware", "H1000", *NUMBERS], "hardware: no hardware profile has this name"),
        (["--history", "nowhere"], "--history: no run has left a record here"),
        ([*NUMBERS, "--number", "0"], "--number: must be a positive integer"),
        (
            [*NUMBERS, "--devices", "1", "--plans", "99", "--number", "11", "-o", "x.yaml"],
            "number: there is no plan with this number. Got 11",
        ),
        ([*NUMBERS, "--axes", "datas"], "axes: the mesh has no such axis"),
    ],
)
def test_mistakes_are_named(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert text in capsys.readouterr().err


def test_a_script_without_a_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.py"
    path.write_text("", encoding="utf-8")
    assert main(["plan", "--script", str(path)]) == 2
    assert "empty.py ended without calling `fit`, so there is nothing to plan" in capsys.readouterr().err
