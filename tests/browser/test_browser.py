"""The browser sees what a page does: its requests, its console, its width, its colours."""

from __future__ import annotations

from pathlib import Path

from tests.browser.browser import Browser

BAD = """<!doctype html><title>bad</title><meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,"><style>@media (prefers-color-scheme: dark) { body { color: #fff } }</style>
<img src="http://127.0.0.1:9/missing.png"><div style="width: 700px">wide</div>
<script>console.warn("careful"); throw new Error("broken on purpose")</script>"""
GOOD = """<!doctype html><title>good</title><meta name="viewport" content="width=device-width">
<p>fine</p><img src="data:image/gif;base64,R0lGODlhAQABAAAAACw=">"""
COLOUR = "return getComputedStyle(document.body).color"


def test_a_page_that_misbehaves_is_seen(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(BAD)
    visit = browser.open(page.as_uri(), width=390, dark=True)
    assert visit.requests == [page.as_uri(), "http://127.0.0.1:9/missing.png"]
    assert visit.foreign("file://") == ["http://127.0.0.1:9/missing.png"]
    assert len(visit.failed) == 1
    assert any("broken on purpose" in line for line in visit.console)
    assert any("careful" in line for line in visit.console)
    assert visit.overflow > 300
    assert browser.script(COLOUR) == "rgb(255, 255, 255)"


def test_a_page_that_behaves_leaves_nothing(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "good.html"
    page.write_text(GOOD)
    visit = browser.open(page.as_uri(), width=390)
    assert (visit.requests, visit.failed, visit.console, visit.overflow) == ([page.as_uri()], [], [], 0)
    assert browser.script(COLOUR) == "rgb(0, 0, 0)"
    picture = browser.screenshot(tmp_path / "good.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
