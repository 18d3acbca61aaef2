"""``backends``: list installed backends, their capabilities, and broken plugins."""

from __future__ import annotations

import argparse
from dataclasses import fields
from importlib.metadata import entry_points
from typing import Any

from distributed.commands.tables import print_json, print_table
from distributed.interfaces.backend_spec import BackendSpec, Capabilities
from distributed.registry.catalog import GROUPS, Catalog, get_catalog, missing_modules

__all__ = ["add_arguments", "describe", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``backends``."""
    parser.add_argument("--json", action="store_true", help="Print JSON instead of a table.")


def run(args: argparse.Namespace) -> int:
    """Print every backend and every broken plugin; always 0, `doctor` is the one that judges."""
    catalog = get_catalog()
    found = [describe(spec, catalog) for _, spec in sorted(catalog.backends.items())]
    broken = [{"name": b.name, "origin": b.origin, "error": b.error} for b in catalog.broken]
    if args.json:
        print_json({"backends": found, "broken": broken})
        return 0
    print_table(
        ["backend", "framework", "installed", "capabilities", "from"],
        [[d["name"], d["framework"], _state(d), ", ".join(d["capabilities"]), d["origin"]] for d in found],
        ["" if d["installed"] else "dim" for d in found],
    )
    if broken:
        print_table(
            ["broken plugin", "error", "from"], [[b["name"], b["error"], b["origin"]] for b in broken]
        )
    return 0


def describe(spec: BackendSpec, catalog: Catalog) -> dict[str, Any]:
    """A backend as JSON-able values, with what it misses here."""
    missing = missing_modules(spec.requires)
    return {
        "name": spec.name,
        "framework": spec.framework,
        "summary": spec.summary,
        "installed": not missing,
        "missing": missing,
        "install_hint": spec.install_hint,
        "capabilities": capability_words(spec.capabilities),
        "origin": _distribution(catalog.origins[spec.name]),
    }


def capability_words(capabilities: Capabilities) -> list[str]:
    """Capabilities of a backend, one word per switch and per member of a set."""
    words = []
    for field in fields(capabilities):
        value = getattr(capabilities, field.name)
        if isinstance(value, frozenset):
            prefix = "zero-" if field.name == "zero_stages" else ""
            words += [f"{prefix}{member}" for member in sorted(value)]
        elif value:
            words.append(field.name)
    return words


def _state(described: dict[str, Any]) -> str:
    if described["installed"]:
        return "yes"
    hint = f": {described['install_hint']}" if described["install_hint"] else ""
    return f"misses {', '.join(described['missing'])}{hint}"


def _distribution(plugin: str) -> str:
    """The distribution whose entry point is called `plugin`, or `plugin` itself."""
    for group in GROUPS:
        for point in entry_points(group=group, name=plugin):
            if point.dist is not None:
                return f"{point.dist.name} {point.dist.version}"
    return plugin
