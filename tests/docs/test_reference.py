"""The API reference has every public name, and every public name says what it is."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

import griffe
import pytest

import distributed
from distributed.registry import hookspecs
from docs.site.reference import GROUPS, modules_of, public_names

ROOT = Path(__file__).parents[2]
LISTED = {name.path: name for group in GROUPS for names in modules_of(group).values() for name in names}


def test_the_top_level_names_are_all_there() -> None:
    public = {f"distributed.{name}" for name in distributed.__all__ if name != "__version__"}
    assert public <= set(LISTED)


@pytest.mark.parametrize(
    "module",
    [
        "distributed.config",
        "distributed.training.process_group_backend",
        "distributed.training.torch_backend",
        "distributed.registry.catalog",
        "distributed.testing.conformance",
        "distributed.testing.workbench",
        "distributed_kernels",
        *(f"distributed.interfaces.{p.stem}" for p in (ROOT / "distributed/interfaces").glob("[a-z]*.py")),
    ],
)
def test_a_modules_names_are_all_there(module: str) -> None:
    """What is read from the source is what Python would import."""
    names = set(import_module(module).__all__)
    assert {name.name for name in public_names(module)} == names
    assert {f"{module}.{name}" for name in names} <= set(LISTED)


def test_hooks_are_there() -> None:
    hooks = {name for name, value in vars(hookspecs).items() if hasattr(value, "distributed_spec")}
    assert len(hooks) > 6
    assert {f"distributed.registry.hookspecs.{hook}" for hook in hooks} <= set(LISTED)


def test_every_name_is_documented() -> None:
    assert [path for path, name in LISTED.items() if not name.summary] == []


def undocumented(package: griffe.Module) -> list[str]:
    """Public functions, classes and methods of the reference in `package` without a docstring."""
    found = []
    for name in LISTED.values():
        if not name.path.startswith(f"{package.name}."):
            continue
        member = package[name.path.partition(".")[2]]
        target = member.final_target if isinstance(member, griffe.Alias) else member
        methods = target.functions.values() if isinstance(target, griffe.Class) else ()
        found += [f.path for f in (target, *methods) if not f.name.startswith("_") and not _has_words(f)]
    return found


def _has_words(member: griffe.Object) -> bool:
    # A method that only fills in its base's says nothing new; an overload speaks for the first.
    overrides = bool(member.parent and isinstance(member.parent, griffe.Class) and member.parent.bases)
    return isinstance(member, griffe.Attribute) or bool(member.docstring) or overrides


@pytest.mark.parametrize("package", ["distributed", "distributed_kernels"])
def test_every_class_function_and_method_is_documented(package: str) -> None:
    loader = griffe.GriffeLoader(search_paths=[ROOT, ROOT / "kernels"])
    loaded = loader.load(package)
    loader.resolve_aliases(implicit=True, external=False)
    assert isinstance(loaded, griffe.Module)
    assert undocumented(loaded) == []


def test_docstrings_are_those_of_the_source() -> None:
    words = " ".join((inspect.getdoc(distributed.Trainer) or "").split("\n\n")[0].split())
    assert LISTED["distributed.Trainer"].summary == words
