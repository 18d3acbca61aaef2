"""Tiers of the suite: nothing is lost between a push and the campaigns, and a change chooses its groups."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.campaigns.choose import changed_files, check_counts, choose, reasons
from tests.campaigns.last_green import GroupResult, LastGreen, read_last_green, write_last_green
from tests.campaigns.reversions.group_mutants import GROUP_MUTANTS
from tests.campaigns.reversions.table import REVERSIONS, Reversion
from tests.support.collected_ids import collect
from tests.support.num_processes import num_processes
from tests.support.recorded_times import read_times
from tests.support.tiers import Group, folding_group, read_groups

ROOT = Path(__file__).parents[1]
GROUPS = read_groups()
_ENGINE = ["distributed/training/torch_backend.py", "distributed/training/objective.py"]
GUARDED = {
    "kit-ray": ["backends/distributed_backends/ray", "distributed/launch"],
    "ray": ["backends/distributed_backends/ray", "distributed/launch"],
    "tuner": ["backends/distributed_backends/ray", "distributed/operations/tuning"],
    "kit-tensorflow": ["backends/distributed_backends/tensorflow", "distributed/training/loop.py"],
    "kit-deepspeed": ["backends/distributed_backends/deepspeed", *_ENGINE],
    "kit-horovod": ["backends/distributed_backends/horovod", *_ENGINE],
    "kit-mesh": ["distributed/parallel", "backends/distributed_backends/fsdp", *_ENGINE],
    "kit-compilation": ["backends/distributed_backends/fsdp", "distributed/training/compilation.py"],
    "transfers": ["distributed/checkpoint", "distributed/training/rank_state.py"],
    "mutants": ["distributed/testing", "distributed/training/mean_losses.py"],
    "zoo": ["distributed/data", "distributed/training/mean_losses.py"],
    "kills": ["distributed/checkpoint", "distributed/testing/kill_points.py"],
    "reversions": ["tests/campaigns/reversions"],
    "launchers": ["distributed/launch", "distributed/torchrun.py"],
    "elastic-hosts": ["distributed/launch", "distributed/resilience"],
    "third-party": ["distributed/testing", "examples/third_party_backend"],
    "measured-memory": ["distributed/planner/estimates"],
    "examples": ["examples", "distributed/parallel"],
    "gpu-dry-run": ["kernels/distributed_kernels", "tests/gpu"],
    "cluster": ["distributed/launch", "distributed/resilience", "distributed/communication", "deploy"],
    "group-mutants": ["tests/campaigns/reversions", "tests/support/tiers.py"],
}
"""Group -> folders and files whose every file chooses it."""


@pytest.fixture(scope="module")
def ids() -> list[str]:
    """Ids of the whole collection."""
    outside = [path for group in GROUPS.values() if group.target for path in group.tests]
    return [*collect(), *(collect(outside) if outside else [])]


def test_every_folder_of_tests_is_collected() -> None:
    """All but tests/cluster, which `make test-cluster` runs."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = settings["tool"]["pytest"]["ini_options"]["testpaths"]
    folders = {file.parent.relative_to(ROOT).as_posix() for file in (ROOT / "tests").glob("*/**/test_*.py")}
    unlisted = [folder for folder in folders if not any(f"{folder}/".startswith(f"{p}/") for p in listed)]
    assert unlisted == ["tests/cluster"]


