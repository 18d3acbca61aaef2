"""Other versions than the pinned ones: an older torch with the oldest releases that pyproject.toml admits.

::

    make long versions                                            # torch 2.11.0
    make long versions LONG_FLAGS="--torch 2.14.1 --pinned"       # with the other packages of constraints.txt
    make long versions LONG_FLAGS=--newest                        # prints pins and newest releases, no more

The environment lies in the user's cache, not in the clone. pip reads its own variables (PIP_INDEX_URL and
others), by which an index with builds for the CPU can be chosen: those of the default index bring CUDA,
several gigabytes. ``state.json`` beside the environment keeps what has passed: an interrupted run resumes
there. Another commit runs the tests again, and other pins install again. The result is a line in
docs/test-times.md.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["OLDEST", "Part", "constraints", "lower_bounds", "main", "record", "run_parts"]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "test-times.md"
PINS = ROOT / "constraints.txt"

OLDEST = ("cloudpickle", "numpy", "pluggy", "psutil", "pydantic", "pyyaml", "rich", "safetensors")
"""Packages of which the oldest admitted release is installed: what training needs beside torch."""
FREE = ("torch", "setuptools", "pydantic_core")
"""Packages without their pin: torch itself, what it limits, and what belongs to one release of pydantic."""
REPORTED = ("torch", "transformers", "peft", "deepspeed", "ray", "tensorflow", "mlflow")
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
BACKENDS = "TestSerial or TestPyTorchDDP or TestFSDP"


@dataclass(frozen=True)
class Part:
    """What is run in the environment.

    Attributes:
        name: key in the state and in the line.
        command: words of the command.
    """

    name: str
    command: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Install, run what has not passed, and write the line; 1 if something failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.versions", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--torch", default=lower_bounds()["torch"] + ".0", help="its release; default: %(default)s"
    )
    parser.add_argument("--pinned", action="store_true", help="the pinned releases of the other packages")
    parser.add_argument("--home", type=Path, default=default_home(), help="folder of the environments")
    parser.add_argument(
        "--seed", type=int, default=0, help="PYTHONHASHSEED of the tests; default: %(default)s"
    )
    parser.add_argument("--newest", action="store_true", help="only print pins and newest releases")
    args = parser.parse_args(argv)
    if args.newest:
        return print_newest()
    home = args.home / f"torch-{args.torch}{'-pinned' if args.pinned else ''}"
    pins = constraints(args.torch, () if args.pinned else OLDEST)
    state = State(home / "state.json", hashlib.sha256(pins.encode()).hexdigest(), commit())
    python = install(home, pins, state)
    versions = installed(python)
    print(f"seed {args.seed}; {versions}; {python}", flush=True)
    results = run_parts(parts(python), state, {**os.environ, "PYTHONHASHSEED": str(args.seed)})
    setting = f"`versions --torch {args.torch}{' --pinned' if args.pinned else ''}`"
    line = f"{versions}, seed {args.seed}: {'; '.join(f'{name} {text}' for name, text in results.items())}"
    record(setting, line, state.commit)
    print(line)
    return int(any("failed" in text for text in results.values()))


def default_home() -> Path:
    """Return the folder of the environments, in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "distributed-trainer" / "versions"


def commit() -> str:
    """Short hash of HEAD, with ``-dirty`` where a file but the page differs from it."""
    changed = output(
        "git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/test-times.md"
    )
    return output("git", "rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")


def output(*command: str) -> str:
    """Return the output of a command."""
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


class State:
    """What has been done in an environment, in a file beside it.

    Attributes:
        passed: part -> its result.
    """

    def __init__(self, path: Path, pins: str, commit: str) -> None:
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.path, self.pins, self.commit = path, pins, commit
        self.installed = found.get("pins") == pins
        same = self.installed and found.get("commit") == commit and not commit.endswith("-dirty")
        self.passed: dict[str, str] = found["passed"] if same else {}

    def save(self) -> None:
        """Write the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        found = {"commit": self.commit, "passed": self.passed}
        self.path.write_text(json.dumps({**found, "pins": self.pins if self.installed else ""}, indent=1))


def lower_bounds() -> dict[str, str]:
    """Lower-case name -> lower bound in pyproject.toml, of every requirement that has one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [
        *project["dependencies"],
        *(x for extra in project["optional-dependencies"].values() for x in extra),
    ]
    found = (re.fullmatch(r"([\w.-]+)(?:\[.*\])?>=([\d.]+)", line) for line in lines)
    return {match[1].lower(): match[2] for match in found if match}


