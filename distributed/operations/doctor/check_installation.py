"""Checks of the installation: versions, import names, plugins. Imports none of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata, util
from pathlib import Path

from distributed.operations.doctor import Finding
from distributed.operations.doctor.preflight_facts import installed_versions
from distributed.registry.catalog import Catalog, get_catalog, missing_modules

__all__ = ["TESTED", "backends", "import_name", "kernels_name", "packages", "plugins", "python"]

DISTRIBUTION = "distributed-trainer"

# The newest releases that the tests ran with: the lines of constraints.txt about what a user chooses; a test
# compares the two. The oldest are the lower bounds in pyproject.toml, which the metadata has.
TESTED = {
    "cloudpickle": "3.1.2",
    "deepspeed": "0.19.8",
    "keras": "3.15.1",
    "mlflow": "3.17.2",
    "numpy": "2.4.6",
    "pluggy": "1.7.0",
    "psutil": "7.2.2",
    "pydantic": "2.14.3",
    "PyYAML": "6.0.3",
    "ray": "2.60.0",
    "rich": "15.0.0",
    "scikit-learn": "1.9.1",
    "tensorboard": "2.21.0",
    "tensorflow": "2.21.0",
    "torch": "2.13.0",
}


def python() -> Iterator[Finding]:
    """The interpreter is a tested one."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= (3, 13):
        yield Finding("python", "warn", f"{version} is newer than what was tested", "Use Python 3.11 or 3.12")
    else:
        yield Finding("python", "ok", version)


def packages(installed: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Installed packages against the oldest and the newest releases that the tests ran with.

    Args:
        installed: name to version, instead of what is installed here.
    """
    found = installed_versions(TESTED) if installed is None else installed
    oldest, needed = _oldest_releases()
    for name, newest in TESTED.items():
        version, remedy = found.get(name), f"pip install '{name}=={newest}'"
        if version is None:
            if name.lower() in needed:
                yield Finding(name, "error", "not installed, and nothing works without it", remedy)
        elif outside := _untested(version, oldest.get(name.lower()), newest):
            yield Finding(name, "warn", f"{version} is {outside}", f"If it gives trouble: {remedy}")
        else:
            yield Finding(name, "ok", version)


def import_name(owners: Iterable[str] | None = None) -> Iterator[Finding]:
    """No other distribution owns the import name ``distributed``; Dask's package has the same.

    Args:
        owners: distributions that install a top-level ``distributed``, instead of those here.
    """
    found = metadata.packages_distributions().get("distributed", []) if owners is None else owners
    others = sorted(set(found) - {DISTRIBUTION})
    if not others:
        yield Finding("import name", "ok", f"`distributed` is ours, in {_home()}")
        return
    yield Finding(
        "import name",
        "error",
        f"{', '.join(others)} also owns the import name `distributed`; files of both are mixed",
        f"Use an environment without {others[0]} (Dask), or: pip uninstall {' '.join(others)}"
        f" && pip install --force-reinstall --no-deps {DISTRIBUTION}",
    )


def kernels_name() -> Iterator[Finding]:
    """The import name ``kernels`` is left to Hugging Face's package of that name."""
    spec = util.find_spec("kernels")
    owners = metadata.packages_distributions().get("kernels", [])
    beside_us = spec is not None and spec.origin is not None and Path(spec.origin).parent.parent == _home()
    if DISTRIBUTION in owners or (beside_us and not owners):
        yield Finding(
            "kernels",
            "error",
            "our folder took the import name `kernels` of Hugging Face's package",
            f"Remove {_home() / 'kernels' / '__init__.py'}",
        )
    else:
        owner = f"belongs to {', '.join(owners)}" if owners else "is free for Hugging Face's package"
        yield Finding("kernels", "ok", f"the import name `kernels` {owner}")


def plugins(catalog: Catalog | None = None) -> Iterator[Finding]:
    """Every plugin can be loaded."""
    broken = (catalog or get_catalog()).broken
    if not broken:
        yield Finding("plugins", "ok", "all could be loaded")
    for plugin in broken:
        remedy = f"Fix, update or uninstall {plugin.origin.partition(' (')[0]}"
        yield Finding(f"plugin {plugin.name}", "error", plugin.error, remedy)


def backends(catalog: Catalog | None = None) -> Iterator[Finding]:
    """The requirements of each backend are installed."""
    for name, spec in sorted((catalog or get_catalog()).backends.items()):
        missing = missing_modules(spec.requires)
        if missing:
            message = f"cannot be chosen: {', '.join(missing)} is not installed"
            yield Finding(f"backend {name}", "warn", message, spec.install_hint)
        else:
            yield Finding(f"backend {name}", "ok", "can be chosen")


def _home() -> Path:
    spec = util.find_spec("distributed")
    return Path(spec.origin).parent.parent if spec and spec.origin else Path()


def _untested(version: str, oldest: str | None, newest: str) -> str:
    """Return how `version` differs from the tested releases, empty if it is one. Patch releases of the
    newest count as tested, and without a lower bound the newest is the oldest, too."""
    oldest = oldest or ".".join(newest.split(".")[:2])
    if _release(version) < _release(oldest):
        return f"older than the oldest version that the tests ran with ({oldest})"
    if _release(version)[:2] > _release(newest)[:2]:
        return f"newer than the newest version that the tests ran with ({newest})"
    return ""


def _oldest_releases() -> tuple[dict[str, str], set[str]]:
    """Lower bound by lower-case name, and the names that are needed without any extra."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return {}, set()
    floors, needed = {}, set()
    for line in lines:
        match = re.match(r"([\w.-]+)(?:\[[^\]]*\])?>=([\d.]+)", line)
        if match:
            floors[match[1].lower()] = match[2]
            if "extra ==" not in line:
                needed.add(match[1].lower())
    return floors, needed


def _release(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` -> ``(2, 13, 0)``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
