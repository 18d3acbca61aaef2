"""The command line: exit codes, words, flags made from the schema, and scripts run as python would."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.cli import build_parser, main
from distributed.commands import VERBS
from distributed.commands.flags import collect_layers
from distributed.commands.operations import OPERATIONS
from distributed.commands.parser import flags_of
from distributed.config import DistributedConfig, load_layers
from distributed.config.validation_errors import field_names
from tests.support import commands

# What a script does when it calls `fit`, as far as the command line can tell.
FIT = "from distributed.config.script_overlay import active\nrun = active()\nrun.num_fits += 1\n"

WriteScript = Callable[[str], str]


@pytest.fixture
def script(tmp_path: Path) -> WriteScript:
    def write(source: str) -> str:
        path = tmp_path / "train_it.py"
        path.write_text(source)
        return str(path)

    return write


def parse(*words: str) -> argparse.Namespace:
    return build_parser(words).parse_known_args(words)[0]


def layered(*words: str) -> DistributedConfig:
    return load_layers(collect_layers(parse("train", *words)))


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one paragraph on stderr of a command line that must exit with 2."""
    assert main(list(words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


# Help and verbs


@pytest.mark.parametrize("verb", [verb.name for verb in (*VERBS, *OPERATIONS)])
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    assert f"distributed.cli {verb}" in capsys.readouterr().out


def test_no_verb_prints_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(verb.name in out and verb.summary in out for verb in (*VERBS, *OPERATIONS))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["--verson"], "Did you mean '--version'?"),
        (["backends", "--jsn"], "Did you mean '--json'?"),
        (["doctor", "--", "x"], "unknown argument x"),
        (["config", "shwo"], "invalid choice: 'shwo'"),
        (["train", "--epoch", "3"], "Did you mean '--epochs'?"),
        (["train", "--epochs"], "expected one argument"),
        (
            ["train", "--epochs", "many"],
            "epochs: invalid value. Got 'many'. Allowed: a whole number at least 0.",
        ),
        (["train", "--device", "gpu"], "auto, cpu, cuda"),
        (["train", "--set", "data.verfy=1"], "Did you mean 'data.verify'?"),
        (["train", "--config", "/nowhere/run.yaml"], "/nowhere/run.yaml"),
        (["train", "--backend", "pytorch-dpp"], "no backend is called 'pytorch-dpp'"),
    ],
)
def test_a_mistake_is_one_paragraph_and_exit_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in error_of(capsys, *words)


# Flags from the schema


