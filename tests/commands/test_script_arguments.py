"""Arguments of a script follow `--`; anything unknown before it is an error with the corrected line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.cli import build_parser, main
from distributed.commands.flags import collect_layers
from distributed.config import DistributedConfig, load_layers

# A script that prints what reaches it, and calls `fit` as far as the command line can tell.
SCRIPT = """
import sys
from distributed.config.script_overlay import active
run = active()
run.num_fits += 1
print(sys.argv[1:], dict(run.layers[0].values))
"""

Refused = Callable[..., str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text(SCRIPT)
    Path("tune.yaml").write_text("tune: {search_space: {learning_rate: {choice: [1]}}}")
    return tmp_path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    def run(*words: str) -> str:
        assert main(list(words)) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err

    return run


def lines(error: str) -> list[list[str]]:
    """The command lines that an error proposes, as words after the program."""
    return [
        shlex.split(line)[3:] for line in re.findall(r"`([^`]+)`", error) if line.startswith("python -m ")
    ]


def config_of(*words: str) -> DistributedConfig:
    return load_layers(collect_layers(build_parser(words).parse_known_args(words)[0]))


def test_only_what_follows_the_dashes_reaches_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--epochs", "2", "--", "--lr=0.1", "-v", "data", "--", "--epochs", "9"]
    assert main(["train", "--script", "x.py", *words]) == 0
    said = ["--lr=0.1", "-v", "data", "--", "--epochs", "9"]
    assert capsys.readouterr().out == f"{said} {{'epochs': '2'}}\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--hidden-size", "8"], ["-- --hidden-size 8"]),
        (["--hidden-size=8", "--seed", "3", "-v", "data"], ["--seed 3 -- --hidden-size=8 -v data"]),
        (["--seed", "8", "--hidden-size", "8"], ["--seed 8 -- --hidden-size 8"]),
        (["--mixed-precision", "--note", "a b"], ["--mixed-precision -- --note 'a b'"]),
        (["data", "--", "more"], ["-- data more"]),
        (["--epoch", "5"], ["--epochs 5", "-- --epoch 5"]),
        (
            ["--epoch=5", "--hidden-size", "8"],
            ["--epochs=5 -- --hidden-size 8", "-- --epoch=5 --hidden-size 8"],
        ),
        (["--batch_size", "5"], ["--batch-size 5", "-- --batch_size 5"]),
        (["--bf16"], ["--mixed-precision bf16", "-- --bf16"]),
        (["--drop-last", "true"], ["--set data.drop_last=true", "-- --drop-last true"]),
        (["--per-device-train-batch-size", "4"], ["--batch-size 4", "-- --per-device-train-batch-size 4"]),
    ],
)
def test_an_unknown_argument_is_an_error_with_the_corrected_line(
    words: list[str], line: list[str], refused: Refused
) -> None:
    error = refused("train", "--script", "x.py", *words)
    assert "unknown argument" in error
    assert lines(error) == [["train", "--script", "x.py", *shlex.split(end)] for end in line]


def test_the_corrected_line_works(refused: Refused, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = lines(refused("train", "--hidden-size", "8", "--script", "x.py", "--seed", "8"))
    assert main(line) == 0
    assert capsys.readouterr().out == "['--hidden-size', '8'] {'seed': '8'}\n"


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--lr", "0.5"], "learning_rate", 0.5),
        (["--nproc-per-node", "2"], "gpus_per_node", 2),
        (["--gpus", "2"], "num_gpus", 2),
        (["--precision", "bf16"], "mixed_precision", "bf16"),
        (["--strategy", "fsdp"], "backend", "fsdp"),
        (["--max-epochs", "9"], "epochs", 9),
        (["--num-epochs=9"], "epochs", 9),
    ],
)
@pytest.mark.parametrize("verb", [["train"], ["config", "show"]])
def test_an_alias_sets_the_field(verb: list[str], words: list[str], name: str, value: Any) -> None:
    config = config_of(*verb, *words)
    assert getattr(config, name) == value
    assert config.origin(name) == "flag"


def test_ranks_per_node_are_per_node() -> None:
    words = ["--nproc-per-node", "4", "--num-nodes", "2"]
    assert config_of("train", *words).num_ranks == 8


@pytest.mark.parametrize("nodes", [["--num-nodes", "2"], ["--nnodes", "1:2"], ["--set", "num_nodes=2"]])
def test_gpus_is_refused_where_it_may_mean_each_host_or_all(nodes: list[str], refused: Refused) -> None:
    error = refused("train", "--script", "x.py", "--gpus", "4", *nodes)
    assert "--gpus: " in error
    assert "--gpus-per-node" in error
    assert "--num-gpus" in error


def test_values_of_an_alias_are_the_fields_own(refused: Refused) -> None:
    assert "Got '16-mixed'. Allowed: " in refused("train", "--script", "x.py", "--precision", "16-mixed")


def test_the_same_rule_holds_for_tune(refused: Refused) -> None:
    tune = ["tune", "--config", "tune.yaml", "--script", "x.py"]
    assert lines(refused(*tune, "--hidden-size", "8")) == [[*tune, "--", "--hidden-size", "8"]]
    assert lines(refused(*tune, "--num-sample=8", "--", "-v")) == [
        [*tune, "--num-samples=8", "--", "-v"],
        [*tune, "--", "--num-sample=8", "-v"],
    ]
    assert lines(refused(*tune, "--batch-size", "8"))[0] == [*tune, "--set", "batch_size=8"]


def test_the_same_rule_holds_for_a_script_on_every_rank(refused: Refused) -> None:
    words = ["train", "--script", "x.py", "--launch", "per-rank", "--num-processes", "2"]
    assert lines(refused(*words, "--hidden-size", "8")) == [[*words, "--", "--hidden-size", "8"]]
    # A flag of ours that no Trainer would read: it may be meant for the script.
    error = refused(*words, "--lr", "1", "--epochs=3", "--", "more")
    assert "would be ignored: epochs, learning_rate" in error
    assert lines(error) == [[*words, "--", "--lr", "1", "--epochs=3", "more"]]
    # What --set sets is not written as an argument of a script.
    assert lines(refused(*words, "--set", "epochs=3")) == []
    Path("run.yaml").write_text("launch: per-rank\nnum_processes: 2\n")
    words = ["train", "--script", "x.py", "--config", "run.yaml"]
    assert lines(refused(*words, "--hidden-size", "8")) == [[*words, "--", "--hidden-size", "8"]]


def test_without_a_script_there_is_nothing_behind_the_dashes_to_propose(refused: Refused) -> None:
    error = refused("train", "--hidden-size", "8")
    assert "unknown arguments --hidden-size 8" in error
    assert lines(error) == [["train", "--help"]]
    assert "Did you mean '--mixed-precision bf16'?" in refused("train", "--bf16")


@pytest.mark.parametrize("flag", ["--local_rank=1", "--local-rank=1"])
def test_the_rank_that_a_launcher_puts_first_is_dropped(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main([flag, "train", "--script", "x.py"]) == 0
    assert capsys.readouterr().out == "[] {}\n"


@pytest.mark.parametrize("verb", ["train", "tune"])
def test_the_help_states_the_rule(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "[-- arguments of the script]" in out
    assert "Arguments after `--` are passed to the script" in out
    assert "unknown argument before `--` is an error" in out


@pytest.mark.parametrize(
    ("code", "hinted"),
    [
        ("import os; os.environ['LOCAL_RANK']", True),
        ("import torch.distributed as dist; dist.init_process_group('gloo')", True),
        ("raise KeyError('labels')", False),
        ("raise ValueError('RANK is a column')", False),
        ("from distributed.config.script_overlay import active\nactive().num_fits += 1\n{}['RANK']", False),
    ],
)
def test_a_script_for_another_launcher_is_told_how_to_start_it(
    code: str,
    hinted: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    (folder / "ddp.py").write_text(code)
    assert main(["train", "--script", "ddp.py"]) == 1
    error = capsys.readouterr().err
    assert "Error: " in error
    assert ("`--launch per-rank` starts the script itself on every rank" in error) == hinted


def test_an_error_without_a_key_comes_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "ddp.py").write_text("raise KeyError")
    assert main(["train", "--script", "ddp.py"]) == 1
    assert capsys.readouterr().err.endswith("KeyError\n")
