"""The picture of a search in a real browser: it draws, fits a phone, asks the network for nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from distributed.operations.tuning.plot import write_plot
from distributed.operations.tuning.trial_record import Trial
from tests.browser.browser import Browser
from tests.browser.test_report_pages import VIEWS, drawn


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a search of twenty trials in five parameters, of which one failed and one reported nothing."""
    draw = random.Random(0)
    trials = []
    for n in range(20):
        given = {
            "learning_rate": 10 ** draw.uniform(-4, 0),
            "optimizer": draw.choice(["adamw", "sgd"]),
            "weight_decay": draw.uniform(0.0, 0.1),
            "hidden_size_of_the_network": draw.choice([16, 32, 64, 128, 256, 512]),
            "a_name": draw.choice(["short", "a value of many words, <b>with marks</b>, that goes on and on"]),
        }
        reports = [{"epoch": epoch, "val_loss": draw.uniform(0.1, 2.0)} for epoch in range(n % 3 + 1)]
        trial = Trial(f"{n:05d}", given, "finished", reports=reports, seconds=3.1)
        trial.judge(None, "auto")
        trials.append(trial)
    trials[3].status, trials[3].error = "failed", "rank 0 (alpha) raised OutOfMemoryError: " + "no room " * 40
    trials[4].reports, trials[4].value = [], None
    best = min((t for t in trials if t.value is not None), key=lambda t: t.value or 0.0)
    path = tmp_path_factory.mktemp("search") / "search.html"
    return Path(write_plot(trials, "auto", best, path, "digits"))


@pytest.mark.parametrize(("width", "dark"), VIEWS)
def test_a_search_opens_clean(
    width: int, dark: bool, picture: Path, browser: Browser, tmp_path: Path
) -> None:
    url = picture.as_uri()
    visit = browser.open(url, width=width, dark=dark)
    course, lines = drawn(browser)
    after = browser.look()
    assert visit.requests + after.requests == [url]
    assert (visit.failed, visit.console, after.failed, after.console) == ([], [], [], [])
    assert after.overflow == 0
    assert (course["shown"], lines["shown"]) == (2, 18)
    assert 200 < course["width"] <= width
    # Six axes, each with room for its ticks: what a phone has not, it scrolls.
    assert lines["width"] >= 130 * 6
    assert browser.screenshot(tmp_path / "page.png").stat().st_size > 20_000


def test_the_best_trial_has_the_strongest_colour_in_both_schemes(picture: Path, browser: Browser) -> None:
    strokes = """return [...document.querySelectorAll("#plot-1 .js-line")].map((line) => line.style.stroke)"""
    colour = 'getComputedStyle(document.querySelector(".best")).color'
    last = 'document.querySelector("#plot-1 .scatterlayer .trace:last-child .js-line").style.stroke'
    browser.open(picture.as_uri())
    drawn(browser)
    light = browser.script(strokes)
    assert len(set(light)) == len(light)
    assert browser.script(f"return {colour} === {last}")
    browser.prefer(dark=True)
    browser.wait(f"{last} != '{light[-1]}' && {colour} === {last}")
    assert browser.look().console == []
