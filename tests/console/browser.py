"""A headless Chromium that is already on the machine, driven by Playwright (`pip install playwright`)."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# The headless shell draws no window: a page takes a quarter of the processor time that it takes elsewhere.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",  # root cannot use it
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium() -> str | None:
    """Return the path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def launched(executable: str) -> Iterator[Any]:
    """Yield Playwright's browser object for the `executable` that `chromium` found."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, headless=True, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()
