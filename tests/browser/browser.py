"""A real browser for tests: headless Chromium, what its console and its network saw, screenshots."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

__all__ = ["CHROMIUM", "DRIVER", "MISSING", "Browser", "Visit", "started"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = None if CHROMIUM and DRIVER else "no Chromium or no chromedriver; as root: make test-tools"

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


@dataclass(frozen=True)
class Visit:
    """What a page did since it was asked for.

    Attributes:
        requests: every URL that was requested, the page's own first; ``data:`` and ``blob:`` are no
            requests.
        failed: URLs that could not be had, with the reason or the status.
        console: errors and warnings of the console, uncaught exceptions among them.
        overflow: CSS pixels by which the page is wider than its window.
    """

    requests: list[str]
    failed: list[str]
    console: list[str]
    overflow: int

    def foreign(self, *allowed: str) -> list[str]:
        """Requested URLs that begin with none of `allowed`."""
        return [url for url in self.requests if not url.startswith(allowed)]


class Browser:
    """One window of Chromium. See `started`.

    Attributes:
        driver: selenium's, for whatever is not here.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Visit:
        """Load `url` in a window of `width` x `height` CSS pixels; returns when the page has loaded.

        Args:
            url: ``file://`` or ``http://``.
            width: 390 is a phone's; below 600 the window is a phone's in other respects, too.
            height: of the window.
            dark: what ``prefers-color-scheme`` says.
        """
        self.driver.get("about:blank")
        self._events()
        self.driver.get_log("browser")
        self.resize(width, height)
        self.prefer(dark)
        self.driver.get(url)
        return self.look()

    def resize(self, width: int, height: int = 900) -> None:
        """Make the window so many CSS pixels large."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, dark: bool) -> None:
        """Set what ``prefers-color-scheme`` says."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def look(self) -> Visit:
        """What happened since the last look."""
        events = self._events()
        sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
        urls = {e["requestId"]: e["request"]["url"] for e in sent}
        requests = [url for e in sent if not (url := e["request"]["url"]).startswith(("data:", "blob:"))]
        failed = []
        for event in events:
            params = event["params"]
            if event["method"] == "Network.loadingFailed" and not params.get("canceled"):
                failed.append(f"{urls.get(params['requestId'], '?')}: {params['errorText']}")
            if event["method"] == "Network.responseReceived" and params["response"]["status"] >= 400:
                failed.append(f"{params['response']['url']}: {params['response']['status']}")
        console = [f"{entry['level']}: {entry['message']}" for entry in self.driver.get_log("browser")]
        return Visit(requests, failed, console, self.overflow())

    def overflow(self) -> int:
        """CSS pixels by which the page is wider than its window."""
        widths = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        page, window = self.script(f"return {widths}")
        return int(page - window)

    def script(self, source: str, *arguments: Any) -> Any:
        """Run JavaScript in the page; ``return`` hands a plain value back."""
        return self.driver.execute_script(source, *arguments)

    def wait(self, condition: str, seconds: float = 20.0) -> None:
        """Return when the JavaScript expression `condition` is true.

        Raises:
            selenium.common.exceptions.TimeoutException: it never was.
        """
        from selenium.webdriver.support.ui import WebDriverWait

        message = f"never true: {condition}"
        WebDriverWait(self.driver, seconds, 0.05).until(
            lambda driver: driver.execute_script(f"return Boolean({condition})"), message
        )

    def screenshot(self, path: Path, *, whole: bool = True) -> Path:
        """Write a PNG of the whole page, or of what the window shows."""
        options = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self.driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
            options["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.driver.execute_cdp_cmd("Page.captureScreenshot", options)["data"]
        path.write_bytes(base64.b64decode(data))
        return path

    def _events(self) -> list[dict[str, Any]]:
        return [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]


@contextmanager
def started() -> Iterator[Browser]:
    """A browser with a profile of its own, gone afterwards.

    Raises:
        RuntimeError: `MISSING` says what is not installed.
    """
    if MISSING:
        raise RuntimeError(MISSING)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with TemporaryDirectory(prefix="browser-") as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "WARNING"})
        # With both paths given, selenium's manager has nothing to look for on the network.
        driver = webdriver.Chrome(options=options, service=Service(executable_path=DRIVER))
        try:
            yield Browser(driver)
        finally:
            driver.quit()
