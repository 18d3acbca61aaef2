"""The built site: every link leads somewhere, nothing comes from elsewhere, every page can be reached."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from docs.site import build as builder
from docs.site.stage import Stage

ROOT = Path(__file__).parents[2]
LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("form", "action")}
"""Attributes from which a browser fetches something by itself; of `link`, by its relation."""


class Page(HTMLParser):
    """What one page links to, loads and can be linked at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note one tag."""
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        self.loads |= {given[name] for kind, name in LOADED if kind == tag and name in given}
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect", "manifest"):
            self.loads.add(given["href"])


def read(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def broken(pages: dict[Path, Page]) -> list[str]:
    """Links and loads within the site that lead nowhere; the page that says so first."""
    found = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are those of a server's root
        for target in page.links | page.loads:
            if re.match(r"[a-z]+:", target):
                continue
            place, anchor = urldefrag(unquote(target))
            there = (path.parent / place).resolve() if place else path
            known = not anchor or there not in pages or anchor in pages[there].places
            if not there.exists() or not known:
                found.append(f"{path.name}: {target}")
    return found


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[Path, Page]:
    """Every page of the site, read."""
    return read(site.resolve())


def test_every_link_leads_somewhere(pages: dict[Path, Page]) -> None:
    assert len(pages) > 40
    assert broken(pages) == []


def test_links_that_lead_nowhere_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#there">fine</a><a href="b.html#gone">no</a><a href="c.html">no</a>'
    )
    (tmp_path / "b.html").write_text('<h2 id="there">There</h2><img src="no.png">')
    assert sorted(broken(read(tmp_path))) == ["a.html: b.html#gone", "a.html: c.html", "b.html: no.png"]


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert [u for u in page.loads if re.match(r"(https?:)?//", u)] == [], path.name
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import )[\"']?https?:", style.read_text(encoding="utf-8")) == []


def test_every_page_can_be_reached_from_the_first(site: Path, pages: dict[Path, Page]) -> None:
    home = site.resolve() / "index.html"
    seen, todo = {home}, [home]
    while todo:
        path = todo.pop()
        targets = {urldefrag(link)[0] for link in pages[path].links if not re.match(r"[a-z]+:", link)}
        near = {(path.parent / target).resolve() for target in targets if target} & set(pages)
        todo += near - seen
        seen |= near
    assert {p.name for p in set(pages) - seen} <= {"404.html"}


def test_the_site_holds_what_the_repository_has(site: Path) -> None:
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").is_file()
    readme = (site / "project" / "readme.html").read_text(encoding="utf-8")
    assert "same configuration means the same training" in readme
    assert '<a href="../getting-started.html">' in readme
    loop = (site / "source" / "distributed" / "training" / "loop.py.html").read_text(encoding="utf-8")
    assert "optimizer_step" in loop


def test_signatures_and_docstrings_are_in_the_reference(site: Path) -> None:
    page = (site / "reference" / "distributed.html").read_text(encoding="utf-8")
    assert 'id="distributed.Trainer.fit"' in page
    assert "training samples" in page.lower() or "train_loader" in page


def test_a_link_in_code_is_no_link(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    text = "[a](data.md) `[b](gone.md)`\n```python\nx[0](gone.md)\n```\n[c](../examples/own_loop.py)"
    changed = stage._linked(text, ROOT / "docs", "training.md")
    assert "`[b](gone.md)`" in changed
    assert "x[0](gone.md)" in changed
    assert "[a](data.md)" in changed
    assert "[c](source/examples/own_loop.py.md)" in changed


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("wrong", "said"),
    [("[x](#nowhere)", "anchor does not exist"), ("[x](gone.md)", "page does not exist")],
)
def test_a_page_that_is_wrong_fails_the_build(wrong: str, said: str, tmp_path: Path) -> None:
    """The builder itself, as `build` starts it."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Home\n\n{wrong}\n")
    config = Path(builder.__file__).with_name("mkdocs.yml").read_text(encoding="utf-8")
    (tmp_path / "mkdocs.yml").write_text(config.replace("extra_css", "extra_unused"))
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "-f", str(tmp_path / "mkdocs.yml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert said in re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)


def test_a_picture_is_copied_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "plot.png").write_bytes(b"\x89PNG")
    monkeypatch.setattr("docs.site.stage.ROOT", tmp_path)
    monkeypatch.setattr("docs.site.stage.GUIDE", tmp_path / "docs")
    changed = Stage(tmp_path / "out")._linked("![a](plot.png)", tmp_path / "docs", "deep/page.md")
    assert changed == "![a](../plot.png)"
    assert (tmp_path / "out" / "plot.png").read_bytes() == b"\x89PNG"


def test_a_link_out_of_the_guide_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Stage(tmp_path)._linked("[x](../examples/none.py)", ROOT / "docs", "training.md")
