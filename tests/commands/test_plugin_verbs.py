"""Verbs and backends that third-party plugins add to the command line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import commands

PLUGIN = """
from distributed.registry.hookspecs import hookimpl
from distributed.interfaces.backend_spec import BackendSpec

@hookimpl
def register_backends():
    hint = "pip install 'acme[all]'"
    return [BackendSpec(name="acme", target="acme:Backend", requires=("nobody_has_this",), install_hint=hint)]

@hookimpl
def register_commands(subparsers):
    parser = subparsers.add_parser("greet", help="Says hello.")
    parser.add_argument("--name", default="you")
    parser.set_defaults(run=lambda args: print("hello", args.name) or 7)
"""
RAISES = """
from distributed.registry.hookspecs import hookimpl

@hookimpl
def register_commands(subparsers):
    raise ZeroDivisionError("no verbs today")
"""
ENTRY_POINTS = "[distributed.plugins]\nacme = acme\nacme-raises = acme_raises\nacme-absent = acme_absent\n"

SESSION = """
import sys
from distributed.cli import main
try:
    main(["--help"])
except SystemExit as end:
    print("help:", end.code)
print("greet:", main(["greet", "--name", "Ada"]))
print("typo:", main(["gret"]))
print("backends:", main(["backends"]))
print("json:", main(["backends", "--json"]))
"""


@pytest.mark.starts_processes
def test_plugins_add_verbs_and_backends_and_a_broken_one_breaks_nothing(
    make_distribution: Callable[..., Path],
) -> None:
    site = make_distribution("acme-tools", {"acme": PLUGIN, "acme_raises": RAISES}, ENTRY_POINTS)
    done = commands.run(
        [sys.executable, "-c", SESSION],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        timeout=120,
        check=True,
    )
    out = done.stdout
    assert "Says hello." in out
    assert "help: 0" in out
    assert "hello Ada\ngreet: 7" in out
    assert "typo: 2" in out
    assert "Did you mean 'greet'?" in done.stderr
    row = next(line for line in out.splitlines() if line.strip().startswith("acme "))
    assert "misses nobody_has_this: pip install 'acme[all]'" in row
    assert row.rstrip().endswith("acme-tools 1.2")
    assert "ZeroDivisionError: no verbs today" in out
    report = json.loads(out[out.index('{\n  "backends"') : out.index("json: 0")])
    acme = next(backend for backend in report["backends"] if backend["name"] == "acme")
    assert acme["installed"] is False
    assert acme["missing"] == ["nobody_has_this"]
    assert {"multi_process", "fp32", "clipping"} <= set(acme["capabilities"])
    assert {"acme-raises", "acme-absent"} <= {plugin["name"] for plugin in report["broken"]}