@pytest.mark.parametrize("fault", [*REVERSIONS.values(), *GROUP_MUTANTS.values()], ids=lambda f: f.fault)
def test_a_fault_changes_a_function_that_exists(fault: Reversion) -> None:
    """Also after the function has moved; the fault itself is put back by campaigns alone."""
    body: list[ast.stmt] = ast.parse((ROOT / fault.file).read_text(encoding="utf-8")).body
    *classes, function = fault.name.split(".")
    for name in classes:
        (body,) = (node.body for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    found = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imported = {
        alias.asname or alias.name for n in body if isinstance(n, ast.ImportFrom) for alias in n.names
    }
    assert function in found | imported


@pytest.mark.starts_processes
def test_a_push_and_the_campaigns_are_the_whole_collection(ids: list[str]) -> None:
    """As pytest selects them: what a push leaves out is what the campaigns run."""
    campaigns = set(collect(["--tier=campaigns"]))
    outside = {test for test in ids if any(g.target and g.contains(test) for g in GROUPS.values())}
    for group in GROUPS.values():
        folded = [test for test in ids if group.folds(test)]
        assert folded, f"{group.name} folds nothing"
        assert set(folded) <= campaigns | outside
    pushed = {test for test in ids if folding_group(test, GROUPS.values()) is None}
    assert pushed | campaigns | outside == set(ids)
    assert not pushed & campaigns


@pytest.mark.starts_processes
@pytest.mark.parametrize("group", GROUPS.values(), ids=lambda group: group.name)
def test_every_entry_of_a_group_means_something(group: Group, ids: list[str]) -> None:
    for part in group.tests:
        assert any(Group("", "", (part,), ()).contains(test) for test in ids), part
    for begin in group.push:
        alone = Group("", "", group.tests, (), push=(begin,))
        assert any(alone.contains(test) and not alone.folds(test) for test in ids), begin
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for glob in group.guards:
        assert any(Group("", "", (), (glob,)).is_guarded_by(file) for file in files.splitlines()), glob
    if group.name in GROUP_MUTANTS:
        assert GROUP_MUTANTS[group.name].caught_by in ids


def test_every_group_is_guarded() -> None:
    assert set(GUARDED) == set(GROUPS)


@pytest.mark.parametrize(("group", "places"), GUARDED.items())
def test_every_guarded_file_chooses_its_group(group: str, places: list[str]) -> None:
    last = LastGreen("0" * 40, "2026-01-01", dict.fromkeys(GROUPS, GroupResult(1, 1.0)))
    for place in places:
        inside = [path for path in (ROOT / place).rglob("*") if path.suffix != ".pyc"]
        files = [path for path in inside if path.is_file()] or [ROOT / place]
        for file in files:
            name = file.relative_to(ROOT).as_posix()
            assert group in reasons(GROUPS.values(), last, lambda commit, name=name: [name]), name


@pytest.mark.parametrize("fault", REVERSIONS.values(), ids=list(REVERSIONS))
def test_a_change_beside_a_repaired_fault_puts_it_back(fault: Reversion) -> None:
    for file in (fault.file, fault.caught_by.partition("::")[0]):
        assert GROUPS["reversions"].is_guarded_by(file)


A = Group("a", "", ("tests/a.py", "tests/b.py::TestOne"), ("src/*.py",), push=("test_c1_", "TestOne::test_z"))


@pytest.mark.parametrize(
    ("test", "folded"),
    [
        ("tests/a.py::test_x", True),
        ("tests/a.py::test_x[c::test_c1_]", True),
        ("tests/a.py::TestX::test_c1_y[1]", False),
        ("tests/a.py::test_c1_y", False),
        ("tests/a.pyx::test_x", False),
        ("tests/b.py::TestOne::test_x", True),
        ("tests/b.py::TestOne::test_z[1]", False),
        ("tests/b.py::TestOneMore::test_x", False),
        ("tests/b.py::test_x", False),
    ],
)
def test_a_group_folds_its_tests_but_those_of_a_push(test: str, folded: bool) -> None:
    assert A.folds(test) is folded


def test_a_test_of_two_groups_is_an_error() -> None:
    with pytest.raises(ValueError, match="in several groups: a, b"):
        folding_group("tests/a.py::test_x", [A, Group("b", "", ("tests",), ())])


LAST = LastGreen("ab" * 20, "2026-11-26", {"a": GroupResult(12, 30.0), "b-c": GroupResult(3, 4.0)})
B = Group("b-c", "", ("tests/c.py",), ("lib/*",))


def test_only_groups_whose_guards_or_own_tests_changed_are_due() -> None:
    def due(*files: str) -> list[str]:
        return list(reasons([A, B], LAST, lambda commit: list(files)))

    assert due() == due("README.md", "src/a.md") == []
    assert due("src/deep/x.py") == due("tests/b.py") == ["a"]
    assert due("tests/c.py", "src/x.py") == ["a", "b-c"]


def test_without_a_recorded_commit_every_group_is_due() -> None:
    assert list(reasons([A, B], None, lambda commit: [])) == ["a", "b-c"]
    assert list(reasons([A, B], LAST, lambda commit: None)) == ["a", "b-c"]
    new = Group("new", "", ("tests/d.py",), ())
    assert list(reasons([A, new], LAST, lambda commit: [])) == ["new"]


def test_the_shortest_groups_are_taken_while_they_fit() -> None:
    due = {"long": "x has changed", "short": "y has changed", "unknown": "z has changed"}
    seconds = {"long": 1000.0, "short": 20.0}
    assert choose(due, seconds, 2000.0, 2).chosen == ["short", "unknown", "long"]
    assert choose(due, seconds, 500.0, 2).chosen == ["short", "unknown"]
    assert choose(due, seconds, 500.0, 2).put_off == ["long"]
    assert choose(due, seconds, -1.0, 2).put_off == list(due)


def test_three_processes_run_where_there_is_memory_for_them() -> None:
    assert [num_processes(gib << 30) for gib in (8, 12, 16, 23)] == [2, 2, 2, 3]
    assert num_processes() in (2, 3)


def test_a_line_with_other_counts_is_rejected() -> None:
    check_counts(LAST, {"a": 12, "b-c": 3}, [])
    check_counts(LAST, {"a": 13, "b-c": 3}, ["a"])  # it runs again
    check_counts(None, {"a": 13}, [])
    with pytest.raises(ValueError, match=r"had 12 tests of a, the collection has 13.*make campaigns"):
        check_counts(LAST, {"a": 13, "b-c": 3}, [])


def test_the_line_survives_a_round_trip(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Times\n\n## Campaigns\n\n## Long runs\n\nrow\n")
    for last in (LAST, LastGreen("cd" * 20, "2026-12-01", LAST.groups)):
        write_last_green(last, page)
        assert read_last_green(page.read_text()) == last
    assert page.read_text().count("Last green") == 1
    assert page.read_text().endswith("## Long runs\n\nrow\n")


@pytest.mark.parametrize(
    "line",
    [
        str(LAST).replace("ab", "ab, ", 1),
        str(LAST).replace("12 tests", "twelve tests"),
        str(LAST).replace("26;", "26; and"),
        f"{LAST}\n{LAST}",
    ],
)
def test_a_line_that_was_edited_is_rejected(line: str) -> None:
    with pytest.raises(ValueError, match="not a line that `make campaigns` writes"):
        read_last_green(line)


def test_a_page_without_a_line_has_none() -> None:
    assert read_last_green("# Times\n") is None


def git(*words: str, folder: Path) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_commit_has_to_be_an_ancestor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git("init", "-q", "-b", "main", folder=tmp_path)
    commits = []
    for name in ("one", "two", "three"):
        (tmp_path / name).write_text(name)
        git("add", ".", folder=tmp_path)
        git("commit", "-qm", name, folder=tmp_path)
        commits.append(git("rev-parse", "HEAD", folder=tmp_path))
    git("checkout", "-q", commits[1], folder=tmp_path)
    monkeypatch.setattr("tests.campaigns.choose.ROOT", tmp_path)
    assert changed_files(commits[0]) == ["two"]
    assert changed_files(commits[1]) == []
    assert changed_files("0" * 40) is None
    with pytest.raises(ValueError, match="no ancestor of HEAD"):
        changed_files(commits[2])


def test_a_test_that_was_run_again_counts_by_its_newest_run() -> None:
    def lines(seconds: float, *outcomes: str) -> list[str]:
        return [
            f'{{"id": "a", "when": "{when}", "seconds": {seconds}, "outcome": "{outcome}"}}\n'
            for when, outcome in zip(("setup", "call", "teardown"), outcomes, strict=False)
        ]

    failed, passed = lines(9.0, "failed"), lines(1.0, "passed", "passed", "passed")
    assert read_times([*failed, *passed]).tests == {"a": 3.0}
    assert read_times([*failed, *passed]).passed == {"a"}
    assert read_times([*passed, *lines(1.0, "passed", "failed", "passed")]).passed == set()


def test_a_recorded_run_that_was_cut_off_counts_what_ended() -> None:
    lines = [
        '{"begin": 10.0}\n',
        '{"id": "a", "when": "setup", "seconds": 1.0, "outcome": "passed"}\n',
        '{"id": "a", "when": "call", "seconds": 2.0, "outcome": "passed"}\n',
        '{"id": "a", "when": "teardown", "seconds": 0.5, "outcome": "passed"}\n',
        '{"id": "b", "when": "call", "seconds": 4.0, "outcome": "failed"}\n',
        '{"id": "b", "when": "teardown", "seconds": 0.0, "outcome": "passed"}\n',
        '{"id": "c", "when": "call", "seconds": 1.0, "outcome": "passed"}\n',
        '{"id": "c", "when": "teard',
    ]
    found = read_times(lines)
    assert found.tests == {"a": 3.5, "b": 4.0, "c": 1.0}
    assert found.passed == {"a"}
