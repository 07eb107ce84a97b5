"""The machine, and what the page does when the server goes, wants a key, or shows no data."""

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from roseinfer.core.config.server import ServerConfig
from roseinfer.core.outputs import DraftStats, SchedulerStats
from tests.console.conftest import SIZES, replace_requests
from tests.server.live import LiveServer
from tests.server.real_server import RealServer
from tests.text.tokenizers import byte_level

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import expect

OpenPage = Callable[..., Any]


def ask(server: RealServer, **fields: Any) -> httpx.Response:
    return server.http.post("/v1/completions", json={"prompt": "go on", "max_tokens": 8, **fields})


@pytest.mark.parametrize("size", SIZES)
def test_steps_and_engines_are_shown(open_page: OpenPage, server: RealServer, size: dict[str, int] | None) -> None:
    assert ask(server, max_tokens=30, ignore_eos=True).is_success  # enough steps to measure its speed
    page = open_page(server.url + "/#machine", **({"viewport": size} if size else {}))
    tiles = page.get_by_role("list", name="The machine now")
    expect(tiles.get_by_text("of 16 seats, 0 waiting")).to_be_visible()
    expect(tiles.get_by_text("of 80 blocks")).to_be_visible()
    expect(tiles.get_by_text(re.compile("0 of [1-9][0-9,]+ blocks")).last).to_be_visible()
    expect(tiles.get_by_text(re.compile(r"^prompt tokens; [\d.]+ [kM]B loaded, [\d.]+ [kM]B stored"))).to_be_visible()
    expect(page.get_by_text(re.compile(r"Newest: [1-9]\d+ ms"))).to_be_visible()
    expect(page.get_by_role("img", name="Duration of the steps").locator("canvas")).to_be_visible()
    row = page.get_by_role("region", name="Engines").get_by_role("row").nth(1)
    expect(row).to_contain_text("ready")
    expect(row).to_contain_text(re.compile("as calibrated|(slower|faster) than calibrated"))
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]


def test_what_runs_shows_while_it_runs(open_page: OpenPage, server: RealServer) -> None:
    page = open_page(server.url + "/#machine")
    running = page.get_by_role("list", name="The machine now").get_by_role("listitem").first.locator("strong")
    with server.http.stream(
        "POST", "/v1/completions", json={"prompt": "go", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    ):
        expect(running).to_have_text("1")
    expect(running).to_have_text("0")


def test_drafts_by_proposer_and_position(open_page: OpenPage) -> None:
    with LiveServer(byte_level()) as server:
        page = open_page(server.url + "/#machine")
        expect(page.get_by_role("region", name="Engines")).to_be_visible()
        expect(page.get_by_role("region", name="Drafts by proposer")).to_have_count(0)
        drafts = (DraftStats("ngram", 10, (10, 4), (5, 1)), DraftStats("suffix", 2, (2,), (2,)))
        server.engine.snapshot = SchedulerStats(drafts=drafts)
        table = page.get_by_role("region", name="Drafts by proposer")
        expect(table.get_by_role("row", name="ngram").get_by_role("cell")).to_have_text(
            ["14", "6", "1.60", "50%", "25%"]
        )
        expect(table.get_by_role("row", name="suffix").get_by_role("cell")).to_have_text(
            ["2", "2", "2.00", "100%", "\N{EN DASH}"]
        )
        tiles = page.get_by_role("list", name="The machine now")
        expect(tiles.get_by_text("of 16 drafted tokens accepted")).to_be_visible()


@pytest.mark.exhaustive
def test_latency_as_quantiles(open_page: OpenPage, server: RealServer) -> None:
    (known,) = server.http.get("/v1/requests?limit=1").json()["data"] or [{"object": "request", "class": "none"}]
    seen = [{"ttft_ms": n * 10.0, "tpot_ms": float(n), "e2e_ms": None} for n in range(1, 101)]
    many = [
        {**known, "id": f"q-{n}", "request_id": f"q-{n}", "created": 4e9 + n, "state": "ended", "seen": each}
        for n, each in enumerate(seen)
    ]
    page = open_page("about:blank")
    replace_requests(page, server.url + "/#machine", many)
    latency = page.get_by_role("region", name="Latency")
    for name, cells in (("First token", ["510 ms", "960 ms"]), ("Time per token", ["51 ms", "96 ms"])):
        row = latency.get_by_role("row", name=name)
        expect(row.get_by_role("cell").nth(0)).to_have_text(cells[0])
        expect(row.get_by_role("cell").nth(1)).to_have_text(cells[1])


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (2.81, "2.8 times slower than calibrated"),
        (0.5, "2.0 times faster than calibrated"),
        (1.04, "as calibrated"),
        (41.7, "42 times slower than calibrated"),
        (None, "\N{EN DASH}"),
    ],
)
def test_speed_in_words(blank: Any, ratio: float | None, words: str) -> None:
    said = "(ratio) => import('/console/words.js').then((it) => it.speedWords(ratio))"
    assert blank.evaluate(said, ratio) == words


