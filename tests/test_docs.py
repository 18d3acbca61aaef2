"""README and guide do what they say: Python blocks run, flags exist, links lead somewhere.

The Python blocks of a page run top to bottom in one namespace, in an empty folder. On
getting-started, a block that begins with ``# NAME.py`` is that file, and the commands are run as
well. Commands of the other pages are read by the real parser.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed.cli import build_parser, main
from distributed.commands.flags import collect_layers
from distributed.commands.script import find_script
from distributed.config import load_layers
from tests.support.commands import run

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OURS = "python -m distributed.cli "
UNMANAGED = {"benchmarks.md"}
"""Pages whose blocks are a record of what was run, not something to try."""

ON_RAY = {"ray.md", "tuning.md"}
"""Pages whose blocks start a Ray cluster where none is connected."""


def blocks(page: Path, *languages: str) -> list[tuple[str, str, int]]:
    """(language, source, line) of the fenced blocks of `page`, in order."""
    text = page.read_text(encoding="utf-8")
    found = [(m[1], m[2], text.count("\n", 0, m.start()) + 2) for m in BLOCK.finditer(text)]
    return [block for block in found if block[0] in languages]


def commands(page: Path) -> list[tuple[str, int]]:
    """(command, line) of the bash blocks of `page`, comments left out."""
    found = []
    for _, source, line in blocks(page, "bash"):
        for offset, text in enumerate(source.splitlines()):
            if words := shlex.split(text, comments=True):
                found.append((shlex.join(words), line + offset))
    return found


def label(page: Path) -> str:
    return str(page.relative_to(ROOT))


def tried(pages: list[Path]) -> list[Path]:
    return [page for page in pages if page.name not in UNMANAGED]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    yield
    mlflow = sys.modules.get("mlflow")
    if mlflow is not None:
        mlflow.set_tracking_uri(None)  # a page's own store goes with its folder


@pytest.mark.starts_processes
@pytest.mark.parametrize("page", [p for p in tried(PAGES) if blocks(p, "python")], ids=label)
def test_python_blocks_run_as_written(page: Path, request: pytest.FixtureRequest) -> None:
    if page.name in ON_RAY:
        request.getfixturevalue("ray_cluster")
    namespace: dict[str, Any] = {"__name__": "__page__"}
    for _, source, line in blocks(page, "python"):
        if not re.match(r"# \w+\.py\n", source):
            # Line numbers of a failure are then those of the page.
            exec(compile("\n" * (line - 1) + source, str(page), "exec"), namespace)


@pytest.mark.starts_processes
def test_getting_started_works_from_top_to_bottom(tmp_path: Path) -> None:
    """The script and each verb start as a user starts them, the first time that the page has them."""
    outputs, forms = {}, set()
    for language, source, line in blocks(ROOT / "docs" / "getting-started.md", "python", "yaml", "bash"):
        name = re.match(r"# (\w+\.(?:py|yaml))\n", source)
        if name:
            (tmp_path / name[1]).write_text(source)
        if language != "bash":
            continue
        for command in source.splitlines():
            # `doctor` judges the machine, not the page.
            if command.startswith("python ") and not command.endswith(" doctor"):
                form = command.removeprefix(OURS).split()[0]
                outputs[command] = run_as_a_user(command, f"line {line}", fresh=form not in forms)
                forms.add(form)
    plain, two_ranks, _, sharded, resumed, watched, planned, explained = outputs.values()
    assert "pytorch-ddp: 1 rank on CPU" in plain
    assert "global batch 64 = 32 samples x 2 ranks" in two_ranks
    # The same training: the figure that both runs end on.
    assert re.search(r"best accuracy (\S+)", plain)[1] == re.search(r"best accuracy (\S+)", two_ranks)[1]
    assert re.search(r"best accuracy (\S+)", plain)[1] == re.search(r"best accuracy (\S+)", sharded)[1]
    assert "epoch 4" in two_ranks
    assert "epoch 4" not in resumed
    assert "epoch 6" in resumed
    assert "best accuracy" in watched
    assert list((tmp_path / "runs").rglob("events.out.tfevents.*"))
    assert "best accuracy" not in planned
    assert re.search(r"^ *epochs +3 +flag", explained, re.MULTILINE)
    assert re.search(r"^ *gradient_clipping +1.0 +file run.yaml", explained, re.MULTILINE)


@pytest.mark.real_start
@pytest.mark.starts_processes
@pytest.mark.timeout(600)
def test_the_readme_kills_a_run_and_loses_nothing(tmp_path: Path) -> None:
    (script,) = [text for _, text, _ in blocks(ROOT / "README.md", "bash") if "kill -9" in text]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=540,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PATH": path},
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^continues at epoch [1-9]", done.stdout, re.MULTILINE), done.stdout
    assert "\nequal, bit for bit\n" in done.stdout


def run_as_a_user(command: str, where: str, fresh: bool) -> str:
    _, *words = shlex.split(command)
    done = run(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
        # On a machine with GPUs the page's first lines would read differently.
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        fresh=fresh,
    )
    assert done.returncode == 0, f"{where}: {command}\n{done.stdout}"
    return done.stdout


@pytest.mark.parametrize("page", [p for p in tried(PAGES) if commands(p)], ids=label)
def test_our_commands_have_flags_that_exist(page: Path) -> None:
    for command, line in commands(page):
        if not command.startswith(OURS):
            continue
        words = shlex.split(command.removeprefix(OURS))
        own = words[: words.index("--")] if "--" in words else words
        args, unknown = build_parser(own).parse_known_args(own)
        assert not unknown, f"{label(page)}:{line}: {command}"
        if hasattr(args, "config") and args.config is None:
            load_layers(collect_layers(args))
        script = getattr(args, "script", None)
        if script is not None and script != "train.py":
            find_script(str(ROOT / script))


def test_cheap_commands_run() -> None:
    cheap = {
        command.removeprefix(OURS)
        for page in tried(PAGES)
        for command, _ in commands(page)
        if command.startswith((f"{OURS}config", f"{OURS}backends")) and "run.yaml" not in command
    }
    assert len(cheap) > 3
    for command in sorted(cheap):
        assert main(shlex.split(command)) == 0


def test_scripts_named_in_commands_exist() -> None:
    for page in tried(PAGES):
        for command, line in commands(page):
            for word in shlex.split(command):
                if word.startswith("examples/"):
                    assert (ROOT / word).is_file(), f"{label(page)}:{line}: {word}"


LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_relative_links_resolve(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path) if path else page
        assert there.exists(), f"{label(page)} links to {target}"
        if anchor:
            assert anchor in anchors(there), f"{label(page)} links to {target}"


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name in ("index.md", *UNMANAGED) or f"({page.name})" in index, page.name


@pytest.mark.slow
def test_the_table_of_fields_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    written = page[page.index("<!-- fields -->\n") : page.index("<!-- end of fields -->")]
    assert main(["config", "fields", "--markdown"]) == 0
    command = f"{OURS}config fields --markdown"
    assert written == f"<!-- fields -->\n{capsys.readouterr().out}", f"paste the output of `{command}`"


def test_contracts_name_tests_that_exist() -> None:
    from distributed.testing.conformance import BackendConformance

    named = re.findall(r"`(test_c\d\w+)`", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert {name.split("_")[1] for name in named} == {f"c{number}" for number in range(1, 12)}
    assert [name for name in named if not hasattr(BackendConformance, name)] == []


def test_the_readme_claims_no_backend_that_is_not_there() -> None:
    from distributed.registry.catalog import get_catalog

    rows = re.findall(r"^\| `([\w-]+)` \|.*available, passes", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert set(rows) <= set(get_catalog().backends)
    assert rows
