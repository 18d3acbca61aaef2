"""The rendered batch script does what its exit codes say, in a real bash with Slurm's commands recorded.

What Slurm itself makes of it needs a Slurm: see the cluster tests.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.operations.deploy.rendering import beside_python, render

RUN = {"num_nodes": 2, "gpus_per_node": 4, "checkpoint_dir": "checkpoints"}
# Each command of Slurm's writes its arguments, NUL after each, and srun what it was started with.
STUBS = {
    "srun": """
printf '%s\\0' "$@" > srun.args; env -0 > srun.env
echo started > started
for _ in $(seq "${WAIT:-0}"); do if [ -e told ]; then break; fi; read -t 0.1 -r _ <> nothing; done
exit "${CODE:-0}" """,
    "scontrol": """
if [ "$1" = show ]; then printf 'node7\\nnode8\\n'; else printf '%s\\0' "$@" > scontrol.args; fi""",
    "scancel": """printf '%s\\0' "$@" > scancel.args; touch told""",
    "squeue": """echo "${STATE:-RUNNING}" """,
    "the python": """echo "$@" """,
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in STUBS.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    os.mkfifo(tmp_path / "nothing")
    return tmp_path


def write(place: Path, config: Mapping[str, Any], settings: Mapping[str, Any], **more: Any) -> Path:
    rendered = render("slurm", config, {"python": "the python", **settings}, **more)
    (place / "out").mkdir(exist_ok=True)
    for name, text in rendered.files.items():
        (place / "out" / name).write_bytes(text.encode())
    return place / "out" / "train.sbatch"


def start(place: Path, script: Path, **env: str) -> subprocess.Popen[str]:
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    slurm = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2"}
    return subprocess.Popen(
        ["bash", str(script)],
        cwd=place,
        env={"PATH": path, **slurm, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(place: Path, script: Path, **env: str) -> tuple[int, str]:
    process = start(place, script, **env)
    output, _ = process.communicate(timeout=30)
    return process.returncode, output


def arguments(place: Path, name: str) -> list[str] | None:
    path = place / f"{name}.args"
    return path.read_text().split("\0")[:-1] if path.exists() else None


def test_torchrun_is_told_everything(place: Path) -> None:
    script = place / "my train.py"
    script.write_text("")
    config = {**RUN, "elastic": {"max_restarts": 2}}
    path = write(place, config, {"cpus_per_task": 8, "env": ["A=b"]}, script=script, arguments=["--lr", "1"])
    assert run(place, path) == (0, "-m distributed.cli --version\n")
    assert arguments(place, "srun") == [
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=8",
        "--kill-on-bad-exit=0",
        "--wait=60",
        *("the python", "-m", "distributed.torchrun", "--nnodes=2", "--nproc-per-node=4", "--max-restarts=2"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=node7:22345", "--rdzv-id=12345-0"),
        *("-m", "distributed.cli", "train", "--config", "out/run.yaml", "--script", str(script)),
        *("--resume", "--", "--lr", "1"),
    ]
    env = (place / "srun.env").read_text().split("\0")
    assert {"A=b", "OMP_NUM_THREADS=2"} <= set(env)
    assert arguments(place, "scontrol") is None
    config = yaml.safe_load((place / "out" / "run.yaml").read_text())
    assert config == {**RUN, "device": "cuda"}


@pytest.mark.parametrize(
    ("code", "state", "restarts", "requeued"),
    [
        ("75", "RUNNING", "", True),
        ("75", "RUNNING", "99", True),
        ("75", "RUNNING", "100", False),  # often enough
        ("75", "COMPLETING", "", False),  # scancel
        ("0", "RUNNING", "", False),
        ("1", "RUNNING", "", False),
        ("2", "RUNNING", "3", False),
        ("138", "RUNNING", "", False),  # a signal that nobody announced
    ],
)
def test_75_requeues_and_nothing_else(
    place: Path, code: str, state: str, restarts: str, requeued: bool
) -> None:
    env = {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    status, _ = run(place, write(place, RUN, {}), CODE=code, STATE=state, **env)
    assert status == int(code)
    assert arguments(place, "scontrol") == (["requeue", "12345"] if requeued else None)


def test_without_requeueing_75_is_an_end(place: Path) -> None:
    path = write(place, {"num_processes": 2}, {"requeue": False})
    assert run(place, path, CODE="75")[0] == 75
    assert arguments(place, "scontrol") is None
    assert "--resume" not in (arguments(place, "srun") or [])
    assert "#SBATCH --no-requeue" in path.read_text()


def _send(process: subprocess.Popen[str], place: Path, number: signal.Signals) -> None:
    while not (place / "started").exists():
        assert process.poll() is None
    process.send_signal(number)


@pytest.mark.parametrize("code", ["75", "138"])
def test_the_warning_reaches_the_step_and_the_script_waits_for_it(place: Path, code: str) -> None:
    process = start(place, write(place, RUN, {}), CODE=code, WAIT="200")
    _send(process, place, signal.SIGUSR1)
    process.communicate(timeout=30)
    assert arguments(place, "scancel") == ["--signal=USR1", "12345"]
    assert process.returncode == 75
    assert arguments(place, "scontrol") == ["requeue", "12345"]


@pytest.mark.parametrize("moment", ["srun", "step=$!"])
def test_a_warning_while_the_step_starts_reaches_it(place: Path, moment: str) -> None:
    """Bash runs the trap for a signal between any two commands."""
    warn = 'case "$BASH_COMMAND" in "$moment"*) moment=none; kill -USR1 $$; esac'
    path = write(place, RUN, {"setup": [f"moment={shlex.quote(moment)}", f"trap {shlex.quote(warn)} DEBUG"]})
    status, _ = run(place, path, CODE="75", WAIT="200")
    assert arguments(place, "scancel") == ["--signal=USR1", "12345"]
    assert status == 75


def test_sigterm_is_waited_out(place: Path) -> None:
    process = start(place, write(place, RUN, {}), CODE="75", WAIT="200")
    _send(process, place, signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=0.5)
    (place / "told").touch()
    process.communicate(timeout=30)
    assert process.returncode == 75


def test_a_warning_before_the_start_starts_nothing(place: Path) -> None:
    settings = {"setup": ["kill -USR1 $$"]}
    status, _ = run(place, write(place, RUN, settings))
    assert status == 75
    assert arguments(place, "srun") is None
    assert arguments(place, "scontrol") == ["requeue", "12345"]


def test_the_wrong_folder_is_named(place: Path) -> None:
    path = write(place, RUN, {})
    (place / "out" / "run.yaml").unlink()
    status, output = run(place, path)
    assert status == 2
    assert "out/run.yaml is not there" in output
    assert arguments(place, "srun") is None


def test_a_python_without_us_is_named(place: Path) -> None:
    (place / "bin" / "the python").write_text("#!/bin/bash\nexit 1\n")
    status, output = run(place, write(place, RUN, {}))
    assert status == 2
    assert "the python has no distributed-trainer here" in output


def test_a_ray_cluster_is_the_jobs_own(place: Path) -> None:
    """The nodes first, the driver on the first of them; the token is this user's alone, and goes."""
    token = place / ".ray-token-12345-0"
    (place / "bin" / "the python").write_text('#!/bin/bash\nif [ "$1" = -c ]; then printf secret; fi\n')
    (place / "bin" / "srun").write_text(
        '#!/bin/bash\nname=driver; for word; do if [ "$word" = start ]; then name=nodes; fi; done\n'
        f'printf \'%s\\0\' "$@" > "$name.args"; env -0 > "$name.env"; stat -c %a {token} > mode\n'
        "if [ $name = nodes ]; then exec sleep 60; fi; while [ ! -e nodes.args ]; do :; done; exit 75\n"
    )
    path = write(place, {**RUN, "backend": "ray", "elastic": {"max_restarts": 1}}, {"cpus_per_task": 8})
    status, output = run(place, path)
    assert (status, arguments(place, "scontrol")) == (75, ["requeue", "12345"]), output
    nodes, driver = arguments(place, "nodes") or [], arguments(place, "driver") or []
    assert nodes[-5:] == ["start", "--meet=node7", "--port=22345", "--num-gpus=4", "--num-cpus=8"]
    assert "--nodelist=node7" in driver
    assert driver[driver.index("run") :][:5] == ["run", "--meet=node7", "--port=22345", "--num-nodes=2", "--"]
    assert driver[-5:] == ["distributed.cli", "train", "--config", "out/run.yaml", "--resume"]
    assert f"RAY_AUTH_TOKEN_PATH={token}" in (place / "driver.env").read_text().split("\0")
    assert (place / "mode").read_text().strip() == "600"
    assert not token.exists()
    config = yaml.safe_load((place / "out" / "run.yaml").read_text())
    assert config["elastic"] == {"max_restarts": 1}