@pytest.mark.parametrize(
    ("value", "limit", "shown"),
    [
        (25.3, 25, "25.3 ms"), (25, 25, "25 ms"), (24.8, 25, "25 ms"), (25.004, 25, "25.004 ms"), (30, 25, "30 ms"),
        (2004, 2000, "2.004 s"), (25.00001, 25, "25 ms and more"), (None, 25, "\N{EN DASH}"), (25.3, None, "25 ms"),
    ],
)  # fmt: skip
def test_a_missed_limit_does_not_look_met(blank: Any, value: float | None, limit: float | None, shown: str) -> None:
    said = "([value, limit]) => import('/console/format.js').then((it) => it.msAgainst(value, limit))"
    assert blank.evaluate(said, [value, limit]) == shown


@pytest.mark.exhaustive
def test_a_slow_machine_has_a_banner(page: Any) -> None:
    """Only after some seconds, and until it is clearly as fast as it should be."""
    found = page.evaluate("""async () => {
        const { machine, slowdown } = await import("/console/data.js");
        const samples = (speeds) => speeds.map((slowdown) => ({ slowdown }));
        const after = (speeds) => {
            machine.set({ samples: samples(speeds) });
            return slowdown.get().factor;
        };
        const all = (speed, count) => Array(count).fill(speed);
        return [
            after(all(3, 10)),
            after([...all(1, 15), ...all(9, 5)]),
            after(all(1.25, 20)),
            after(all(2.8, 20)),
            after(all(1.25, 20)),
            after(all(1.1, 20)),
            after([...all(2.8, 10), ...all(null, 200), ...all(2.8, 10)]),
            after([...all(2.8, 20), ...all(null, 240)]),
        ];
    }""")
    assert found == [None, None, None, 2.8, 1.3, None, 2.8, None]
    page.evaluate("import('/console/data.js').then((data) => data.slowdown.set({ factor: 2.8 }))")
    page.evaluate("""import('/console/data.js').then(({ machine, slowdown }) =>
        machine.subscribe(() => slowdown.get().factor === 2.8 || slowdown.set({ factor: 2.8 })))""")
    banner = page.locator(".banner")
    expect(banner).to_have_text("The machine is 2.8 times slower than calibrated. Fewer objectives can be met.")


def test_several_engines_and_their_router(open_page: OpenPage, server: RealServer) -> None:
    page = open_page(server.url + "/#machine")
    expect(page.get_by_role("region", name="Engines")).to_be_visible()
    router = {
        "placements": {"0": 12, "1": 7},
        "reasons": {"only_one": 3, "best": 0},
        "retries": 2,
        "placed_again": {},
        "resumes": {"died": 1},
        "breakers": [1],
    }
    page.evaluate(
        """async (router) => {
            const { machine } = await import("/console/data.js");
            const [engine] = machine.get().engines;
            const show = () => machine.set({ router, engines: [engine, { ...engine, engine: 1, state: "dead" }] });
            machine.subscribe(() => machine.get().router || show());  // the server, which has one, goes on telling
            show();
        }""",
        router,
    )
    shown = page.get_by_role("region", name="Router")
    for text in ("engine 0: 12, engine 1: 7", "only one: 3", "died: 1"):
        expect(shown.get_by_text(text, exact=True)).to_be_visible()
    expect(page.get_by_role("button", name="engine 1")).to_be_visible()
    expect(page.get_by_role("region", name="Engines").get_by_text("dead")).to_be_visible()


