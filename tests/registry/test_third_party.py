"""A stranger's backend, installed from its own package: listed, chosen, and through the kit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import commands

PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
PACKAGE = Path(__file__).parents[2] / "examples" / "third_party_backend"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package in it, as pip installs it; nothing is fetched."""
    folder = tmp_path_factory.mktemp("site")
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", str(folder), str(PACKAGE)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def run(site: Path, cwd: Path, *words: str) -> str:
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    done = commands.run(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=280,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_it_is_listed_with_where_it_comes_from(site: Path, tmp_path: Path) -> None:
    found = json.loads(run(site, tmp_path, "-m", "distributed.cli", "backends", "--json"))
    (ring,) = [backend for backend in found["backends"] if backend["name"] == "ring"]
    assert ring["installed"]
    assert ring["origin"] == "distributed-ring-backend 0.1.0"
    assert found["broken"] == []


def test_its_section_is_part_of_the_configuration(site: Path, tmp_path: Path) -> None:
    words = ["config", "show", "--ring-chunk-size", "512", "--set", "ring.direction=left"]
    shown = run(site, tmp_path, "-m", "distributed.cli", *words)
    assert "\nring:\n  chunk_size: 512\n  direction: left\n" in shown
    explained = run(site, tmp_path, "-m", "distributed.cli", "config", "explain", *words[2:])
    assert re.search(r"ring\.chunk_size +512 +flag", explained)
    assert re.search(r"ring\.direction +left +--set", explained)
    assert "--ring-direction {right,left}" in run(site, tmp_path, "-m", "distributed.cli", "train", "--help")
    with pytest.raises(AssertionError, match=r"Did you mean 'ring\.direction'\?"):
        run(site, tmp_path, "-m", "distributed.cli", "config", "show", "--set", "ring.directoin=left")


def test_its_options_reach_the_ranks(site: Path, tmp_path: Path) -> None:
    """A ring in pieces and in the other direction trains alike; the pieces end at other elements."""
    words = ["train", "--backend", "ring", "--num-processes", "3", "--max-steps", "4"]
    options = ["--ring-chunk-size", "100", "--ring-direction", "left"]
    plain, other = (run(site, tmp_path, "-m", "distributed.cli", *words, *o) for o in ([], options))
    accuracy = re.compile(r"best validation accuracy (\S+)")
    assert accuracy.findall(plain) == accuracy.findall(other) != []


def test_it_is_chosen_by_name(site: Path, tmp_path: Path) -> None:
    words = ["train", "--backend", "ring", "--num-processes", "2", "--epochs", "2"]
    output = run(site, tmp_path, "-m", "distributed.cli", *words)
    assert "ring: 2 ranks" in output
    assert "best validation accuracy" in output


def test_what_it_does_not_claim_is_refused(site: Path, tmp_path: Path) -> None:
    words = ["train", "--backend", "ring", "--num-processes", "2", "--find-unused-parameters"]
    with pytest.raises(AssertionError, match="backend 'ring' cannot find unused parameters"):
        run(site, tmp_path, "-m", "distributed.cli", *words)


def test_it_passes_the_kit(site: Path, tmp_path: Path) -> None:
    named = ["--pyargs", "distributed.testing", "--distributed-backend", "ring", "--distributed-ranks", "2,3"]
    output = run(site, tmp_path, *PYTEST, *named)
    assert "passed" in output
    assert "skipped" not in output


def test_its_own_tests_run(site: Path, tmp_path: Path) -> None:
    """On four ranks; one contract is enough here."""
    words = [str(PACKAGE / "tests"), "-k", "c6_clips", f"--rootdir={tmp_path}"]
    assert "1 passed" in run(site, tmp_path, *PYTEST, *words)