def directives(text: str) -> dict[str, str]:
    words = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def test_the_header_asks_for_what_was_said() -> None:
    settings = {
        "name": "digits",
        "partition": "gpu,big",
        "account": "team",
        "qos": "high",
        "constraint": "a100&nvlink",
        "time": "1-02:00:00",
        "cpus_per_task": 32,
        "mem": "200G",
        "warning": 300,
        "option": ["exclusive"],
    }
    text = render("slurm", RUN, settings).files["digits.sbatch"]
    assert directives(text) == {
        "job-name": "digits",
        "partition": "gpu,big",
        "account": "team",
        "qos": "high",
        "constraint": "a100&nvlink",
        "nodes": "2",
        "ntasks-per-node": "1",
        "gpus-per-node": "4",
        "cpus-per-task": "32",
        "mem": "200G",
        "time": "1-02:00:00",
        "signal": "B:USR1@300",
        "open-mode": "append",
        "output": "%x-%j.out",
        "requeue": "",
        "exclusive": "",
    }


@pytest.mark.parametrize(
    ("config", "settings", "expected"),
    [
        ({}, {"gpu_request": "gres"}, {"gres": "gpu:4"}),
        ({}, {"gpu_request": "gres", "gpu_type": "a100"}, {"gres": "gpu:a100:4"}),
        ({}, {"gpu_type": "h100"}, {"gpus-per-node": "h100:4"}),
        ({"device": "cpu"}, {}, {"cpus-per-task": "4"}),
        (
            {"num_nodes": 3, "gpus_per_node": None, "num_processes": 6},
            {},
            {"nodes": "3", "cpus-per-task": "2"},
        ),
        ({"gpus_per_node": None, "num_gpus": 16}, {}, {"gpus-per-node": "8"}),
        ({"elastic": {"min_nodes": 1}, "global_batch_size": 64}, {}, {"no-kill": "", "nodes": "2"}),
    ],
)
def test_resources_follow_from_the_configuration(
    config: dict[str, Any], settings: dict[str, Any], expected: dict[str, str]
) -> None:
    found = directives(render("slurm", {**RUN, **config}, settings).files["train.sbatch"])
    asked = {name: found.get(name) for name in expected}
    assert asked == expected
    assert ("gres" in found) + ("gpus-per-node" in found) == ("cpus-per-task" not in found)


