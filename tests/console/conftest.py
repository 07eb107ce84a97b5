import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.console.browser import chromium, launched
from tests.server.real_server import RealServer, until

# Steps so long that what a busy machine adds hardly counts.
COST = {"step_s": 0.01, "token_s": 1e-4, "pair_s": 0.0, "row_s": 0.0, "context_s": 0.0, "chunk_context_s": 0.0}
CLASSES = """
[classes.quick]
ttft_ms = 5000
tpot_ms = 400
"""
# What a page may take on a busy machine.
PATIENCE_MS = 20_000
PHONE = {"width": 390, "height": 844}
SIZES = [pytest.param(None, id="desktop"), pytest.param(PHONE, id="phone", marks=pytest.mark.exhaustive)]

OpenPage = Callable[..., Any]


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = chromium()
    if executable is None:
        pytest.skip("no Chromium on this machine")
    from playwright.sync_api import expect

    expect.set_options(timeout=PATIENCE_MS)
    with launched(executable) as browser:
        yield browser


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """`serve` as a user starts it, with an engine whose steps take as long as a file says."""
    folder: Path = tmp_path_factory.mktemp("console")
    (folder / "cost.json").write_text(json.dumps({"cost": COST}))
    (folder / "classes.toml").write_text(CLASSES)
    cost = str(folder / "cost.json")
    # No answer ends by itself: a test says how long it is.
    options = ("--device", "priced", "--cost", cost, "--cost-model", cost, "--mean-output-len", "1e9")
    options += ("--kv-offloading-size", "0.5")
    with RealServer(*options, "--slo-classes", str(folder / "classes.toml")) as server:
        yield server


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """`open_page(url, **options of a browser's context)`: a page of a browser that has never been there.

    Whatever goes wrong in a page fails its test.
    """
    contexts: list[Any] = []
    wrong: list[str] = []

    def open_page(url: str, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture(scope="package")
def blank(browser: Any, server: RealServer) -> Iterator[Any]:
    """A page of the server that can import the console's modules, and does not run them."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(server.url + "/health")
    yield page
    context.close()


@pytest.fixture
def page(open_page: OpenPage, server: RealServer) -> Any:
    """The console of `server`, connected, with short answers and no objectives: a busy server rejects none of them."""
    page = open_page(server.url)
    page.get_by_role("button", name="None").click()
    page.get_by_label("Max tokens").fill("8")
    page.get_by_label("Max tokens").press("Tab")
    page.get_by_role("status").get_by_text("live").wait_for()
    return page


def replace_requests(page: Any, url: str, records: list[dict[str, Any]]) -> None:
    """Go to `url` and let the console hold these requests only, once it has all of an idle server's."""
    page.route("**/v1/requests?*", lambda route: route.fulfill(json={"object": "list", "data": []}))
    page.goto(url)
    until(lambda: page.evaluate("import('/console/data.js').then((data) => data.machine.get().at > 0)"))
    page.evaluate(
        """records => import("/console/data.js").then((data) => {
            const { byKey, sorted } = data.requests.get();
            byKey.clear();
            sorted.length = 0;
            data.addRequests(records);
        })""",
        records,
    )
