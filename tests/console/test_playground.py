"""The playground, as somebody uses it who has never seen it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.console.conftest import PHONE
from tests.helpers.cases import cases
from tests.server.real_server import RealServer, until

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import expect

OpenPage = Callable[..., Any]


def count_clicks(page: Any) -> Callable[[], int]:
    page.evaluate("""() => {
        window.clicks = 0;
        addEventListener("click", (event) => { window.clicks += event.isTrusted; }, true);
    }""")
    return lambda: page.evaluate("window.clicks")


def event(delta: dict[str, Any]) -> str:
    chunk = {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    return f"data: {json.dumps(chunk)}\n\n"


def answer(page: Any) -> Any:
    return page.get_by_role("article", name="Model").last


@cases("size", [PHONE], exhaustive=[None])
def test_a_newcomer_sees_a_refusal_and_a_kept_promise_in_three_clicks(
    open_page: OpenPage, server: RealServer, size: dict[str, int] | None
) -> None:
    page = open_page(server.url, **({"viewport": size} if size else {}))
    page.evaluate("""() => import("/console/presets.js").then(({ speed }) => {
        const slow = { first_ms: 240, token_ms: 40, measured: true };  // presets that a busy machine meets
        speed.subscribe(() => speed.get().token_ms === slow.token_ms || speed.set(slow));
        speed.set(slow);
    })""")
    clicks = count_clicks(page)
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()
    page.get_by_label("First token within, ms").fill("1")
    page.get_by_role("textbox", name="Message").fill("Say something")
    page.keyboard.press("Enter")
    refused = page.get_by_role("alert").filter(has_text="Rejected")
    expect(refused).to_contain_text("first token within 1 ms is out of reach")
    expect(refused).to_contain_text("Even an idle server would be too slow")
    page.get_by_role("button", name="Relaxed").click()
    page.get_by_role("button", name="Try again").click()
    expect(answer(page)).to_contain_text("✓in time")
    page.get_by_role("button", name="See why").click()
    expect(page.get_by_role("tab", name="Requests")).to_have_attribute("aria-selected", "true")
    assert clicks() == 3
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]


def test_what_could_be_kept_is_one_click_away(page: Any) -> None:
    fields = {"reason": "ttft", "cause": "queue", "predicted_ttft_ms": 2000.0, "attainable_ms": 1234.5}
    refusal = {"error": {"message": "No", "code": "slo_unattainable", **fields}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=429, json=refusal), times=1)
    page.get_by_role("button", name="quick").click()
    page.get_by_label("First token within, ms").fill("500")
    page.get_by_role("textbox", name="Message").fill("Say something")
    page.get_by_role("textbox", name="Message").press("Enter")
    refused = page.get_by_role("alert").filter(has_text="Rejected")
    expect(refused).to_contain_text("The prompts ahead of it take too long.")
    expect(refused).to_contain_text("Possible now, with a margin2.5 s")
    shown = page.locator("body").inner_text()
    assert "1.23 s" not in shown and "2 s\n" not in shown  # one number, and it can be asked for
    with page.expect_request("**/v1/chat/completions") as sent:
        refused.get_by_role("button", name="Ask for 2.5 s and send again").click()  # with room for noise
    assert sent.value.post_data_json["slo"] == {"ttft_ms": 2500, "tpot_ms": 400, "report": True}
    expect(page.get_by_label("First token within, ms")).to_have_value("2500")
    expect(answer(page)).to_contain_text("ended at max tokens")
    expect(page.get_by_role("article", name="Model")).to_have_count(1)


def test_enter_sends_the_first_message_with_a_promise(open_page: OpenPage, server: RealServer) -> None:
    page = open_page(server.url)
    message = page.get_by_role("textbox", name="Message")
    message.fill("One")
    message.press("Shift+Enter")
    page.keyboard.type("two")
    with page.expect_request("**/v1/chat/completions") as sent:
        message.press("Enter")
    body = sent.value.post_data_json
    assert body["messages"] == [{"role": "user", "content": "One\ntwo"}]
    assert body["slo"]["ttft_ms"] > 0 and body["slo"]["tpot_ms"] > 0
    expect(message).to_have_value("")


@pytest.mark.exhaustive
def test_an_input_methods_enter_does_not_send(page: Any) -> None:
    page.get_by_role("textbox", name="Message").fill("か")
    page.get_by_role("textbox", name="Message").dispatch_event(
        "keydown", {"key": "Enter", "isComposing": True, "bubbles": True, "cancelable": True}
    )
    expect(page.get_by_role("textbox", name="Message")).to_have_value("か")
    expect(page.get_by_role("article")).to_have_count(0)


def test_presets_follow_the_machines_speed(blank: Any) -> None:
    presets = """async (engines) => {
        const { presetsOf, speedOf } = await import("/console/presets.js");
        const speed = speedOf(engines);
        return speed && [speed, Object.fromEntries(presetsOf(speed).map((one) => [one.name, one]))];
    }"""
    assert blank.evaluate(presets, [{"step_ms": None, "prompt_token_ms": None}]) is None
    for step_ms, token_ms in ((0.4, 0.001), (4.0, 0.02), (30.0, 0.3), (400.0, 20.0)):
        slow = {"step_ms": 2 * step_ms, "prompt_token_ms": token_ms}
        speed, found = blank.evaluate(presets, [slow, {"step_ms": step_ms, "prompt_token_ms": token_ms}])
        assert speed["token_ms"] == step_ms
        for name, alone in (("ttft_ms", speed["first_ms"]), ("tpot_ms", step_ms)):
            tight, normal, relaxed = (found[preset][name] for preset in ("tight", "normal", "relaxed"))
            assert 1.9 * alone < tight < normal < relaxed < 30 * alone + 300


@pytest.mark.exhaustive
def test_objectives_of_a_conversation_saved_before_there_were_presets_stay(
    open_page: OpenPage, server: RealServer
) -> None:
    page = open_page(server.url)
    page.goto(server.url + "/docs-or-nothing")
    page.evaluate("localStorage.setItem('roseinfer.conversation', JSON.stringify({ ttft_ms: 321, turns: [] }))")
    page.goto(server.url)
    expect(page.get_by_label("First token within, ms")).to_have_value("321")


def test_promised_against_seen(page: Any) -> None:
    page.get_by_role("button", name="quick").click()
    page.get_by_role("textbox", name="Message").fill("Say something")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send", exact=True).click()
    assert sent.value.post_data_json["slo"] == {"class": "quick", "report": True}
    expect(answer(page)).to_contain_text("✓in time")
    side = page.get_by_label("Objectives and settings")
    expect(side.get_by_text("✓ in time: objective 5 s")).to_be_visible()
    expect(side.get_by_text("✓ in time: objective 400 ms")).to_be_visible()
    expect(side.locator(".figures dd").first).to_have_text("8")
    meter = side.get_by_role("meter").first
    assert 10 <= float(meter.get_attribute("aria-valuenow")) < 5000
    expect(side.get_by_role("img", name="Tokens over time")).to_be_visible()


@pytest.mark.exhaustive
def test_a_slider_sets_an_objective_and_a_box_lifts_it(page: Any) -> None:
    page.get_by_role("checkbox", name="Whole answer within").check()
    slider = page.get_by_role("slider", name="Whole answer within")
    slider.fill("0")
    expect(page.get_by_label("Whole answer within, ms")).to_have_value("10")
    expect(page.get_by_title("Objectives")).to_have_text("all 10 ms")
    page.get_by_role("checkbox", name="Whole answer within").uncheck()
    expect(page.get_by_title("Objectives")).to_have_text("no objectives")


def send(page: Any, text: str) -> dict[str, Any]:
    """The body of the request for `text`, once it is answered."""
    answers = page.get_by_role("article", name="Model").count()
    page.get_by_role("textbox", name="Message").fill(text)
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send", exact=True).click()
    expect(page.get_by_role("article", name="Model")).to_have_count(answers + 1)
    expect(answer(page)).to_contain_text("Regenerate")
    return sent.value.post_data_json


def test_sampling_is_the_servers_suggestion_unless_set(page: Any) -> None:
    temperature, top_p = page.get_by_label("Temperature"), page.get_by_label("Top p")
    expect(temperature).to_have_attribute("placeholder", "0.7")
    expect(top_p).to_have_attribute("placeholder", "0.95")
    for typed, sent in (("", (0.7, 0.95)), ("0.2", (0.2, 0.95)), ("", (0.7, 0.95))):
        temperature.fill(typed)
        temperature.press("Tab")
        body = send(page, "hi")
        assert (body["temperature"], body["top_p"]) == sent


@cases(
    ("label", "typed", "left"),
    [("Temperature", "0.3", "0.3"), ("Max tokens", "0", "1000")],
    exhaustive=[("Max tokens", "77", "77"), ("First token within, ms", "4321", "4321")],
)
def test_what_is_typed_while_an_answer_arrives_stays(page: Any, label: str, typed: str, left: str) -> None:
    ask_for_long_answers(page)
    page.get_by_role("button", name="quick").click()
    page.get_by_role("textbox", name="Message").fill("Go on")
    page.get_by_role("button", name="Send", exact=True).click()
    page.get_by_label(label, exact=True).fill(typed)
    for _ in range(2):  # more of the answer is drawn
        drawn = answer(page).inner_text()
        expect(answer(page)).not_to_have_text(drawn, use_inner_text=True)
    expect(page.get_by_label(label, exact=True)).to_have_value(typed)
    page.get_by_label(label, exact=True).press("Tab")
    expect(page.get_by_label(label, exact=True)).to_have_value(left)


def test_turns_are_told_again_and_regenerated(page: Any) -> None:
    page.get_by_label("System prompt").fill("Be short")
    for text in ("One", "Two"):
        sent = send(page, text)
    assert [turn["role"] for turn in sent["messages"]] == ["system", "user", "assistant", "user"]
    with page.expect_request("**/v1/chat/completions") as again:
        page.get_by_role("button", name="Regenerate").click()
    assert again.value.post_data_json["messages"] == sent["messages"]
    expect(answer(page)).to_contain_text("Regenerate")
    expect(page.get_by_role("article", name="Model")).to_have_count(2)


def ask_for_long_answers(page: Any) -> None:
    page.get_by_label("Max tokens").fill("1000")
    page.get_by_label("Max tokens").press("Tab")


def test_an_answer_can_be_stopped(page: Any, server: RealServer) -> None:
    ask_for_long_answers(page)
    page.get_by_role("textbox", name="Message").fill("Go on and on")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(answer(page).locator("p").first).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    expect(answer(page)).to_contain_text("stopped")
    server.until_idle()


def test_completion(page: Any) -> None:
    page.get_by_role("button", name="Completion").click()
    page.get_by_role("textbox", name="Prompt", exact=True).fill("def f(")
    with page.expect_request("**/v1/completions") as sent:
        page.get_by_role("button", name="Send", exact=True).click()
    assert sent.value.post_data_json["prompt"] == "def f("
    expect(answer(page).locator(".answer")).not_to_be_empty()


def test_a_conversation_is_kept_exported_and_imported(page: Any, tmp_path: Path) -> None:
    page.get_by_role("textbox", name="Message").fill("<b>Keep</b> this")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(answer(page)).to_contain_text("Regenerate")
    said = answer(page).locator(".answer").inner_text()
    page.reload()
    expect(answer(page).locator(".answer")).to_have_text(said, use_inner_text=True)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    download.value.save_as(tmp_path / "kept.json")
    page.get_by_role("button", name="New", exact=True).click()
    expect(page.get_by_role("article")).to_have_count(0)
    page.get_by_label("File of a conversation").set_input_files(tmp_path / "kept.json")
    expect(answer(page).locator(".answer")).to_have_text(said, use_inner_text=True)
    expect(page.get_by_role("article", name="You")).to_have_text("<b>Keep</b> this")  # text, not elements
    (tmp_path / "other.json").write_text(json.dumps({"turns": []}))
    page.get_by_label("File of a conversation").set_input_files(tmp_path / "other.json")
    expect(page.get_by_role("alert")).to_have_text("The file is not a conversation of this console")


@pytest.mark.exhaustive
def test_a_request_that_was_not_understood_has_no_why(page: Any) -> None:
    page.get_by_role("textbox", name="Message").fill("word " * 3000)
    page.get_by_role("button", name="Send", exact=True).click()
    expect(answer(page).get_by_role("alert")).to_contain_text("Error 400")
    expect(answer(page).get_by_role("button", name="See why")).to_have_count(0)


@pytest.mark.exhaustive
def test_a_file_that_lacks_what_the_page_draws_does_it_no_harm(page: Any) -> None:
    odd = {"state": "refused", "promised": 1, "seen": None, "points": [[1], "x"], "tools": 5, "told": {"met": 2}}
    turns = [
        {"role": "user", "text": "q"},
        {"role": "assistant", "text": "a"},
        {"role": "assistant", "text": "b", **odd},
    ]
    said = {"format": "roseinfer-conversation", "version": 1, "mode": "neither", "temperature": 1e9, "turns": turns}
    file = {"name": "odd.json", "mimeType": "application/json", "buffer": json.dumps(said).encode()}
    page.get_by_label("File of a conversation").set_input_files(file)
    expect(page.get_by_role("article")).to_have_count(3)
    page.reload()
    expect(page.get_by_role("article")).to_have_count(3)
    expect(page.get_by_label("Temperature")).to_have_value("")


@pytest.mark.exhaustive
def test_a_new_conversation_ends_the_answer_that_runs(page: Any) -> None:
    ask_for_long_answers(page)
    for _ in range(2):
        page.get_by_role("textbox", name="Message").fill("Say something long")
        page.get_by_role("textbox", name="Message").press("Enter")
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        page.get_by_role("button", name="New", exact=True).click()
        expect(page.get_by_role("article")).to_have_count(0)


def test_earlier_conversations_are_kept_and_can_be_deleted(page: Any) -> None:
    for text in ("The first", "The second"):
        page.get_by_role("textbox", name="Message").fill(text)
        page.get_by_role("textbox", name="Message").press("Enter")
        expect(answer(page)).to_contain_text("Regenerate")
        page.get_by_role("button", name="New", exact=True).click()
    kept = page.get_by_role("region", name="Earlier conversations")
    expect(kept.get_by_role("listitem")).to_contain_text(["The second", "The first"])
    page.reload()
    kept.get_by_role("button", name="The first", exact=True).click()
    expect(page.get_by_role("article", name="You")).to_have_text("The first")
    expect(kept.get_by_role("listitem")).to_contain_text(["The second"])
    kept.get_by_role("button", name="Delete The second").click()
    expect(kept).to_have_count(0)
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_role("article")).to_have_count(0)
    until(lambda: not re.search("The (first|second)", page.evaluate("JSON.stringify(localStorage)")))  # saved later


@pytest.mark.exhaustive
def test_only_so_many_conversations_are_kept(page: Any) -> None:
    kept = page.evaluate("""async () => {
        const { begin, conversation, earlier } = await import("/console/conversation.js");
        for (let n = 0; n < 40; n++) {
            const text = `${n} ${"x".repeat(n === 39 ? 1.5e6 : 1e4)}`;
            conversation.set({ turns: [{ id: `${n}`, role: "user", text }] });
            begin();
        }
        return earlier.get().list.map((one) => one.turns[0].text.split(" ")[0]);
    }""")
    assert kept == [str(n) for n in range(39, 9, -1)]


# --- Markdown -------------------------------------------------------------------------------------------------------
def show(page: Any, text: str) -> Any:
    """Let the model answer `text`, and return the answer."""
    body = event({"content": text}) + "data: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
        times=1,
    )
    page.get_by_role("textbox", name="Message").fill("Show")
    page.get_by_role("textbox", name="Message").press("Enter")
    expect(answer(page)).to_contain_text("Regenerate")
    return answer(page).locator(".answer")


def test_markdown_becomes_elements(page: Any) -> None:
    shown = show(
        page,
        """# A title #
