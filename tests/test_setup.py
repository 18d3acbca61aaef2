"""The set-up: each step prints its seconds, shows why it fails, and is done once for the same pins."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STEP = ROOT / "tests" / "support" / "step.sh"

STAMPS = (
    ".pip",
    ".torch",
    ".for-demo",
    ".for-docs",
    ".for-dev",
    ".for-horovod",
    ".horovod-wheel",
    ".horovod",
)
STEPS_OF_TEST = [
    "environment",
    "pip",
    "torch",
    "what Horovod is built with",
    "every backend and the development tools",
    "Horovod's wheel",
    "Horovod",
]


def step(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(STEP), *words], capture_output=True, text=True, check=False)


def test_a_step_prints_its_seconds() -> None:
    done = step("a name", "sh", "-c", "echo shown")
    assert done.returncode == 0
    assert re.fullmatch(r"set-up: a name \.\.\.\nshown\nset-up: a name \d+ s\n", done.stdout)


def test_a_step_that_fails_shows_its_output_and_keeps_its_exit_code() -> None:
    done = step("a name", "sh", "-c", "echo why >&2; exit 3")
    assert done.returncode == 3
    assert re.match(r"why\nset-up: a name failed after \d+ s with exit code 3: sh -c", done.stderr)


@pytest.mark.starts_processes
def test_an_installation_that_fails_shows_the_compilers_words(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text("raise SystemExit('no such header: broken.h')\n")
    (tmp_path / "pyproject.toml").write_text(
        "[build-system]\nrequires = []\nbuild-backend = 'setuptools.build_meta'\n"
    )
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-build-isolation"]
    done = step("broken", *pip, "--no-deps", "--target", str(tmp_path / "site"), str(tmp_path))
    assert done.returncode == 1
    assert "no such header: broken.h" in done.stderr + done.stdout


# The stamps


def planned(checkout: Path, goal: str) -> list[str]:
    """Names of the steps that `make goal` would run in `checkout`, each once, in their order."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--dry-run", goal]
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, check=True)
    # A dry run lists twice what two makes would do of which the first does it.
    found = re.findall(r"step\.sh (?:\"([^\"]+)\"|(\S+))", done.stdout)
    return list(dict.fromkeys(quoted or bare for quoted, bare in found))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout without an environment, whose files are an hour old."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "deploy/horovod/build.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
        os.utime(tmp_path / name, (time.time() - 3600,) * 2)
    return tmp_path


@pytest.fixture
def complete(checkout: Path) -> Path:
    """A checkout with an environment that is half an hour old."""
    (checkout / ".venv" / "bin").mkdir(parents=True)
    for name in ("bin/pip", "bin/python", *STAMPS):
        (checkout / ".venv" / name).touch()
        os.utime(checkout / ".venv" / name, (time.time() - 1800,) * 2)
    return checkout


def test_an_empty_machine_takes_every_step(checkout: Path) -> None:
    assert planned(checkout, "test") == STEPS_OF_TEST
    assert planned(checkout, "demo") == ["environment", "pip", "torch", "packages of the demo"]


@pytest.mark.parametrize("goal", ["test", "demo", "check", "docs", "test-cluster", "horovod"])
def test_a_second_run_takes_none(goal: str, complete: Path) -> None:
    assert planned(complete, goal) == []


def test_other_pins_install_everything_again(complete: Path) -> None:
    (complete / "pyproject.toml").touch()
    assert planned(complete, "test") == STEPS_OF_TEST[2:]
    assert planned(complete, "demo") == ["torch", "packages of the demo"]
    (complete / "constraints.txt").touch()
    assert planned(complete, "test") == STEPS_OF_TEST[1:]


def test_another_build_script_builds_horovod_alone(complete: Path) -> None:
    (complete / "deploy" / "horovod" / "build.py").touch()
    assert planned(complete, "test") == ["what Horovod is built with", "Horovod's wheel", "Horovod"]
    assert planned(complete, "demo") == []
