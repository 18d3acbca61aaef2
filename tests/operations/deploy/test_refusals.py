"""What no cluster could run is refused in words, before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distributed.cli import main
from distributed.errors import UserError
from tests.operations.deploy.rendering import render

RUN = {"num_nodes": 2, "gpus_per_node": 4, "checkpoint_dir": "checkpoints"}
ELASTIC = {"elastic": {"min_nodes": 1}, "global_batch_size": 64}
RAY = {"backend": "ray", "checkpoint_dir": "/c"}
HEAD = {"dashboard": "http://head:8265"}
NEW = {"host": ["a", "b"], "ssh_user": "me"}
TOKEN = "0123456789abcdefghij"


@pytest.mark.parametrize(
    ("target", "config", "settings", "words"),
    [
        # Resources
        ("slurm", {"gpus_per_node": None}, {}, "number of ranks to request from the cluster is not set"),
        ("kubernetes", {"gpus_per_node": None}, {}, "--gpus-per-node N"),
        ("slurm", {"gpus_per_node": None, "num_gpus": 7}, {}, "cannot be spread evenly"),
        ("slurm", {"launch": "spawn", "rdzv_endpoint": "a:1"}, {}, "the cluster starts the ranks"),
        ("slurm", {"elastic": {"min_ranks": 4}}, {}, "elastic.min_nodes"),
        ("slurm", {"elastic": {"min_nodes": 1}}, {}, "the global batch would shrink"),
        (
            "slurm",
            {**ELASTIC, "num_nodes": 3, "global_batch_size": 96 * 2, "batch_size": 16},
            {},
            "2 of 3 hosts",
        ),
        ("slurm", {"global_batch_size": 63}, {}, "cannot be split evenly"),
        (
            "slurm",
            {"backend": "deepspeed", "find_unused_parameters": True},
            {},
            "cannot find unused parameters",
        ),
        (
            "slurm",
            {"backend": "tensorflow", "num_nodes": 1, "tensorflow": {"strategy": "mirrored"}},
            {},
            "one process",
        ),
        # Going on
        ("slurm", {"checkpoint_dir": None}, {}, "--no-requeue"),
        ("kubernetes", {"checkpoint_dir": None}, {}, "--retries 0"),
        ("slurm", {"resume_from_checkpoint": "other"}, {}, "from that checkpoint each time"),
        ("ray", {**RAY, "checkpoint_dir": "checkpoints"}, HEAD, "the job's own folder is deleted with it"),
        # Slurm's own
        ("slurm", {}, {"name": "a b"}, "letters, digits"),
        ("slurm", {}, {"name": "x" * 64}, "at most 63"),
        ("slurm", {}, {"partition": "gpu;rm"}, "not accepted by Slurm"),
        ("slurm", {}, {"constraint": "a b"}, "not accepted by Slurm"),
        ("slurm", {}, {"time": "-5"}, "not a time limit"),
        ("slurm", {}, {"time": "0"}, "'0' is zero"),
        ("slurm", {}, {"time": "1:2:3:4"}, "not a time limit"),
        ("slurm", {}, {"time": "3"}, "leaves no time to train"),
        ("slurm", {}, {"time": "1:00:00", "warning": "3600"}, "leaves no time to train"),
        ("slurm", {}, {"mem": "64GB"}, "not an amount of memory"),
        ("slurm", {}, {"mem": "-1G"}, "not an amount of memory"),
        ("slurm", {}, {"cpus_per_task": "0"}, "above 0"),
        ("slurm", {}, {"option": ["array=1-9"]}, "set by the template"),
        ("slurm", {}, {"option": ["comment=a b"]}, "not an option of sbatch"),
        ("slurm", {}, {"setup": ["a\rb"]}, "carriage return"),
        ("slurm", {}, {"gpu_request": "gpus"}, "gpus-per-node, gres"),
        # Kubernetes' own
        ("kubernetes", {}, {"name": "Train"}, "lower-case"),
        ("kubernetes", {}, {"name": "1st"}, "must start with a letter"),
        ("kubernetes", {}, {"name": "x" * 41}, "at most 40"),
        ("kubernetes", {}, {"name": "a.b"}, "lower-case"),
        ("kubernetes", {}, {"namespace": "My_Space"}, "lower-case"),
        ("kubernetes", {}, {"image": None}, "deploy docker"),
        ("kubernetes", {}, {"image": "a b"}, "not an image"),
        ("kubernetes", {}, {"memory": "64GB"}, "not an amount of memory"),
        ("kubernetes", {}, {"memory": "1Gi", "shm": "2Gi"}, "counts against it"),
        ("kubernetes", {}, {"cpus": "-2"}, "not a number of CPUs"),
        ("kubernetes", {}, {"cpus": "many"}, "not a number of CPUs"),
        ("kubernetes", {}, {"gpu_resource": "gpu"}, "nvidia.com/gpu"),
        ("kubernetes", {}, {"run_as_user": "0"}, "above 0"),
        ("kubernetes", {}, {"kind": "rayjob"}, "cannot run backend 'pytorch-ddp'"),
        ("kubernetes", RAY, {"kind": "job"}, "cannot run backend 'ray'"),
        ("kubernetes", ELASTIC, {"kind": "trainjob"}, "a fixed number of nodes"),
        (
            "kubernetes",
            {"backend": "horovod", "elastic": {"max_restarts": 1}},
            {},
            "does not restart ranks",
        ),
        ("kubernetes", {"checkpoint_dir": "/"}, {}, "no volume can be mounted"),
        ("kubernetes", {"checkpoint_dir": "../up"}, {}, None),
        ("kubernetes", {"checkpoint_dir": "."}, {}, "no volume can be mounted"),
        ("kubernetes", {"checkpoint_dir": "/config/run"}, {}, "no volume can be mounted"),
        # Docker's and Ray's own
        ("docker", {}, {"base": "python"}, "has no tag"),
        ("docker", {}, {"package": ["timm; rm -rf /"]}, "not a requirement"),
        ("docker", {}, {"constraints": "nowhere.txt"}, "cannot read the file"),
        ("ray", {}, HEAD, "is deployed as 'torchrun'"),
        ("ray", RAY, {}, "exactly one of dashboard"),
        ("ray", RAY, {**HEAD, "host": ["a"], "ssh_user": "me"}, "exactly one of dashboard"),
        ("ray", RAY, {"host": ["a", "b"]}, "ssh_user is missing"),
        ("ray", RAY, {"host": ["a"], "ssh_user": "me"}, "has 1 hosts"),
        ("ray", RAY, {"host": ["-oProxyCommand=x"], "ssh_user": "me"}, "not a host name"),
        ("ray", RAY, {**HEAD, "env": ["A=${HOME}"]}, "Ray replaces"),
        # Secrets
        ("slurm", {}, {"env": ["WANDB_API_KEY=x"]}, "Export it in the shell"),
        ("kubernetes", {}, {"env": ["HF_TOKEN=x"]}, "--env-from-secret NAME"),
        ("kubernetes", {}, {"env": ["DB=postgres://me:pw@host/x"]}, "--env-from-secret NAME"),
        ("kubernetes", {}, {"env": ["db_password=x"]}, "looks like a secret"),
        ("slurm", {"tracking": {"mlflow_tracking_uri": "http://me:pw@host"}}, {}, "contains a password"),
        ("slurm", {"fsdp": {"block_classes": ["x", "http://me:pw@host"]}}, {}, "contains a password"),
        ("slurm", {}, {"env": [f"PIP=git+https://ghp_{TOKEN}@github.com/a/b"]}, "looks like a secret"),
        ("slurm", {}, {"setup": [f"pip install git+https://me:{TOKEN}@github.com/a/b"]}, "Export it in"),
        ("slurm", {}, {"setup": [f"pip install git+https://{TOKEN}@github.com/a/b"]}, "write $NAME"),
        ("slurm", {}, {"setup": ["x", "export A=1 HF_TOKEN='abc'"]}, "setup contains a line with a secret"),
        ("ray", RAY, {**NEW, "setup": [f"git clone https://me:{TOKEN}@host/a"]}, "where the nodes start"),
        ("slurm", {}, {"setup": [f"wandb login {'0a' * 20}"]}, "setup contains a line with a secret"),
        (
            "slurm",
            {},
            {"setup": ["huggingface-cli login --token abc"]},
            "setup contains a line with a secret",
        ),
        ("slurm", {}, {"setup": ["mysql --user=me --password='x'"]}, "setup contains a line with a secret"),
        (
            "slurm",
            {},
            {"setup": ["curl -H 'Authorization: Bearer x' h"]},
            "setup contains a line with a secret",
        ),
        ("slurm", {}, {"setup": [f"echo AKIA{'X' * 16} > ~/.aws/x"]}, "setup contains a line with a secret"),
        ("slurm", {}, {"setup": ["export TOKEN=${TOKEN:-abc}"]}, "setup contains a line with a secret"),
        *(
            ("slurm", {}, {"env": [f"{name}=x"]}, "looks like a secret")
            for name in ("PGPASSWORD", "DBPASS", "ACCESSTOKEN", "SMTP_PASS", "apikey", "MYSQL_PWD")
        ),
        *(
            ("slurm", {"tracking": {"mlflow_tracking_uri": uri}}, {}, "contains a password")
            for uri in (
                *(
                    "https://me:pa/ss@host",
                    "https://me:p@ss@host",
                    "me:pw@host/db",
                    "sqlite:///x?access_token=abc",
                ),
                *(
                    "postgresql+psycopg2://me:pw@h/db",
                    "https://host/?token=abc",
                    "s3://key:sec/ret@bucket/run",
                ),
            )
        ),
        ("slurm", {"deepspeed_config": {"comet": {"api_key": "x"}}}, {}, "contains a password"),
        ("slurm", {}, {"setup": ["DBPASS=x psql"]}, "setup contains a line with a secret"),
        (
            "slurm",
            {},
            {"setup": ["curl https://host/?access_token=abc"]},
            "setup contains a line with a secret",
        ),
        ("kubernetes", {}, {"env": ["1A=x"]}, "not a valid variable name"),
        ("kubernetes", {}, {"env": ["A"]}, "has no '='"),
        ("slurm", {}, {"env": ["A=\0"]}, "NUL"),
        ("slurm", {}, {"env": ["A=\udc80"]}, "not valid Unicode"),
    ],
)
def test_refused(target: str, config: dict[str, Any], settings: dict[str, Any], words: str | None) -> None:
    if words is None:
        assert "/up" in render(target, {**RUN, **config}, settings).files["job.yaml"]
        return
    with pytest.raises(UserError) as caught:
        render(target, {**RUN, **config}, settings)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "SSH_KEY_FILE", "MAX_TOKENS", "MONKEY", "PYTHONHASHSEED"]
)
def test_what_only_sounds_like_a_secret_is_taken(name: str) -> None:
    assert f"export {name}=1\n" in render("slurm", RUN, {"env": [f"{name}=1"]}).files["train.sbatch"]


@pytest.mark.parametrize(
    "line",
    [
        "pip install git+https://me:$TOKEN@github.com/a/b git+https://${GITHUB_TOKEN}@github.com/a/c",
        'export HF_TOKEN="$(cat ~/.hf/token)" SSH_KEY_FILE=~/.ssh/key',
        "git clone git@github.com:a/b && git clone ssh://git@host/a && git clone https://me@host/a",
        "pip install 'git+ssh://git@github.com/a/b@0123456789abcdef0123456789abcdef01234567'",
        "pip install https://host/a/b@0123456789abcdef0123456789abcdef01234567#egg=x --key=1",
        "export HF_TOKEN=`cat ~/.hf` A_TOKEN=$(cat $(pwd)/x) SSH_AUTH_SOCK=/run/x HF_HOME=$HOME/hf",
        "pip install hf_transfer && export HF_HUB_ENABLE_HF_TRANSFER=1 TOKENIZERS_PARALLELISM=false",
        'wandb login "$WANDB_API_KEY" && x --token $T --api-key="$K" -H "Bearer $T"',
    ],
)
def test_a_setup_line_that_holds_no_secret_is_taken(line: str) -> None:
    assert line in render("slurm", RUN, {"setup": [line]}).files["train.sbatch"].splitlines()


def test_a_script_too_large_for_a_config_map(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("\n" * 130_000)  # two bytes each, as JSON
    with pytest.raises(UserError, match="`kubectl apply` accepts at most 250,000"):
        render("kubernetes", RUN, script=script)
    script.write_text("#" * 249_000)
    render("kubernetes", RUN, script=script)


def test_an_argument_that_no_file_can_hold() -> None:
    with pytest.raises(UserError, match="NUL"):
        render("slurm", RUN, arguments=["a\0b"])


FLAGS = ["--num-processes", "2", "--checkpoint-dir", "c"]


def test_files_that_exist_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["deploy", "slurm", "--output", "out", *FLAGS]) == 0
    assert "submit with: sbatch out/train.sbatch" in capsys.readouterr().out
    (tmp_path / "out" / "run.yaml").write_text("mine")
    (tmp_path / "out" / "train.sbatch").unlink()
    assert main(["deploy", "slurm", "--output", "out", *FLAGS]) == 2
    assert "out/run.yaml already exists; nothing was written" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run.yaml"]
    assert main(["deploy", "slurm", "--output", "out", "--force", *FLAGS]) == 0
    assert (tmp_path / "out" / "run.yaml").read_text() != "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slurm", "--time", "1"], "leaves no time to train"),
        (["slurm", "--partitoin", "x"], "Did you mean '--partition'?"),
        (["slurm", "--script", "nowhere.py"], "no such file"),
        (["slurm", "--settings", "site.yaml", "--force"], "Did you mean 'partition'?"),
        (["cloud"], "invalid choice"),
        (["ray", "--backend", "ray"], "exactly one of dashboard"),
    ],
)
def test_refusals_write_nothing(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.yaml").write_text("partitoin: gpu\n")
    assert main(["deploy", *words, "--output", "out", *FLAGS]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_settings_come_from_a_file_and_flags_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.yaml").write_text(
        "partition: gpu\naccount: team\nenv: {A: true, B: 1}\nsetup: [module load x]\n"
    )
    words = ["deploy", "slurm", "--settings", "site.yaml", "--account", "other", "--output", "out", *FLAGS]
    assert main(words) == 0
    text = (tmp_path / "out" / "train.sbatch").read_text()
    for line in (
        "#SBATCH --partition=gpu",
        "#SBATCH --account=other",
        "export A=true",
        "export B=1",
        "module load x",
    ):
        assert f"{line}\n" in text


def test_a_folder_that_cannot_be_written_to_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["deploy", "slurm", "--output", str(tmp_path / "file" / "out"), *FLAGS]) == 2
    assert "cannot write there" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--db", "postgresql://me:pw@host/x"],
        ["--db", "https://me:pa/ss@host"],
        ["--password", "hunter2"],
        ["--access-token=abc"],
        ["DBPASS=abc"],
        ["--key", "AKIAABCDEFGHIJKLMNOP"],
    ],
)
def test_a_password_among_the_scripts_arguments_is_refused(words: list[str]) -> None:
    with pytest.raises(UserError, match="an argument contains a password"):
        render("slurm", RUN, arguments=words)


def test_arguments_without_a_password_are_taken() -> None:
    words = ["--tokenizer", "gpt2", "--max-tokens", "5", "--password-file", "/run/x", "--token", "$TOKEN"]
    assert "gpt2" in render("slurm", RUN, arguments=words).files["train.sbatch"]
