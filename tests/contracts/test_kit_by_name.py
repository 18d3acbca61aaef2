"""``pytest --pyargs distributed.testing --distributed-backend NAME``, as a third party runs it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from distributed.errors import UserError
from distributed.interfaces.backend_spec import Capabilities
from distributed.registry.catalog import get_catalog
from distributed.testing.conformance import BackendConformance
from distributed.testing.rank_pool import RankPool
from distributed.testing.torch_workbench import TorchWorkbench
from distributed.testing.workbench import find_workbench


def kit(folder: Path, *arguments: str) -> tuple[int, str]:
    """(exit code, output) of the kit, run in `folder`."""
    command = [sys.executable, "-m", "pytest", "--pyargs", "distributed.testing", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.starts_processes
def test_without_a_backend_one_sentence_says_so(tmp_path: Path) -> None:
    code, output = kit(tmp_path)
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: --distributed-backend: the conformance kit needs a backend to test" in output
    assert "Traceback" not in output


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--distributed-backend", "sriel"], "no backend is called 'sriel'. Did you mean 'serial'?"),
        (["--distributed-backend", "serial", "--distributed-ranks", "two"], "not numbers of ranks"),
        (["--distributed-backend", "serial", "--distributed-set", "sed=1"], "Did you mean 'seed'?"),
    ],
)
def test_a_mistake_is_told_once(tmp_path: Path, arguments: list[str], complaint: str) -> None:
    code, output = kit(tmp_path, *arguments)
    assert code == pytest.ExitCode.USAGE_ERROR
    assert output.count(complaint) == 1


@pytest.mark.starts_processes
def test_runs_the_backend_named_with_ranks_and_fields(tmp_path: Path) -> None:
    fields = ["--distributed-ranks", "2", "--distributed-set", "bucket_cap_mb=0.001"]
    code, output = kit(
        tmp_path, "--distributed-backend", "pytorch-ddp", *fields, "-k", "c1_global or schedules_count", "-s"
    )
    assert code == 0, output
    assert "2 passed" in output
    assert "pytorch-ddp: 2 ranks" in output
    assert "1 rank " not in output
    assert "3 ranks" not in output


@pytest.mark.starts_processes
def test_ranks_of_its_own_launcher(tmp_path: Path) -> None:
    own = ["--distributed-own-launcher", "--distributed-ranks", "2", "-k", "c8"]
    code, output = kit(tmp_path, "--distributed-backend", "pytorch-ddp", *own)
    assert code == 0, output
    assert "1 passed" in output


def test_a_framework_without_workbench_is_named() -> None:
    with pytest.raises(UserError, match=r"has no workbench.*Got 'jax'"):
        find_workbench("jax")


def test_a_test_class_may_bring_its_workbench() -> None:
    class Mine(TorchWorkbench):
        pass

    suite = BackendConformance()
    suite.backend, suite.workbench = "serial", Mine
    assert type(suite.bench) is Mine


def test_a_claim_that_the_plan_ignores_is_caught(
    rank_pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, suite = get_catalog(), BackendConformance()
    modest = Capabilities(accumulation=False, clipping=False, multi_process=False)
    modest_spec = replace(catalog.backend("serial"), name="modest", capabilities=modest)
    monkeypatch.setitem(catalog.backends, "modest", modest_spec)
    suite.backend, suite.sizes, suite.pool = "modest", (1,), rank_pool
    suite.test_what_is_not_claimed_is_refused(tmp_path)
    monkeypatch.setattr("distributed.planner.resolve.check_capabilities", lambda *arguments: None)
    with pytest.raises(pytest.fail.Exception):
        suite.test_what_is_not_claimed_is_refused(tmp_path)
