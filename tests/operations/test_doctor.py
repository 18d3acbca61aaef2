"""doctor: every check is shown the trouble that it exists for."""

from __future__ import annotations

import json
import re
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import distributed
from distributed.cli import main
from distributed.commands.doctor import checks, examine
from distributed.interfaces.backend_spec import BackendSpec
from distributed.operations.doctor import Finding
from distributed.operations.doctor import check_installation as installation
from distributed.operations.doctor import check_machine as machine
from distributed.registry.catalog import BrokenPlugin, build_catalog

CONSTRAINTS = Path(__file__).parent.parent.parent / "constraints.txt"


def only(found: Iterator[Finding]) -> Finding:
    """The one finding of a check; what is not ok has a remedy."""
    (finding,) = found
    assert finding.status == "ok" or finding.remedy
    return finding


# The verb


@pytest.mark.starts_processes
def test_the_exit_code_says_whether_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == int(any(finding["status"] == "error" for finding in found))
    by_name = {finding["name"]: finding for finding in found}
    for name in ("python", "torch", "import name", "kernels", "ports", "open files", "temporary folder"):
        assert name in by_name
    for name in ("devices", "rendezvous", "all-reduce gloo"):
        assert by_name[name]["status"] == "ok", by_name[name]
    assert all(finding["remedy"] for finding in found if finding["status"] == "error")


def test_the_all_reduce_can_be_left_out() -> None:
    assert set(checks()) - set(checks(allreduce=False)) == {machine.allreduce}


def test_a_check_that_raises_is_a_finding_and_the_others_still_speak() -> None:
    def broken_check() -> Iterator[Finding]:
        raise PermissionError("not for you")
        yield

    found = examine([broken_check, installation.python])
    assert [finding.name for finding in found] == ["broken check", "python"]
    assert found[0].status == "error"
    assert "PermissionError: not for you" in found[0].message


# Installation


def test_the_tested_releases_are_those_of_the_constraints_file() -> None:
    pinned = dict(line.split("==") for line in CONSTRAINTS.read_text().split())
    assert {name: pinned[name] for name in installation.TESTED} == installation.TESTED


def test_packages_are_held_against_the_oldest_and_newest_tested_releases() -> None:
    good = dict(installation.TESTED)
    found = {
        finding.name: finding
        for finding in installation.packages(
            {
                **good,
                "torch": "2.7.0",
                "keras": "3.10.0",
                "rich": "99.0",
                "pydantic": "2.10.6",
                "PyYAML": "6.0",
                "mlflow": f"{good['mlflow']}+local",
            }
        )
    }
    old = "is older than the oldest version that the tests ran with"
    outside = {name: finding.message for name, finding in found.items() if finding.status == "warn"}
    assert outside == {
        "torch": f"2.7.0 {old} (2.11)",
        "keras": f"3.10.0 {old} (3.15)",  # no bound in pyproject.toml
        "rich": f"99.0 is newer than the newest version that the tests ran with ({good['rich']})",
    }
    assert {finding.status for finding in found.values()} == {"ok", "warn"}
    assert found["torch"].remedy == f"If it gives trouble: pip install 'torch=={good['torch']}'"