@pytest.mark.parametrize(
    ("words", "verb", "near"),
    [
        (["bench", "comm", "--iteration", "3"], "bench comm", "--iterations"),
        (["bench", "pipeline", "--microbatch", "3"], "bench pipeline", "--microbatches"),
        (["bench", "scaling", "--repeat", "3"], "bench scaling", "--repeats"),
        (["checkpoint", "show", "saved", "--jsonn"], "checkpoint show", "--json"),
        (["deploy", "slurm", "--output", "jobs", "--forced"], "deploy slurm", "--force"),
    ],
)
def test_an_unknown_flag_of_an_action_points_to_the_help_of_the_action(
    words: list[str], verb: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not to that of the verb around it, which lists other flags."""
    assert main(words) == 2
    error = capsys.readouterr().err
    assert f"Did you mean '{near}'?" in error
    assert f"`python -m distributed.cli {verb} --help` lists the flags" in error


@pytest.mark.parametrize("verb", ["train", "config"])
def test_every_flat_field_is_a_flag_with_its_description(verb: str) -> None:
    parser = parse(verb, "show").parser if verb == "config" else parse(verb).parser
    shown = re.sub(r"\s+", " ", parser.format_help().replace("-\n", "-"))
    for name in field_names(DistributedConfig):
        if "." not in name:
            assert f"--{name.replace('_', '-')}" in flags_of(parser)
            description = DistributedConfig.model_fields[name].description or ""
            # Help breaks lines after hyphens too.
            assert description.replace("- ", "-") in shown.replace("- ", "-")


def test_a_flag_not_given_says_nothing() -> None:
    assert layered().model_fields_set == set()


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--num-gpus", "4"], "num_gpus", 4),
        (["--learning-rate", "1e-3"], "learning_rate", 1e-3),
        (["--mixed-precision"], "mixed_precision", True),
        (["--mixed-precision", "bf16"], "mixed_precision", "bf16"),
        (["--mixed-precision", "false"], "mixed_precision", False),
        (["--no-mixed-precision"], "mixed_precision", False),
        (["--resume", "--checkpoint-dir", "c"], "resume_from_checkpoint", True),
        (["--resume", "c/step-8"], "resume_from_checkpoint", "c/step-8"),
        (["--resume-from-checkpoint", "c/step-8"], "resume_from_checkpoint", "c/step-8"),
        (["--no-gradient-as-bucket-view"], "gradient_as_bucket_view", False),
        (["--deterministic"], "deterministic", True),
        (["--mlflow"], "mlflow_tracking", True),
        (["--mlflow-experiment", "2024"], "tracking.mlflow_experiment", "2024"),
        (["--profile"], "profile.enabled", True),
        (["--launch", "per-rank"], "launch", "per-rank"),
        (["--seed=7", "--seed=9"], "seed", 9),
    ],
)
def test_flags_set_their_fields(words: list[str], name: str, value: Any) -> None:
    config: Any = layered(*words)
    origin = config.origin(name)
    for part in name.split("."):
        config = getattr(config, part)
    assert (config, origin) == (value, "flag")


def test_set_is_stronger_than_a_flag_and_a_flag_than_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("epochs: 1\nseed: 1\nbatch_size: 1\n")
    config = layered("--set", "epochs=3", "--config", str(file), "--epochs", "2", "--seed", "2")
    assert (config.epochs, config.seed, config.batch_size) == (3, 2, 1)
    assert [config.origin(name) for name in ("epochs", "seed", "batch_size")] == [
        "--set",
        "flag",
        f"file {file}",
    ]


# Running a script


@pytest.mark.starts_processes
def test_a_script_sees_what_python_would_show_it(script: WriteScript, tmp_path: Path) -> None:
    source = "import json, os, sys\nfacts = [sys.argv, sys.path[0], __name__, __file__]\n"
    source += "open(os.environ['FACTS'], 'w').write(json.dumps(facts))\n"
    path = script(source + FIT.replace("run.num_fits += 1", "run and setattr(run, 'num_fits', 1)"))
    facts = []
    for command in ([path], ["-m", "distributed.cli", "train", "--script", path, "--epochs", "2"]):
        environment = {**os.environ, "FACTS": str(tmp_path / f"facts-{len(facts)}")}
        behind = ["--"] if "train" in command else []
        words = [sys.executable, *command, *behind, "--data", "here", "more"]
        commands.run(words, env=environment, check=True, timeout=120)
        facts.append(json.loads(Path(environment["FACTS"]).read_text()))
    assert facts[0] == facts[1]
    assert facts[0][0][1:] == ["--data", "here", "more"]


def test_the_process_is_as_it_was_afterwards(script: WriteScript) -> None:
    before = (list(sys.argv), list(sys.path), sys.modules["__main__"])
    assert main(["train", "--script", script(FIT + "import sys\nsys.path.append('x')\n")]) == 0
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


def test_a_flag_that_is_nearly_ours_is_an_error_before_the_script_runs(
    script: WriteScript, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = tmp_path / "ran"
    path = script(FIT + f"open({str(ran)!r}, 'w')\n")
    for words, said in (
        (["--epoch=5"], "Did you mean '--epochs'?"),
        (["--batchsize", "5"], "Did you mean '--batch-size'?"),
        (["--epochs", "-5"], "epochs"),
        (["--backend", "nobody"], "nobody"),
    ):
        assert said in error_of(capsys, "train", "--script", path, *words)
    assert not ran.exists()


def test_values_that_the_script_may_complete_are_left_to_the_trainer(script: WriteScript) -> None:
    assert main(["train", "--script", script(FIT), "--resume"]) == 0
    assert main(["train", "--script", script(FIT), "--node-rank", "1"]) == 0


def test_the_script_is_told_of_a_dry_run(script: WriteScript, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(FIT + "print(run.dry_run)\n")
    assert main(["train", "--script", path, "--dry-run"]) == 0
    assert main(["train", "--script", path]) == 0
    assert capsys.readouterr().out == "True\nFalse\n"


def test_a_script_that_never_calls_fit_is_an_error_that_proposes_per_rank(
    script: WriteScript, capsys: pytest.CaptureFixture[str]
) -> None:
    said = error_of(capsys, "train", "--script", script("x = 1\n"))
    assert "train_it.py" in said
    assert "--launch per-rank" in said


def test_a_missing_script_names_the_nearest_file(
    script: WriteScript, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script(FIT)
    assert "Did you mean 'train_it.py'?" in error_of(
        capsys, "train", "--script", str(tmp_path / "train-it.py")
    )
    assert "is a directory" in error_of(capsys, "train", "--script", str(tmp_path))
    assert "no such directory" in error_of(capsys, "train", "--script", str(tmp_path / "absent" / "x.py"))


def test_a_dry_run_per_rank_says_what_it_would_start(
    script: WriteScript, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script("raise SystemExit('must not run')\n")
    words = ["--launch", "per-rank", "--num-processes", "3", "--dry-run", "--", "--lr", "1"]
    assert main(["train", "--script", path, *words]) == 0
    assert "train_it.py --lr 1 on every rank; ranks: 3" in capsys.readouterr().out


@pytest.mark.starts_processes
def test_per_rank_starts_the_script_itself_on_every_rank(
    script: WriteScript, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = "import os, sys\n"
    source += (
        f"open(os.path.join({str(tmp_path)!r}, os.environ['RANK']), 'w').write(' '.join(sys.argv[1:]))\n"
    )
    source += "sys.exit(3 if sys.argv[-1] == 'fail' and os.environ['RANK'] == '1' else 0)\n"
    command = [
        "train",
        "--script",
        script(source),
        "--launch",
        "per-rank",
        "--num-processes",
        "2",
        "--",
        "--lr",
        "1",
    ]
    assert main(command) == 0
    assert [(tmp_path / rank).read_text() for rank in ("0", "1")] == ["--lr 1", "--lr 1"]
    assert main([*command, "fail"]) == 1
    assert re.search(r"rank 1 .*code 3", capfd.readouterr().err)


def test_per_rank_refuses_a_flag_that_would_reach_nobody(
    script: WriteScript, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script("raise SystemExit('must not run')\n")
    words = ["--launch", "per-rank", "--epochs", "2", "--num-processes", "2"]
    said = error_of(capsys, "train", "--script", path, *words)
    assert "would be ignored: epochs" in said
    assert "num_processes" not in said


# How scripts end


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("from distributed import UserError\nraise UserError('no', field='x')", 2, "error: x: no.\n"),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
        (
            "from distributed import WorkerError\n"
            "raise WorkerError('rank 1 failed', rank=1, host='h', exc_type='E', worker_traceback='its own')",
            1,
            "rank 1 failed\n\nits own\n",
        ),
    ],
)
def test_failures_have_words_and_codes(
    source: str, code: int, said: str, script: WriteScript, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--script", script(source)]) == code
    assert capsys.readouterr().err == said


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    "source", ["def f():\n    return 1 / 0\n\nf()\n", "x = (\n", "import a_module_nobody_has\n"]
)
def test_a_scripts_exception_prints_as_python_prints_it(
    source: str, script: WriteScript, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(source)
    plain = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60)
    assert main(["train", "--script", path]) == plain.returncode == 1
    assert capsys.readouterr().err == plain.stderr


@pytest.mark.parametrize("code", [0, 3, 75])
def test_a_scripts_exit_code_passes_through(code: int, script: WriteScript) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--script", script(f"raise SystemExit({code})")])
    assert caught.value.code == code


# Other verbs


def test_config_explains_where_values_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "--epochs", "4", "--set", "data.verify=false"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:3] for line in lines if line.strip()}
    assert rows["epochs"] == ["4", "flag"]
    assert rows["data.verify"] == ["false", "--set"]
    assert rows["seed"] == ["0", "default"]
    assert set(field_names(DistributedConfig)) <= set(rows)


def test_config_lists_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "fields"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert set(field_names(DistributedConfig)) <= set(rows)
    assert re.search(r"epochs\s+a whole number at least 0\s+1\s+Number of passes over", rows["epochs"])


def test_config_shows_yaml_that_loads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--epochs", "4", "--set", "data.verify=false", "--mixed-precision", "bf16"]
    assert main(["config", "show", *words]) == 0
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    again = layered("--config", str(tmp_path / "run.yaml"))
    assert again.model_dump() == layered(*words).model_dump()
