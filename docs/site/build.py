"""Builds the documentation site: ``python -m docs.site.build [FOLDER]``, by default ``build/site``.

A link or an anchor that leads nowhere fails the build.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from docs.site.stage import ROOT, Stage

__all__ = ["build", "main"]

HERE = Path(__file__).parent
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def build(site: Path) -> str:
    """Build the site into `site`; what was there before is removed. Returns the builder's output.

    Raises:
        RuntimeError: a page is wrong; the text names it.
    """
    work = site.parent / f"{site.name}-pages"
    shutil.rmtree(work, ignore_errors=True)
    pages = work / "pages"
    nav = Stage(pages).fill()
    shutil.copytree(HERE / "assets", pages / "assets")
    config = f"{(HERE / 'mkdocs.yml').read_text(encoding='utf-8')}\n" + yaml.safe_dump(
        {"docs_dir": "pages", "site_dir": "site", "nav": nav}, sort_keys=False
    )
    (work / "mkdocs.yml").write_text(config, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(work / "mkdocs.yml")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output = _ESCAPES.sub("", done.stdout)
    if done.returncode:
        raise RuntimeError(output)
    shutil.rmtree(site, ignore_errors=True)
    shutil.move(work / "site", site)
    return output


def main(arguments: list[str] | None = None) -> int:
    """Build, and say where the site is."""
    words = sys.argv[1:] if arguments is None else arguments
    site = Path(words[0]) if words else ROOT / "build" / "site"
    try:
        build(site.resolve())
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"the site is in {site}: open {site / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
