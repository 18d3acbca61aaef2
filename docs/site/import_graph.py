"""The import graph of the project: circles of modules, and a figure of the core's packages.

    python -m docs.site.import_graph             # list circles; exit status 1 if there is one
    python -m docs.site.import_graph --svg       # the packages of `distributed` as a figure

Imports inside functions and under ``TYPE_CHECKING`` count as well. Nothing is imported: the source is read.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from docs.site.import_figure import draw

ROOT = Path(__file__).parents[2]
PACKAGES = (
    ROOT / "distributed",
    ROOT / "backends" / "distributed_backends",
    ROOT / "plugins" / "distributed_plugins",
    ROOT / "kernels" / "distributed_kernels",
)

Graph = dict[str, set[str]]
"""Module -> modules that it imports."""


def import_graph(packages: Iterable[Path] = PACKAGES) -> Graph:
    """The imports between the modules of `packages`.

    An import of a module does not count as one of the packages around it. The public face of a package, its
    lazy names, is left out: an ``__init__.py`` that loads them when they are used imports nothing by itself.
    """
    files = {_module(path, package): path for package in packages for path in sorted(package.rglob("*.py"))}
    return {module: _imports(module, path, files) for module, path in files.items()}


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph.get(module, ())):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            start = stack.index(module)
            group = stack[start:]
            del stack[start:]
            if len(group) > 1 or module in graph.get(module, ()):
                found.append(sorted(group))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return found


def package_edges(graph: Graph, package: str = "distributed") -> Graph:
    """The packages and files at the top of `package`, and what they import.

    An edge that follows from a longer way is left out.
    """
    edges: Graph = {}
    for module, others in graph.items():
        source = _top(module, package)
        if source is None:
            continue
        targets = {_top(other, package) for other in others} - {None, source}
        edges.setdefault(source, set()).update(target for target in targets if target)
    reached = {source: {end for target in edges[source] for end in _reach(edges, target)} for source in edges}
    return {source: edges[source] - reached[source] for source in edges}


def _module(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(module: str, path: Path, known: Mapping[str, Path]) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in _eager(tree) if _is_lazy(tree) else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in known else node.module)
    return (found & set(known)) - {module}


def _is_lazy(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)


def _eager(tree: ast.Module) -> list[ast.stmt]:
    """The statements at the top, without those under ``TYPE_CHECKING``, which name what is lazy."""
    return [node for node in tree.body if not isinstance(node, ast.If)]


def _top(module: str, package: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == package and len(parts) > 1 else None


def _reach(edges: Graph, start: str) -> set[str]:
    """Nodes reachable from `start`, without itself."""
    found: set[str] = set()
    waiting = [*edges.get(start, ())]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += edges.get(module, ())
    return found


def main(words: list[str] | None = None) -> int:
    """Print circles or the figure; the exit status is 1 when there is a circle."""
    parser = argparse.ArgumentParser(prog="python -m docs.site.import_graph", description=__doc__)
    parser.add_argument("--svg", action="store_true", help="Print the packages of the core as an SVG.")
    graph = import_graph()
    if parser.parse_args(words).svg:
        print(draw(package_edges(graph)), end="")
        return 0
    found = circles(graph)
    for group in found:
        print("circle: " + ", ".join(group))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
