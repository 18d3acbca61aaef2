"""The site as a reader sees it: quiet console, no request elsewhere, light and dark, wide and narrow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.browser.browser import Browser

PAGES = ["index.html", "sharding.html", "reference/distributed.html", "messages.html"]
BACKGROUND = "return getComputedStyle(document.body).backgroundColor"


def brightness(colour: str) -> float:
    """0 for black to 255 for white, of ``rgb(...)``."""
    parts = [float(part) for part in re.findall(r"[\d.]+", colour)[:3]]
    return sum(parts) / 3


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_quiet_and_ask_nobody(page: str, browser: Browser, address: str) -> None:
    shades = {}
    for dark in (False, True):
        for width in (1280, 390):
            visit = browser.open(f"{address}{page}", width=width, dark=dark)
            assert visit.console == []
            assert visit.failed == []
            assert visit.requests
            assert visit.foreign(address) == []
            assert visit.overflow <= 0, f"{page} is {visit.overflow} px too wide at {width} px"
            shades[dark] = brightness(browser.script(BACKGROUND))
    assert shades[False] > 200
    assert shades[True] < 60


def test_code_and_tables_are_not_cut_on_a_phone(browser: Browser, address: str) -> None:
    """What is wider than the screen is scrolled in its own box."""
    browser.open(f"{address}backends.html", width=390)
    cut = """return [...document.querySelectorAll('.md-typeset table, .md-typeset pre')].filter(e => {
        for (let box = e; box && box !== document.body; box = box.parentElement) {
            if (['auto', 'scroll'].includes(getComputedStyle(box).overflowX)) return false;
        }
        return e.getBoundingClientRect().right > innerWidth + 1;
    }).length"""
    assert browser.script("return document.querySelectorAll('.md-typeset table').length") > 0
    assert browser.script(cut) == 0


@pytest.mark.parametrize("opened", ["served", "from a disk"])
def test_search_finds_a_message_without_the_network(
    opened: str, browser: Browser, address: str, site: Path
) -> None:
    place = address if opened == "served" else f"{site.as_uri()}/"
    # The search draws in a shadow root.
    found = (
        "[...document.querySelectorAll('div')].map(e => e.shadowRoot).find(r => r?.querySelector('input'))"
    )
    browser.open(f"{place}index.html")
    browser.driver.find_element("css selector", ".md-search__button").click()
    browser.wait(found)
    browser.script(f"{found}.querySelector('input').focus()")
    browser.driver.switch_to.active_element.send_keys("passing over")
    browser.wait(f"[...{found}.querySelectorAll('a')].some(a => a.href.includes('troubleshooting.html'))")
    visit = browser.look()
    assert visit.foreign(place) == []
    assert visit.console == []


def test_the_reader_may_choose_light_or_dark(browser: Browser, address: str, site: Path) -> None:
    browser.open(f"{address}index.html", dark=False)
    shades = []
    for _ in range(2):
        browser.script("[...document.querySelectorAll('[data-md-component=palette] label')]"
                       ".find(e => !e.hidden).click()")  # fmt: skip
        shades.append(brightness(browser.script(BACKGROUND)))
    assert max(shades) > 200
    assert min(shades) < 60
    browser.driver.execute_script("localStorage.clear()")
