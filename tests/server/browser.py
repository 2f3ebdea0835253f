"""A real browser for the tests of pages: headless Chromium, and what it loads and complains of."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_LARGE, _SMALL = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
VIEWS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light", "viewport": _LARGE},
    "dark": {"color_scheme": "dark", "viewport": _LARGE},
    "phone": {"viewport": _SMALL, "device_scale_factor": 2, "is_mobile": True, "has_touch": True},
}


def chromium() -> Iterator[Browser]:
    """Skips where no Chromium is installed, unless MAXSIMD_NEEDS_BROWSER is set: then that fails."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        assert not os.environ.get("MAXSIMD_NEEDS_BROWSER"), f"none of {', '.join(_NAMES)} is installed"
        pytest.skip(f"none of {', '.join(_NAMES)} is installed")
    with sync_playwright() as playwright:
        # Without a GPU it would compute one.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page, what it asked for, and what it complained of."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def check(self, origin: str) -> None:
        foreign = [url for url in self.requests if not url.startswith((f"{origin}/", "data:"))]
        assert not foreign
        assert not self.complaints

    def serious_findings(self) -> list[str]:
        violations = Axe().run(self.page).response["violations"]
        return [
            f"{each['id']}: {node['html']}"
            for each in violations
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]


@contextmanager
def opened(browser: Browser, url: str, **options: Any) -> Iterator[Watched]:
    context = browser.new_context(**options)
    watched = Watched(context.new_page())
    page = watched.page
    page.set_default_timeout(30_000)
    expect.set_options(timeout=300_000)
    page.on("request", lambda request: watched.requests.append(request.url))
    page.on("pageerror", lambda error: watched.complaints.append(str(error)))

    def note(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            watched.complaints.append(message.text)

    page.on("console", note)
    page.goto(url)
    try:
        yield watched
    finally:
        context.close()
