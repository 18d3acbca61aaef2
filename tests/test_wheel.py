"""The wheel, installed elsewhere: trains, lists backends, and takes nobody's name."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.starts_processes

ROOT = Path(__file__).parents[1]
OURS = {"distributed", "distributed_backends", "distributed_kernels", "distributed_plugins"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the wheel, and our dependencies but not our checkout."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    interpreter = home / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(interpreter), "install", "--no-deps", "--quiet"]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True)
    (site,) = home.glob("lib/python*/site-packages")
    # A path file adds the folder, without the path files in it: the editable checkout stays out.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return interpreter


def run(python: Path, *arguments: str, cwd: Path) -> str:
    done = subprocess.run([python, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_brings_its_four_roots_and_no_other(wheel: Path) -> None:
    roots = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {root for root in roots if not root.endswith(".dist-info")} == OURS


def test_wheel_is_what_is_imported(python: Path, tmp_path: Path) -> None:
    found = run(
        python,
        "-c",
        "import distributed, distributed_backends as b; print(distributed.__file__)",
        cwd=tmp_path,
    )
    assert str(python.parent.parent) in found


def test_wheel_lists_its_backends(python: Path, tmp_path: Path) -> None:
    output = run(python, "-m", "distributed.cli", "backends", "--json", cwd=tmp_path)
    assert "pytorch-ddp" in output
    assert "serial" in output


def test_wheel_trains_the_bundled_example_on_two_ranks(python: Path, tmp_path: Path) -> None:
    output = run(
        python, "-m", "distributed.cli", "train", "--num-processes", "2", "--epochs", "2", cwd=tmp_path
    )
    assert "pytorch-ddp: 2 ranks" in output
    assert "best validation accuracy" in output


def test_wheel_brings_the_conformance_kit(python: Path, tmp_path: Path) -> None:
    kit = [
        "--pyargs",
        "distributed.testing",
        "--distributed-backend",
        "pytorch-ddp",
        "-p",
        "no:cacheprovider",
    ]
    output = run(
        python, "-m", "pytest", *kit, "-k", "c1_global or c7", "--distributed-ranks", "2", cwd=tmp_path
    )
    assert "4 passed" in output
