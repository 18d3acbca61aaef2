"""No file of the project imports another that imports it back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.site import import_graph
from docs.site.import_figure import draw
from docs.site.import_graph import circles, package_edges


def test_no_circle_of_modules() -> None:
    graph = import_graph.import_graph()
    assert len(graph) > 250
    assert "distributed.planner.resolve" in graph["distributed.trainer"]
    assert circles(graph) == []


def test_a_circle_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one through a typed import and an import inside a function."""
    package = tmp_path / "house"
    package.mkdir()
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house import"
    sources = {
        "__init__": "",
        "a": f"{typed} b\n",
        "b": "def f():\n    from house.c import x\n",
        "c": "import house.a\nx = 1\n",
        "d": "import house.a, os\n",
    }
    for name, text in sources.items():
        (package / f"{name}.py").write_text(text)
    graph = import_graph.import_graph([package])
    assert circles(graph) == [["house.a", "house.b", "house.c"]]
    monkeypatch.setattr(import_graph, "PACKAGES", (package,))
    monkeypatch.setattr(import_graph, "import_graph", lambda: graph)
    assert import_graph.main([]) == 1
    assert "house.a, house.b, house.c" in capsys.readouterr().out


def test_the_figure_leaves_out_what_follows() -> None:
    graph = {"p.a": {"p.b.x", "p.c"}, "p.b.x": {"p.c"}, "p.c": set(), "other.m": {"p.a"}}
    edges = package_edges(graph, "p")
    assert edges == {"a": {"b"}, "b": {"c"}, "c": set()}
    svg = draw(edges)
    heights = [int(re.search(rf'y="(\d+)"[^>]*/><text[^>]*>{name}<', svg)[1]) for name in "abc"]  # type: ignore[index]
    assert heights == sorted(set(heights))
    assert svg.count("<path") == 2