def test_keys_and_addresses_choose_the_tab(page: Any) -> None:
    page.keyboard.press("Escape")
    page.get_by_role("log").focus()
    for key, name in (("2", "Requests"), ("3", "Machine"), ("1", "Playground")):
        page.keyboard.press(key)
        expect(page.get_by_role("tab", name=name)).to_have_attribute("aria-selected", "true")
        assert page.url.endswith(f"#{name.lower()}")
    page.get_by_label("Message", exact=True).press("3")  # what is typed into a text goes there
    expect(page.get_by_label("Message", exact=True)).to_have_value("3")
    page.get_by_role("tab", name="Playground").press("ArrowRight")
    expect(page.get_by_role("tab", name="Requests")).to_be_focused()
    page.goto(f"{page.url.partition('#')[0]}#requests/%")  # cut in the middle of a character
    expect(page.get_by_role("complementary", name="Request details")).to_contain_text("Unknown request")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_hidden()


@pytest.mark.exhaustive
def test_the_theme_is_the_systems_until_it_is_switched(open_page: OpenPage, server: RealServer) -> None:
    page = open_page(server.url, color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.get_by_role("button", name="Light theme").click()
    expect(page.get_by_role("button", name="Dark theme")).to_be_visible()
    light = page.evaluate(ground)
    assert light != dark
    page.reload()
    expect(page.get_by_role("button", name="Dark theme")).to_be_visible()
    assert page.evaluate(ground) == light


# --- the connection ---------------------------------------------------------------------------------------------
def test_a_key_is_asked_for_and_kept_for_this_tab_only(open_page: OpenPage) -> None:
    with LiveServer(byte_level(), ServerConfig(api_key=("secret",))) as server:
        page = open_page(server.url)
        page.get_by_role("tab", name="Requests").click()
        for wrong in ("wrong", "ключ"):  # the second is one that no browser sends
            page.get_by_role("button", name="Enter the key").click()
            page.get_by_role("dialog").get_by_role("textbox").fill(wrong)
            page.get_by_role("button", name="Save").click()
            expect(page.get_by_role("dialog")).to_be_hidden()
            expect(page.get_by_role("status")).to_have_text("needs a key")
        server.post("/v1/completions", {"prompt": "hi"}, headers={"Authorization": "Bearer secret"})
        page.get_by_role("button", name="Enter the key").click()
        page.get_by_role("dialog").get_by_role("textbox").fill("secret")
        page.keyboard.press("Enter")
        expect(page.get_by_role("status")).to_have_text("live")
        expect(page.locator(".window").get_by_role("row")).to_have_count(1)
        expect(page.get_by_text("could not be read")).to_have_count(0)
        page.reload()
        expect(page.get_by_role("status")).to_have_text("live")
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


def test_a_server_that_goes_is_missed_and_found_again(browser: Any, open_page: OpenPage) -> None:
    with LiveServer(byte_level()) as server:
        page = open_page(server.url)
        expect(page.get_by_role("status")).to_have_text("live")
    expect(page.get_by_role("alert")).to_contain_text("No connection.")
    expect(page.get_by_role("status")).to_have_text("lost")
    page.get_by_role("textbox", name="Message").fill("Anybody there?")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.get_by_role("article", name="Model")).to_contain_text("No answer from the server")


@pytest.mark.exhaustive
def test_a_server_that_comes_is_found_by_itself(open_page: OpenPage, browser: Any, server: RealServer) -> None:
    page = open_page(server.url)
    page.route("**/console/events", lambda route: route.abort())
    page.reload()
    expect(page.get_by_role("status")).to_have_text("lost")
    page.unroute("**/console/events")
    expect(page.get_by_role("status")).to_have_text("live")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_server_that_loads_its_model_is_waited_for(open_page: OpenPage, server: RealServer) -> None:
    page = open_page(server.url)
    loading = {"error": {"message": "The model is still loading", "code": "loading"}}
    page.route("**/console/events", lambda route: route.fulfill(status=503, json=loading))
    page.reload()
    expect(page.get_by_text("The server is loading its model.")).to_be_visible()
    expect(page.locator(".link-state")).to_have_text("loading")
    page.unroute("**/console/events")
    expect(page.locator(".link-state")).to_have_text("live")
    expect(page.get_by_text("The server is loading its model.")).to_have_count(0)


def test_without_a_console_there_is_no_page(open_page: OpenPage) -> None:
    with LiveServer(byte_level(), ServerConfig(console=False)) as server:
        page = open_page(server.url)
        expect(page.locator("body")).to_contain_text("unknown path /")
        expect(page.get_by_role("tab")).to_have_count(0)