def constraints(torch: str, oldest: Iterable[str], pins: str | None = None) -> str:
    """Text of a constraints file with this torch.

    Args:
        oldest: packages in the oldest admitted minor release instead of the pinned one.
        pins: text of constraints.txt, instead of the file.
    """
    bounds = lower_bounds()
    low = {name: f"{'.'.join([*bounds[name].split('.'), '0'][:2])}.*" for name in oldest}
    lines = [f"torch=={torch}"]
    for line in (PINS.read_text() if pins is None else pins).split():
        name, _, pinned = line.partition("==")
        if name.lower() in low:
            lines.append(f"{name}=={low[name.lower()]}")
        elif name not in FREE:
            lines.append(f"{name}=={pinned}")
    return "\n".join(lines) + "\n"


def install(home: Path, pins: str, state: State) -> Path:
    """Make the environment, unless it is there with these pins; its Python. What fits other pins stays."""
    python, file = home / "venv" / "bin" / "python", home / "constraints.txt"
    if state.installed and python.exists():
        return python
    state.installed = False
    state.save()
    file.write_text(pins)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    print(f"set-up: {home}; a torch with CUDA takes gigabytes", flush=True)
    if not python.with_name("pip").exists():
        subprocess.run([sys.executable, "-m", "venv", str(home / "venv")], check=True)
    subprocess.run([*pip, *(line for line in pins.split() if line.startswith("pip=="))], check=True)
    # torch first, and named in the constraints: no requirement can bring another.
    for words in (["torch"], ["-e", f"{ROOT}[torch]", *TOOLS]):
        subprocess.run([*pip, "-c", str(file), *words], check=True)
    state.installed = True
    state.save()
    return python


def installed(python: Path) -> str:
    """Versions in the environment."""
    code = f"from importlib.metadata import version; print(*(version(name) for name in {('torch', *OLDEST)}))"
    found = zip(("torch", *OLDEST), output(str(python), "-c", code).split(), strict=True)
    return ", ".join(
        [f"Python {platform.python_version()}", *(f"{name} {version}" for name, version in found)]
    )


def parts(python: Path) -> list[Part]:
    """What is run, in this order."""
    pytest = (str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider")
    core = ("tests/config", "tests/registry", "tests/planner/test_batch.py")
    types = (sys.executable, "-m", "mypy", "--python-version", "3.12")
    return [
        Part("configuration, registry, planner", (*pytest, *core)),
        Part("dry run of test-gpu", (*pytest, "tests/gpu/test_dry_run.py")),
        Part("contracts", (*pytest, "tests/contracts/test_builtin_conformance.py", "-k", BACKENDS)),
        Part("types for Python 3.12", types),
    ]  # fmt: skip


def run_parts(parts: Iterable[Part], state: State, env: Mapping[str, str]) -> dict[str, str]:
    """Part -> its result. Those that have passed on this commit are not run again."""
    # The environment's own packages alone: nothing of a path that the caller has set.
    env = {name: value for name, value in env.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    results = {}
    for part in parts:
        if part.name not in state.passed:
            print(f"== {part.name}: {' '.join(part.command)}", flush=True)
            results[part.name], code = run(part.command, env)
            if code == 0:
                state.passed[part.name] = results[part.name]
                state.save()
        else:
            results[part.name] = state.passed[part.name]
        print(f"== {part.name}: {results[part.name]}", flush=True)
    return results


def run(command: Sequence[str], env: Mapping[str, str]) -> tuple[str, int]:
    """(what the last line of its output says, its exit code)."""
    last = ""
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            last = line.strip("= \n") or last
    said = last.removeprefix("Success: ")
    return (
        said if process.returncode == 0 else f"failed (exit code {process.returncode}): {said}"
    ), process.returncode


def record(setting: str, result: str, commit: str, page: Path = PAGE) -> None:
    """Put the line into the page, in the place of one about the same setting and commit."""
    text = (
        page.read_text(encoding="utf-8")
        if page.exists()
        else "# Times of the tests\n\nWhat the tests cost.\n"
    )
    if "## Long runs\n" not in text:
        text = f"{text.rstrip()}\n\n## Long runs\n"
    head, _, rest = text.partition("## Long runs\n")
    section, heading, tail = rest.partition("\n## ")
    begin = f"- {setting}, commit `{commit}`, "
    lines = [line for line in section.strip().splitlines() if not line.startswith(begin)]
    lines.append(f"{begin}{datetime.date.today()}: {result}.")
    body = "\n".join(lines)
    page.write_text(f"{head}## Long runs\n\n{body}\n{heading}{tail}", encoding="utf-8")


def print_newest() -> int:
    """Pins beside the newest releases of the index; a report, whose exit code is 0."""
    pinned = dict(line.lower().split("==") for line in PINS.read_text().split())
    for name in REPORTED:
        command = [sys.executable, "-m", "pip", "index", "versions", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = re.match(rf"{name} \(([^)]+)\)", done.stdout)
        newest = found[1] if found else "not on the index"
        print(f"{name:<14} {pinned[name]:<10} {'newest' if newest == pinned[name] else newest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
