"""Lays out what the site is built from: the guide, the pages around it, and the API reference.

The pages under ``docs/`` are read on the repository's web page too, so that they link to files outside
of ``docs/`` as those lie in the repository. A site has only what is put into it. Here such a file
becomes a page of the site, and the link leads to that page:

- ``docs/x.md`` stays ``x.md``;
- another Markdown file, such as the README, becomes a page under ``project/``;
- another file becomes a page under ``source/`` that shows it;
- a picture or a page of HTML is copied as it is;
- a folder becomes a page that lists what is in it.

The navigation is that of ``docs/index.md``: each heading is a section, each linked row a page.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from docs.site.reference import GROUPS, group_page, overview

__all__ = ["ROOT", "Stage", "navigation"]

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs"
_LINK = re.compile(
    r"(?P<code>^( *)```.*?^\2```$|`[^`\n]+`)|\]\((?P<target>[^)\s]+)\)", re.MULTILINE | re.DOTALL
)
"""A link. Code is matched first: what looks like a link there is none."""
_ROW = re.compile(r"^\| \[(?P<title>[^\]]+)\]\((?P<target>[^)]+)\)", re.MULTILINE)
_AS_THEY_ARE = {".png", ".svg", ".jpg", ".gif", ".webp", ".html"}
_REFERENCE = GUIDE / "reference.md"
_LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash"}


class Stage:
    """A folder of Markdown in which every link leads to a page of the same folder.

    Args:
        folder: output folder for the pages; it should be empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._placed: dict[Path, str] = {}

    def fill(self) -> list[Any]:
        """Write all pages; returns the navigation, as MkDocs writes it."""
        for page in sorted(GUIDE.rglob("*.md")):
            self.place(page)
        for group in GROUPS:
            self._write(f"reference/{group.slug}.md", group_page(group))
        return navigation((GUIDE / "index.md").read_text(encoding="utf-8"), self)

    def place(self, path: Path) -> str:
        """The page, relative to the stage, that holds the repository's file or folder `path`.

        Raises:
            FileNotFoundError: there is no such file.
        """
        if path.suffix in _AS_THEY_ARE:
            return self._copy(path)
        if path not in self._placed:
            page, text = _page_of(path)
            self._placed[path] = page  # before its links are followed: pages link to each other
            if path == _REFERENCE:
                # In the repository names lead to files; here, to their docstrings.
                text = text[: text.index("\n## ") + 1] + overview(on_site=True)
            else:
                text = self._linked(text, path if path.is_dir() else path.parent, page)
            self._write(page, text)
        return self._placed[path]

    def _copy(self, path: Path) -> str:
        place = path.relative_to(GUIDE if path.is_relative_to(GUIDE) else ROOT).as_posix()
        (self.folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, self.folder / place)
        return place

    def _linked(self, text: str, folder: Path, page: str) -> str:
        def replace(match: re.Match[str]) -> str:
            target = match["target"]
            if target is None or re.match(r"[a-z]+:|#", target):
                return match[0]
            path, _, anchor = target.partition("#")
            there = self.place((folder / path).resolve())
            relative = os.path.relpath(there, os.path.dirname(page) or ".")
            return f"]({relative}#{anchor})" if anchor else f"]({relative})"

        return _LINK.sub(replace, text)

    def _write(self, page: str, text: str) -> None:
        path = self.folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _page_of(path: Path) -> tuple[str, str]:
    """Where the repository's `path` goes, and its text with links as they are in the repository."""
    place = path.relative_to(ROOT)
    if path.is_dir():
        if (path / "README.md").is_file():
            return _page_of(path / "README.md")
        inside = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
        rows = "\n".join(f"- [{_title(p)}]({p.name})" for p in inside)
        return f"{_under_guide(path)}/contents.md", f"# {place.name.capitalize()}\n\n{rows}\n"
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".md":
        language = _LANGUAGES.get(path.suffix, "text")
        head = f"---\nsearch:\n  exclude: true\n---\n# `{place}`\n\n"
        return f"source/{place}.md", f"{head}````{language}\n{text}````\n"
    return (f"{_under_guide(path.with_suffix(''))}.md", text)


def _under_guide(path: Path) -> str:
    if path.is_relative_to(GUIDE):
        return path.relative_to(GUIDE).as_posix()
    # An `index` or a README gives its name to the folder's own address; these are pages like others.
    return f"project/{path.relative_to(ROOT).as_posix().lower()}"


def _title(path: Path) -> str:
    if path.suffix != ".md":
        return f"`{path.name}`"
    return re.sub(r"^#+ *", "", path.read_text(encoding="utf-8").split("\n", 1)[0])


def navigation(index: str, stage: Stage) -> list[Any]:
    """The navigation that the text of ``docs/index.md`` describes, pages by their place in `stage`.

    A row that links to a folder becomes a section with the folder's pages; that of the API reference
    gets the reference's pages below it.
    """
    entries: list[Any] = [{"Home": "index.md"}]
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        rows = [_entry(row["title"], row["target"], stage) for row in _ROW.finditer(section)]
        if rows:
            entries.append({section.split("\n", 1)[0].strip(): rows})
    return entries


def _entry(title: str, target: str, stage: Stage) -> dict[str, Any]:
    path = (GUIDE / target).resolve()
    page = stage.place(path)
    if target == "reference.md":
        return {title: [page, *({group.title: f"reference/{group.slug}.md"} for group in GROUPS)]}
    if path.is_dir():
        inside = [{_title(p): stage.place(p)} for p in sorted(path.glob("*.md"))]
        return {title: [page, *inside]}
    return {title: page}
