"""Every example runs as its own first lines say, and gets where it says."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from distributed.cli import main
from tests.support import commands
from tests.support.ports import free_port

pytestmark = pytest.mark.starts_processes

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
TRAIN = ["-m", "distributed.cli", "train"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


def run(tmp_path: Path, *words: str, **env: str) -> str:
    done = commands.run(
        [sys.executable, *words],
        stdout=PIPE,
        stderr=STDOUT,
        timeout=180,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env},
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def figure(output: str, pattern: str) -> float:
    found = re.search(pattern, output)
    assert found, output
    return float(found[1])


def script(name: str) -> list[str]:
    return ["--script", str(EXAMPLES / name)]


def test_the_bundled_digits(tmp_path: Path) -> None:
    out = run(tmp_path, *TRAIN, "--num-processes", "2", "--epochs", "12")
    assert "pytorch-ddp: 2 ranks" in out
    assert figure(out, r"best validation accuracy (\S+)") > 0.93


def test_convnet(tmp_path: Path) -> None:
    out = run(tmp_path, *TRAIN, *script("convnet.py"), "--num-processes", "2")
    assert "global batch 64 = 32 samples x 2 ranks" in out
    assert figure(out, r"best validation accuracy (\S+) on 2 rank") > 0.95


def test_a_llama_learns_the_same_when_ranks_divide_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    losses = []
    for words in (
        (),
        ("--set", "parallel.tensor=2"),
        ("--set", "parallel.context=2"),
        ("--set", "parallel.pipeline=2"),
    ):
        ranks = ("--num-processes", "2" if words else "1")
        out = run(tmp_path, *TRAIN, *script("llama.py"), "--max-steps", "8", *ranks, *words)
        losses.append(figure(out, r"validation loss (\S+) after 8 steps"))
    assert losses == pytest.approx([losses[0]] * 4, abs=2e-4)


def test_a_mixtral_learns_the_same_when_ranks_divide_its_experts(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    losses = []
    for words in (["--num-processes", "1"], ["--num-processes", "2", "--set", "parallel.expert=2"]):
        out = run(tmp_path, *TRAIN, *script("mixtral.py"), "--max-steps", "8", *words)
        losses.append(figure(out, r"validation loss (\S+) after 8 steps"))
    assert "expert parallelism leaves 2 of 4 experts on a rank, in model.layers.*.mlp.experts" in out
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)


def test_language_model_learns_the_same_on_one_and_two_ranks_and_backends(tmp_path: Path) -> None:
    bits = []
    for ranks, backend, axes in (
        ("1", "pytorch-ddp", []),
        ("2", "fsdp", []),
        ("2", "pytorch-ddp", ["--set", "parallel.context=2"]),
        ("2", "pytorch-ddp", ["--set", "parallel.pipeline=2"]),
    ):
        place = ["--num-processes", ranks, "--backend", backend, "--max-steps", "15", *axes]
        out = run(tmp_path, *TRAIN, *script("language_model.py"), *place)
        assert f"{backend}: {ranks} rank" in out
        bits.append(figure(out, r"(\S+) bits per byte of unseen source after 15 steps"))
    assert bits == pytest.approx([bits[0]] * 4, abs=0.002)
    assert bits[0] < 5.0  # uniform bytes take 8, bytes by their frequency alone about 4.8


def test_sketched_digits_on_two_backends(tmp_path: Path) -> None:
    for backend, words in (("pytorch-ddp", ["--", "--frozen"]), ("fsdp", [])):
        flags = ["--num-processes", "2", "--backend", backend]
        out = run(tmp_path, *TRAIN, *script("sketched_digits.py"), *flags, *words)
        assert f"{backend}: 2 ranks" in out
        assert figure(out, r"best validation accuracy (\S+) on 2 rank") > 0.95


def test_own_loop_under_torchrun_and_alone(tmp_path: Path, forking_python: Path) -> None:
    for launch, ranks in ((TORCHRUN, 2), ([], 1)):
        out = run(tmp_path, *launch, str(EXAMPLES / "own_loop.py"), PYTHON_EXEC=str(forking_python))
        assert figure(out, rf"validation accuracy (\S+) on {ranks} rank") > 0.93


def test_raw_torchrun_per_rank(tmp_path: Path) -> None:
    words = [*TRAIN, "--launch", "per-rank", "--num-processes", "2", *script("raw_torchrun.py")]
    out = run(tmp_path, *words, "--", "--num-epochs", "6")
    assert figure(out, r"validation accuracy (\S+) on 2 rank") > 0.9


def test_serve_digits_answers_over_http(tmp_path: Path) -> None:
    # Ray's workers have a low priority, and its proxy 5 seconds to start: too short on a busy machine.
    env = {"RAY_worker_niceness": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
    out = run(tmp_path, str(EXAMPLES / "serve_digits.py"), "--port", str(free_port()), **env)
    assert figure(out, r"asked for a 6, answered 6 with chance (\S+)") > 0.5


def test_every_example_is_listed_and_tested() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    page, here = (EXAMPLES / "README.md").read_text(), Path(__file__).read_text()
    assert {name for name in names if f"({name})" not in page or f'"{name}"' not in here} == set()


def test_the_bundled_example_takes_no_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else a search over --hidden-size would rank noise."""
    assert main(["train", "--", "--hidden-size", "8"]) == 2
    assert "the bundled example takes no arguments of its own" in capsys.readouterr().err