@pytest.mark.parametrize(
    "config",
    [
        RUN,
        {**RUN, "elastic": {"min_nodes": 1}, "global_batch_size": 64},
        {**RUN, "backend": "ray"},
        {**RUN, "backend": "horovod"},
        {**RUN, "backend": "tensorflow"},
        {**RUN, "zero_stage": 2},
    ],
    ids=["ddp", "elastic", "ray", "horovod", "tensorflow", "zero"],
)
def test_every_script_is_clean_shell(config: dict[str, Any], tmp_path: Path) -> None:
    settings = {"setup": ["module load cuda", "source venv/bin/activate"], "env": ["A=$(id) 'x'"]}
    for number, more in enumerate(({}, {"requeue": False})):
        path = tmp_path / f"{number}.sh"
        path.write_text(
            render("slurm", config, {**settings, **more}, arguments=["$(x)"]).files["train.sbatch"]
        )
        done = subprocess.run([beside_python("shellcheck"), str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        assert subprocess.run(["bash", "-n", str(path)]).returncode == 0


Change = Callable[[str], str]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace('"$SLURM_NNODES"', "$SLURM_NNODES"),
        lambda text: text.replace('"$meet:$port"', "$meet:$port"),
        lambda text: text.replace('[ "$code" -eq 75 ]', '[ "$code" == 75 '),
    ],
)
def test_shellcheck_would_say_so(spoil: Change, tmp_path: Path) -> None:
    path = tmp_path / "spoilt.sh"
    path.write_text(spoil(render("slurm", RUN).files["train.sbatch"]))
    assert subprocess.run([beside_python("shellcheck"), str(path)], capture_output=True).returncode == 1
