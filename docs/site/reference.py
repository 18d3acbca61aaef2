"""The API reference: which names are public, the overview in ``docs/reference.md``, and the site's pages.

On the site every name has its signature and whole docstring. On the repository's web page the overview
has each name's first sentence and leads to the file. Everything is read from the source; nothing is
imported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import griffe

__all__ = ["GROUPS", "Group", "Name", "group_page", "overview", "public_names"]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Group:
    """One page of the reference.

    Attributes:
        slug: name of its file under ``reference/``, without the suffix.
        title: heading.
        modules: whose public names it has, in this order; ``x.*`` for all modules in a package.
    """

    slug: str
    title: str
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Name:
    """One public name.

    Attributes:
        path: import path: ``distributed.Trainer``.
        summary: the first paragraph of its docstring; of a constant without one, its value.
        source: the file that defines it, relative to the repository.
    """

    path: str
    summary: str
    source: str

    @property
    def name(self) -> str:
        """Without its module: ``Trainer``."""
        return self.path.rpartition(".")[2]


_KIT = ("conformance", "suite", *(f"contracts.{name}" for name in ("step", "run", "claim", "failure")))
_TOOLS = (
    *("oracle", "reference_problem", "workbench", "torch_workbench", "tensorflow_workbench", "rank_pool"),
    *("parity.measure", "parity.diagnosis"),
)
_BASES = (
    "distributed.training.process_group_backend",
    "distributed.training.torch_backend",
    "distributed.registry.catalog",
)
GROUPS = (
    Group("distributed", "distributed", ("distributed",)),
    Group("configuration", "Configuration", ("distributed.config",)),
    Group("interfaces", "Interfaces", ("distributed.interfaces.*",)),
    Group("hooks", "Hooks", ("distributed.registry.hookspecs",)),
    Group("bases", "Bases for backends", _BASES),
    Group("testing", "Testing", tuple(f"distributed.testing.{name}" for name in (*_KIT, *_TOOLS))),
    Group("kernels", "Kernels", ("distributed_kernels",)),
)
"""The pages of the reference, in the order of the navigation."""


@cache
def _modules() -> griffe.ModulesCollection:
    loader = griffe.GriffeLoader(search_paths=[ROOT, ROOT / "kernels"])
    for package in ("distributed", "distributed_kernels"):
        loader.load(package)
    loader.resolve_aliases(implicit=True, external=False)
    return loader.modules_collection


def modules_of(group: Group) -> dict[str, list[Name]]:
    """The public names of `group`, by module; modules without any are left out."""
    paths: list[str] = []
    for pattern in group.modules:
        package = _modules()[pattern.removesuffix(".*")]
        inside = sorted(m.path for m in package.modules.values() if not m.name.startswith("test_"))
        paths += inside if pattern.endswith(".*") else [package.path]
    return {path: names for path in paths if (names := public_names(path))}


def public_names(module: str) -> list[Name]:
    """The public names of `module`: its hooks, if it specifies any, and its ``__all__``."""
    found = _modules()[module]
    hooks = [
        f.name for f in found.functions.values() if any(str(d.value) == "hookspec" for d in f.decorators)
    ]
    names = [*hooks, *(str(name) for name in found.exports or ())]
    return [_name(found, name) for name in names if not name.startswith("__")]


def _name(module: griffe.Object, name: str) -> Name:
    member = module.members[name]
    target = member.final_target if isinstance(member, griffe.Alias) else member
    text = target.docstring.value if target.docstring else ""
    if not text and isinstance(target, griffe.Attribute):
        text = f"`{target.value}`"
    summary = " ".join(text.split("\n\n")[0].split())
    source = Path(str(target.filepath)).relative_to(ROOT)
    return Name(f"{module.path}.{name}", summary, str(source))


def overview(on_site: bool = False) -> str:
    """What ``docs/reference.md`` has below its head: a table a module. Names lead to the files that
    define them; on the site, to their docstrings."""
    parts = []
    for group in GROUPS:
        parts.append(f"## {group.title}\n")
        modules = modules_of(group)
        for module, names in modules.items():
            if len(modules) > 1:
                parts.append(f"### {module}\n")
            rows = [
                _row(name, f"reference/{group.slug}.md#{name.path}" if on_site else None) for name in names
            ]
            parts.append("| name | |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _row(name: Name, link: str | None) -> str:
    summary = name.summary.replace("|", "\\|").replace("``", "`")
    summary = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", summary)
    return f"| [`{name.name}`]({link or f'../{name.source}'}) | {summary} |"


def group_page(group: Group) -> str:
    """The page of the site for `group`, in which each name's docstring is asked for."""
    parts = [f"# {group.title}\n"]
    modules = modules_of(group)
    for module, names in modules.items():
        if len(modules) > 1:
            parts.append(f"## {module}\n\n{_summary(module)}\n")
        level = 3 if len(modules) > 1 else 2
        parts += [f"::: {name.path}\n    options:\n      heading_level: {level}\n" for name in names]
    return "\n".join(parts)


def _summary(module: str) -> str:
    docstring = _modules()[module].docstring
    return str(docstring.value).split("\n\n")[0] if docstring else ""
