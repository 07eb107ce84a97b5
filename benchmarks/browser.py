"""A headless Chromium that is already on the machine, driven by Playwright (`pip install playwright`)."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium() -> str | None:
    """The first browser on the path that will do."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def launched(executable: str) -> Iterator[Any]:
    """Playwright's browser object. `executable`: from `chromium`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, headless=True, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()
