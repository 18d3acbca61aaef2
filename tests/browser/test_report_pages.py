"""Reports in a real browser: they draw, fit a phone, follow the colours, ask the network for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.cli import main
from distributed.operations.report.record_format import append
from tests.browser.browser import Browser
from tests.support.records import train, write_attempt, write_end

VIEWS = [(1280, False), (1280, True), (390, False), (390, True)]
LONG = "a_very_long_setting_" * 8


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page about a real run that was resumed, one about a failed run, one about five runs."""
    folder = tmp_path_factory.mktemp("pages")
    train(folder / "real", epochs=1)
    train(folder / "real", epochs=3, resume_from_checkpoint=True)
    write_attempt(folder / "failed", "a", steps=range(10, 60, 10), finish=None, name=LONG, script=LONG)
    write_attempt(
        folder / "failed", "b", run="s", steps=range(30, 90, 10), config={LONG: LONG}, finish="failed"
    )
    error = {"summary": f"rank 1 (beta) raised {LONG}", "rank": 1, "host": "beta", "step": 81}
    write_end(folder / "failed", "s", "failed", error={**error, "traceback": f"{LONG * 3}\n" * 40})
    for ranks, batch in ((1, 64), (2, 64), (2, 128), (4, 64)):
        name = f"{ranks}_ranks_of_{batch}"
        write_attempt(folder / name, ranks=ranks, batch=batch, rate=1000.0 * ranks**0.8)
        for step in (20, 50):
            figures = {"epoch": step / 50, "val_loss": 1 / step, "val_accuracy": 1 - 1 / step}
            append(folder / name, "epoch", {"attempt": "a", "step": step, "figures": figures})
        write_end(folder / name)
    runs = {
        "real": ["real"],
        "failed": ["failed"],
        "several": ["1_ranks_of_64", "2_ranks_of_64", "2_ranks_of_128", "4_ranks_of_64", "failed"],
    }
    found = {}
    for name, members in runs.items():
        found[name] = folder / f"{name}.html"
        assert main(["report", *[str(folder / one) for one in members], "--output", str(found[name])]) == 0
    return found


def drawn(browser: Browser) -> list[dict[str, float]]:
    """Of each plot: how many lines or bars it shows, and how large it is."""
    browser.wait("document.body.dataset.drawn")
    found: list[dict[str, float]] = browser.script(
        """return [...document.querySelectorAll(".plot")].map((plot) => {
          const shown = plot.querySelectorAll(".scatterlayer .trace, .barlayer .point");
          const box = plot.querySelector(".main-svg").getBoundingClientRect();
          return {shown: shown.length, width: box.width, height: box.height, left: box.left};
        })"""
    )
    return found


@pytest.mark.parametrize("name", ["real", "failed", "several"])
@pytest.mark.parametrize(("width", "dark"), VIEWS)
def test_a_report_opens_clean(
    name: str, width: int, dark: bool, pages: dict[str, Path], browser: Browser, tmp_path: Path
) -> None:
    url = pages[name].as_uri()
    visit = browser.open(url, width=width, dark=dark)
    plots = drawn(browser)
    after = browser.look()
    assert visit.requests + after.requests == [url]
    assert (visit.failed, visit.console, after.failed, after.console) == ([], [], [], [])
    assert after.overflow == 0
    assert len(plots) >= 5
    for plot in plots:
        assert plot["shown"] > 0
        assert plot["height"] >= 100
        assert 200 < plot["width"] <= width
        assert plot["left"] >= 0
    assert browser.screenshot(tmp_path / "page.png").stat().st_size > 20_000


def test_colours_follow_the_scheme(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["real"].as_uri())
    drawn(browser)
    look = """return [getComputedStyle(document.body).backgroundColor,
              document.querySelector(".scatterlayer .js-line").style.stroke]"""
    light = browser.script(look)
    browser.prefer(dark=True)
    background = "getComputedStyle(document.body).backgroundColor"
    line = 'document.querySelector(".scatterlayer .js-line").style.stroke'
    browser.wait(f"{background} != '{light[0]}' && {line} != '{light[1]}'")
    assert browser.look().console == []


def test_a_plot_tells_its_figures_with_units(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["several"].as_uri())
    drawn(browser)
    texts = browser.script(
        """return [...document.querySelectorAll("figure")].map((figure) =>
            [figure.querySelector("h3").textContent, figure.querySelector(".ytitle, .xtitle").textContent,
             ...[...figure.querySelectorAll(".ytitle")].map((title) => title.textContent)])"""
    )
    units = {title: rest for title, *rest in texts}
    assert "samples/s" in units["Throughput by ranks"]
    assert "samples/s" in units["Throughput"]
    assert "MiB" in units["Memory of rank 0"]
    assert "%" in units["Validation accuracy"]
    assert "s" in units["Where the time of the run went"]


def test_a_request_to_the_network_would_be_seen(
    pages: dict[str, Path], browser: Browser, tmp_path: Path
) -> None:
    # The page's own policy forbids it, so a page that tried would say so in the console.
    bad = tmp_path / "bad.html"
    text = pages["real"].read_text().replace("<main>", '<main><img src="http://127.0.0.1:9/x.png">')
    bad.write_text(text)
    visit = browser.open(bad.as_uri())
    assert any("Content Security Policy" in line for line in visit.console)
    assert visit.overflow == 0