def test_the_installed_torch_is_looked_up(
    make_distribution: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(make_distribution("torch"))
    found = {finding.name: finding for finding in installation.packages()}
    assert found["torch"].status == "warn"
    assert found["torch"].message.startswith("1.2 is older than the oldest version that the tests ran with")


def test_only_what_everything_needs_must_be_installed() -> None:
    found = {finding.name: finding.status for finding in installation.packages({})}
    assert found == dict.fromkeys(["cloudpickle", "pluggy", "psutil", "pydantic", "PyYAML", "rich"], "error")


@pytest.mark.slow
def test_dasks_distribution_beside_ours_is_an_error_with_the_remedy(
    make_distribution: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert only(installation.import_name()).status == "ok"
    monkeypatch.syspath_prepend(make_distribution("distributed", top_level="distributed\n"))
    finding = only(installation.import_name())
    assert finding.status == "error"
    assert "pip uninstall distributed" in finding.remedy


def test_our_own_distribution_owns_the_import_name() -> None:
    assert only(installation.import_name(["distributed-trainer"])).status == "ok"


@pytest.mark.slow
def test_hugging_faces_kernels_stays_importable(
    make_distribution: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert only(installation.kernels_name()).status == "ok"
    site = make_distribution("kernels", {"kernels": "HUB = True\n"}, top_level="kernels\n")
    monkeypatch.syspath_prepend(site)
    finding = only(installation.kernels_name())
    assert (finding.status, "belongs to kernels" in finding.message) == ("ok", True)


def test_a_kernels_package_of_ours_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kernels", "distributed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kernels", raising=False)  # transformers looks for one
    monkeypatch.setattr(distributed.__spec__, "origin", str(tmp_path / "distributed" / "__init__.py"))
    assert only(installation.kernels_name()).status == "error"


def test_broken_plugins_and_missing_requirements_are_reported() -> None:
    catalog = build_catalog(found=[])
    assert only(installation.plugins(catalog)).status == "ok"
    catalog.broken.append(BrokenPlugin("acme", "acme-tools 1.2 (acme)", "ImportError: x", ""))
    finding = only(installation.plugins(catalog))
    assert (finding.name, finding.status) == ("plugin acme", "error")
    assert finding.remedy.endswith("acme-tools 1.2")

    catalog.backends["near"] = BackendSpec(name="near", target="m:C", requires=("json",))
    catalog.backends["far"] = BackendSpec(
        name="far", target="m:C", requires=("nobody_has_this",), install_hint="pip install far"
    )
    far, near = installation.backends(catalog)
    assert (near.status, far.status, far.remedy) == ("ok", "warn", "pip install far")


# Machine


def test_a_taken_port_is_a_warning() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert only(machine.ports(port)).status == "warn"
    assert only(machine.ports(port)).status == "ok"


def test_small_or_absent_shared_memory_is_a_warning(tmp_path: Path) -> None:
    assert only(machine.shared_memory(str(tmp_path), wanted=1)).status == "ok"
    assert "--shm-size" in only(machine.shared_memory(str(tmp_path), wanted=2**80)).remedy
    assert only(machine.shared_memory(str(tmp_path / "absent"))).status == "warn"


def test_a_low_limit_of_open_files_names_the_command() -> None:
    assert only(machine.open_files(wanted=1)).status == "ok"
    assert re.fullmatch(r"ulimit -n \d+", only(machine.open_files(wanted=2**62)).remedy)


def test_a_temporary_folder_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    assert only(machine.temporary_folder()).status == "error"


@pytest.mark.starts_processes
def test_a_probe_that_fails_says_why() -> None:
    assert machine._probe("nonsense") == {"error": "KeyError: 'nonsense'"}


@pytest.mark.starts_processes
def test_a_probe_that_hangs_is_ended() -> None:
    assert machine._probe("rendezvous", seconds=0.01) == {"error": "no answer within 0.01 seconds"}


def test_a_name_server_that_does_not_answer() -> None:
    never = threading.Event()

    def waits() -> None:
        never.wait(60)

    found = only(machine.name_server(waits, patience=0.01))
    never.set()
    assert found.status == "warn"
    assert "no answer within 0.01 s" in found.message
    assert "'::ffff:127.0.0.1 ip4-loopback' to /etc/hosts" in found.remedy
    assert only(machine.name_server(lambda: None)).status == "ok"


@pytest.mark.starts_processes
def test_ranks_that_cannot_reduce_are_an_error(tmp_path: Path) -> None:
    result = machine._probe("allreduce", "nobody", str(tmp_path / "store"))
    assert "nobody" in result["error"]


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("torch", "said"),
    [
        ("raise ImportError('libcudart.so.12: cannot open shared object file')", "libcudart.so.12"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "died of signal 11"),
    ],
)
def test_a_torch_that_cannot_be_used_does_not_end_doctor(
    torch: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(torch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    machine._seen.cache_clear()
    finding = only(machine.devices())
    machine._seen.cache_clear()
    assert finding.status == "error"
    assert said in finding.message
    assert only(machine.rendezvous()).status == "error"