Some **bold**, *italic*, `a*b*c` and a [link](https://example.org/x?y=1).
snake_case_name, def __init__(self, *args, **kwargs), 2 * 3 * 4 and https://example.org/plain.

- first
- second
  1. inner

> quoted

| name | value |
| --- | --- |
| a | `1` |

```python
print("*not italic*")""",
    )
    expect(shown.get_by_role("heading", level=2)).to_have_text("A title")
    expect(shown.locator("strong")).to_have_text("bold")
    expect(shown.locator("em")).to_have_text(["italic"])
    expect(shown.locator("p code")).to_have_text("a*b*c")
    expect(shown.get_by_role("link").first).to_have_attribute("href", "https://example.org/x?y=1")
    expect(shown.get_by_role("link").nth(1)).to_have_attribute("href", "https://example.org/plain")
    expect(shown.get_by_role("link").first).to_have_attribute("rel", "noopener noreferrer nofollow")
    expect(shown).to_contain_text("snake_case_name, def __init__(self, *args, **kwargs), 2 * 3 * 4")
    expect(shown.locator("ul > li")).to_have_count(2)
    expect(shown.locator("ul ol > li")).to_have_text("inner")
    expect(shown.locator("blockquote")).to_have_text("quoted")
    expect(shown.locator("td")).to_have_text(["a", "1"])
    expect(shown.locator("pre")).to_have_text('print("*not italic*")')  # its fence is still open


HOSTILE = """<script>window.bad = 1</script> <img src=x onerror="window.bad = 1"> <b>tag</b>
[a](javascript:window.bad=1) [b](JaVaScRiPt:window.bad=1) [c](data:text/html,x) [d](vbscript:x) [e](//example.org)
[f](&#106;avascript:window.bad=1) ![g](https://example.org/pixel.png) [h](https://example.org/"onclick="window.bad=1)
**<i>x</i>** `<u>` # <svg onload=window.bad=1>
"""


def test_hostile_text_stays_text(page: Any) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    shown = show(page, HOSTILE)
    expect(shown).to_contain_text("<script>window.bad = 1</script>")
    expect(shown).to_contain_text("[a](javascript:window.bad=1)")
    found = shown.evaluate("(element) => [...element.querySelectorAll('*')].map((one) => one.tagName)")
    assert set(found) <= {"P", "A", "STRONG", "CODE"}
    for address in shown.locator("a").evaluate_all("(links) => links.map((link) => link.href)"):
        assert address.startswith("https://example.org/")
    names = shown.locator("a").evaluate_all("(links) => links.flatMap((link) => link.getAttributeNames())")
    assert set(names) <= {"href", "target", "rel"}
    assert page.evaluate("window.bad") is None
    assert not any("example.org" in url for url in asked)


@pytest.mark.parametrize(
    "text",
    [
        "*" * 50_000,
        "`" * 19_999,
        "``` " + "a" * 100_000 + "`",
        "# a" + " " * 100_000 + "b",
        "[a](" * 4_000,
        "**a " * 4_900,
        "_a " * 6_000,
        "> " * 50_000,
        "- " * 50_000,
        "\n".join("  " * n + "- x" for n in range(300)),
        "|" * 50_000 + "\n" + "|-" * 25_000 + "|",
        "```\n" * 20_000,
        "word **bold** `code` " * 9_000,
        "x" * 500_000,
    ],
    ids=lambda text: f"{text[:6]!r}x{len(text)}",
)
def test_texts_made_to_be_slow_are_shown(blank: Any, text: str) -> None:
    """`Text` as a function: its elements hold all of the text's letters."""
    letters = blank.evaluate(
        """async (text) => {
            const [{ Text }, { html, render }] = await Promise.all(
                [import("/console/text.js"), import("/console/vendor/htm-preact-3.1.1.js")]);
            const holder = document.createElement("div");
            render(html`<${Text} text=${text} />`, holder);
            return holder.textContent.match(/[a-z]/g)?.length ?? 0;
        }""",
        text,
    )
    assert letters == sum(letter.isalpha() for letter in text)


def test_reasoning_calls_and_code_are_shown_plainly(page: Any) -> None:
    deltas = [
        {"role": "assistant", "reasoning_content": "Let me think"},
        {"content": "Look:\n```python\nprint('<i>')\n```\n<script>x</script>"},
        {"tool_calls": [{"index": 0, "function": {"name": "weather", "arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]},
    ]
    chunks = [
        {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    page.get_by_role("textbox", name="Message").fill("Think")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(answer(page).locator("code").first).to_have_text("print('<i>')")
    expect(answer(page)).to_contain_text("<script>x</script>")
    expect(answer(page)).to_contain_text('weather({"city": "Rome"})')
    answer(page).get_by_text("Reasoning").click()
    expect(answer(page).get_by_text("Let me think")).to_be_visible()


def test_an_answer_that_is_cut_off_says_so(page: Any) -> None:
    body = event({"content": "half"})
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    page.get_by_role("textbox", name="Message").fill("Go")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(answer(page)).to_contain_text("half")
    expect(answer(page).get_by_role("alert")).to_contain_text("cut off before its end")
