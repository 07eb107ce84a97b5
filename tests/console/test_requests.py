"""The list of requests, and one of them in detail."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.console.conftest import SIZES, replace_requests
from tests.server.real_server import RealServer

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import expect

OpenPage = Callable[..., Any]


def ask(server: RealServer, name: str, **fields: Any) -> httpx.Response:
    """Send a request with a unique id."""
    headers = {"x-request-id": name}
    return server.http.post("/v1/completions", headers=headers, json={"prompt": "go", "max_tokens": 6, **fields})


@pytest.fixture(scope="module")
def asked(server: RealServer) -> Iterator[RealServer]:
    """Server with three requests: one in time, one rejected and one without objectives."""
    assert ask(server, "first-plain").is_success
    assert ask(server, "first-refused", slo={"ttft_ms": 1}).status_code == 429
    assert ask(server, "first-kept", slo={"class": "quick"}).is_success
    yield server


def row(page: Any, name: str) -> Any:
    """Return the only row left after filtering by `name`."""
    page.get_by_role("searchbox", name="Filter").fill(name)
    rows = page.locator(".window").get_by_role("row")
    expect(rows).to_have_count(1)
    return rows.first


def test_the_list_shows_outcomes(open_page: OpenPage, asked: RealServer) -> None:
    page = open_page(asked.url + "/#requests")
    for name, outcome in (("first-plain", "served"), ("first-refused", "rejected"), ("first-kept", "in time")):
        expect(row(page, name)).to_contain_text(outcome)
    expect(row(page, "first-kept")).to_contain_text("quick")
    expect(row(page, "first-kept")).to_contain_text("/ 5 s")
    page.get_by_role("button", name="Rejected").click()
    expect(page.get_by_text("No request matches the filter.")).to_be_visible()
    expect(row(page, "first-refused")).to_contain_text("out of reach")
    quick = page.get_by_role("list", name="Objectives by class").get_by_role("listitem").filter(has_text="quick")
    expect(quick).to_contain_text("first 5 s · per token 400 ms")


@pytest.mark.parametrize("size", SIZES)
def test_a_rejected_request_shows_its_cause(
    open_page: OpenPage, asked: RealServer, size: dict[str, int] | None
) -> None:
    page = open_page(asked.url + "/#requests", **({"viewport": size} if size else {}))
    row(page, "first-refused").click()
    detail = page.get_by_role("complementary", name="Request details")
    why = asked.http.get("/v1/requests/first-refused").json()["why"]
    expect(detail.locator(".sentence")).to_have_text(why["summary"])
    expect(detail).to_contain_text("First token attainable")
    detail.get_by_text("JSON", exact=True).click()
    expect(detail.locator(".raw pre")).to_contain_text('"cause": "idle"')
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    page.get_by_role("button", name="Close").click()
    expect(detail).to_have_count(0)


def test_the_timeline_of_a_request(open_page: OpenPage, asked: RealServer) -> None:
    page = open_page(asked.url + "/#requests/first-kept")  # an address that may be passed on
    detail = page.get_by_role("complementary", name="Request details")
    phases = detail.locator(".phases li")
    expect(phases.filter(has_text="wrote its answer")).to_have_count(1)
    expect(phases.filter(has_text="computed its prompt")).to_have_count(1)
    expect(detail.get_by_role("row", name="First token").locator("td").first).to_have_text("5 s")
    expect(detail.get_by_role("row", name="First token").locator("td").last).to_contain_text("✓")
    expect(detail).to_contain_text("6 tokens, ended by length")


def test_an_unknown_request(open_page: OpenPage, asked: RealServer) -> None:
    page = open_page(asked.url + "/#requests/never-was")
    expect(page.get_by_text("Unknown request: ")).to_be_visible()


@pytest.mark.exhaustive
def test_a_failed_lookup_is_not_reported_as_unknown(open_page: OpenPage, asked: RealServer) -> None:
    page = open_page(asked.url)
    page.route("**/v1/requests/*", lambda route: route.abort())
    page.evaluate("location.hash = '#requests/elsewhere'")
    detail = page.get_by_role("complementary", name="Request details")
    expect(detail).to_contain_text("Cannot load the request: No answer from the server.")


@pytest.mark.exhaustive
def test_requests_without_objectives_are_not_judged(open_page: OpenPage, asked: RealServer) -> None:
    record = {"object": "request", "created": 1.0, "class": "none", "state": "ended", "outcome": "rejected"}
    page = open_page("about:blank")
    replace_requests(page, asked.url + "/#requests", [{**record, "id": "a"}, {**record, "id": "b", "outcome": "met"}])
    tile = page.get_by_role("list", name="Objectives by class").get_by_role("listitem")
    expect(tile).to_have_text("no objectives1servedbest effort, 1 rejected")


@pytest.mark.exhaustive
def test_the_class_column_shows_the_class(open_page: OpenPage, asked: RealServer) -> None:
    page = open_page(asked.url + "/#requests")
    for name, shown in (("first-plain", "no objectives"), ("first-refused", "own objectives"), ("first-kept", "quick")):
        expect(row(page, name).locator(".c-class")).to_have_text(shown)
        expect(row(page, name).locator(".c-request")).to_have_text("completions")


@pytest.mark.parametrize("size", SIZES)
def test_a_late_row_shows_what_was_late(open_page: OpenPage, asked: RealServer, size: dict[str, int] | None) -> None:
    page = open_page(asked.url + "/#requests", **({"viewport": size} if size else {}))
    (known,) = asked.http.get("/v1/requests?limit=1").json()["data"]
    late = {
        "objectives": {"ttft_ms": 500, "tpot_ms": 20, "e2e_ms": 3000},
        "seen": {"ttft_ms": 101, "tpot_ms": 42, "e2e_ms": 4321},
    }
    outcomes = ("missed_tpot", "missed_e2e", "missed_ttft")
    many = [{**known, **late, "id": f"late-{each}", "request_id": f"late-{each}", "outcome": each} for each in outcomes]
    page.evaluate("many => import('/console/data.js').then((data) => data.addRequests(many))", many)
    for outcome, figure in zip(outcomes, (".c-tpot", ".c-total", ".c-ttft"), strict=True):
        shown = row(page, f"late-{outcome}").locator(figure)
        expect(shown).to_be_visible()
    expect(row(page, "late-missed_tpot").locator(".c-tpot")).to_contain_text("42 ms> 20 ms")
    expect(row(page, "late-missed_tpot").locator(".c-tpot.late")).to_have_count(1)
    if size:
        expect(row(page, "late-missed_tpot").locator(".c-ttft")).to_be_hidden()


def test_ones_own_requests_show_their_first_words(open_page: OpenPage, asked: RealServer) -> None:
    page = open_page(asked.url)
    page.get_by_label("Max tokens").fill("4")
    words = "Where is my own request? " + "x" * 100
    page.get_by_role("textbox", name="Message").fill(f"  {words}\nsecond line")
    with page.expect_response("**/v1/chat/completions") as answered:
        page.keyboard.press("Enter")
    name = answered.value.headers["x-request-id"]
    page.get_by_role("tab", name="Requests").click()
    mine = row(page, "my own request")
    expect(mine.locator(".c-request")).to_have_text(words[:80] + "…")
    mine.click()
    detail = page.get_by_role("complementary", name="Request details")
    expect(detail.locator(".prompt")).to_contain_text("sent from this browser")
    assert "own request" not in asked.http.get(f"/v1/requests/{name}").text  # the server keeps no prompt
    page.reload()
    expect(row(page, "my own request").locator(".c-request")).to_contain_text("Where is my own")


@pytest.mark.exhaustive
def test_only_so_many_prompts_are_kept(open_page: OpenPage, asked: RealServer) -> None:
    page = open_page(asked.url)
    kept = page.evaluate("""async () => {
        const { notePrompt } = await import("/console/prompts.js");
        for (let n = 0; n < 250; n++) notePrompt(`id-${n}`, `prompt ${n}`);
        notePrompt(null, "without an id");
        return JSON.parse(localStorage.getItem("roseinfer.prompts")).map(([id]) => id);
    }""")
    assert kept == [f"id-{n}" for n in range(50, 250)]


def test_keyboard_navigation_of_the_list(open_page: OpenPage, asked: RealServer) -> None:
    page = open_page(asked.url + "/#requests")
    expect(page.locator(".window").get_by_role("row").nth(2)).to_be_visible()
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox", name="Filter")).to_be_focused()
    page.keyboard.type("first-")
    expect(page.locator(".window").get_by_role("row")).to_have_count(3)
    page.keyboard.press("Escape")
    for key in ("j", "j", "k", "Enter"):
        page.keyboard.press(key)
    facts = page.get_by_role("complementary", name="Request details").locator(".facts")
    expect(facts).to_contain_text("first-kept")
    page.keyboard.press("j")  # what is open moves along
    expect(facts).to_contain_text("first-refused")
    page.keyboard.press("Escape")
    expect(facts).to_have_count(0)


def test_a_request_shows_while_it_runs_and_when_it_has_ended(open_page: OpenPage, asked: RealServer) -> None:
    page = open_page(asked.url + "/#requests")
    fields = {"prompt": "go", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with asked.http.stream("POST", "/v1/completions", headers={"x-request-id": "seen-live"}, json=fields):
        expect(row(page, "seen-live")).to_contain_text("running")
    expect(row(page, "seen-live")).to_contain_text("left")


def test_only_visible_rows_are_in_the_document(open_page: OpenPage, asked: RealServer) -> None:
    (known,) = asked.http.get("/v1/requests?limit=1").json()["data"]
    many = [
        {**known, "id": f"cmpl-{n}", "request_id": f"many-{n}", "created": known["created"] - n} for n in range(2000)
    ]
    page = open_page(asked.url + "/#requests")
    page.evaluate("many => import('/console/data.js').then((data) => data.addRequests(many))", many)
    rows = page.get_by_role("grid")
    expect(rows).to_have_attribute("aria-rowcount", "1001")
    assert page.locator(".window").get_by_role("row").count() < 60
    rows.press("End")
    expect(page.locator('[aria-rowindex="1001"]')).to_be_visible()
    assert page.locator(".window").get_by_role("row").count() < 60


@pytest.mark.exhaustive
def test_new_rows_do_not_move_the_visible_ones(open_page: OpenPage, asked: RealServer) -> None:
    (known,) = asked.http.get("/v1/requests?limit=1").json()["data"]
    page = open_page(asked.url + "/#requests")
    add = "many => import('/console/data.js').then((data) => data.addRequests(many))"
    old = [{**known, "id": f"steady-{n}", "created": 1000.0 - n} for n in range(100)]
    new = [{**known, "id": f"steady-new-{n}", "created": 4e9 + n} for n in range(7)]
    page.get_by_role("searchbox", name="Filter").fill("steady")
    page.evaluate(add, old)
    rows, at = page.get_by_role("grid"), page.locator(".row.at")
    expect(rows).to_have_attribute("aria-rowcount", "101")
    for _ in range(5):
        rows.press("PageDown")
    expect(at).to_have_attribute("aria-rowindex", "42")
    before = at.bounding_box()["y"]
    page.evaluate(add, new)
    expect(at).to_have_attribute("aria-rowindex", "49")
    assert at.bounding_box()["y"] == before
