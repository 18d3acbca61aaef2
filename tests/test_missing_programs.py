"""What the machine lacks: one line with the command that installs it; tests are left out and counted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSTALL = ROOT / "tests" / "support" / "install.sh"
BUILD = ROOT / "deploy" / "horovod" / "build.py"


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A PATH with a shell and no more."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "bash").symlink_to(shutil.which("bash") or "")
    for name in ("id", "apt-get"):  # an ordinary user of Debian
        add_program(folder / name, "echo 1000")
    return folder


def add_program(path: Path, script: str = "") -> None:
    path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
    path.chmod(0o755)


def install(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(path / "bash"), str(INSTALL), *words]
    return subprocess.run(command, env={"PATH": str(path)}, capture_output=True, text=True, check=True)


@pytest.mark.parametrize("words", [("--check", "test"), ("test",)])
def test_what_is_missing_is_one_line_with_the_command(words: tuple[str, ...], bare_path: Path) -> None:
    (line,) = install(bare_path, *words).stderr.splitlines()
    assert line.startswith("not installed: a C++ compiler (Horovod is built from source), unshare (")
    assert line.endswith("as root: apt-get install g++ util-linux chromium chromium-driver")
    add_program(bare_path / "g++")
    add_program(bare_path / "unshare")
    (line,) = install(bare_path, *words).stderr.splitlines()
    assert line.startswith("not installed: Chromium (")
    assert line.endswith("as root: apt-get install chromium chromium-driver")


def test_where_nothing_is_missing_nothing_is_printed(bare_path: Path) -> None:
    for name in ("g++", "unshare", "google-chrome", "chromedriver"):
        add_program(bare_path / name)
    done = install(bare_path, "--check", "test")
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.starts_processes
def test_without_a_compiler_horovods_build_ends_with_one_line(bare_path: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(BUILD), "--cache", str(tmp_path / "cache"), "--check"]
    env = {**os.environ, "PATH": str(bare_path), "CXX": "no-such-compiler"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "error: Horovod 0.28.1 is built from source, which needs a C++ compiler (as root: apt-get"
    )


@pytest.mark.starts_processes
def test_tests_that_lack_something_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.support.needs import Needs\n"
        "def pytest_configure(config): config.pluginmanager.register(Needs())\n"
    )
    (tmp_path / "test_needs.py").write_text(
        "import pytest\n"
        "from tests.support.needs import leave_out, needs_program\n"
        "absent = pytest.mark.needs(needs_program('no-such-program', 'test-tools'))\n"
        "@absent\ndef test_1(): raise AssertionError\n"
        "@absent\ndef test_2(): raise AssertionError\n"
        "@pytest.fixture\ndef disk(): leave_out('no disk')\n"
        "def test_3(disk): pass\n"
        "@pytest.mark.needs(needs_program('sh', 'test-tools'))\ndef test_4(): pass\n"
        "@pytest.mark.skip('for another reason')\ndef test_5(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--strict-markers", str(tmp_path)]
    here = {name: value for name, value in os.environ.items() if name != "CI"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    said = done.stdout.partition("left out on this machine")[2]
    assert "2 tests: no no-such-program; as root: make test-tools\n" in said
    assert "1 test: no disk\n" in said
    assert "another reason" not in said

    done = subprocess.run(
        command, cwd=tmp_path, env={**here, "CI": "true"}, capture_output=True, text=True, check=False
    )
    assert "1 passed, 1 skipped" in done.stdout
    assert "3 errors" in done.stdout
    assert "no disk (CI is set: nothing is left out)" in done.stdout
