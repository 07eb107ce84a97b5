"""Metrics of a server and the view made of them."""

import io
import json
import sys

import pytest
from rich.console import Console

from roseinfer.cli import main as cli
from roseinfer.cli.terminal import top_screen
from roseinfer.cli.terminal.metrics import Scrape, Window, parse_metrics
from roseinfer.cli.terminal.overview import overview, slowest_of
from roseinfer.cli.terminal.remote import Remote, RemoteError
from roseinfer.cli.terminal.top_text import as_text
from roseinfer.cli.terminal.watching import Watcher, WatchState
from roseinfer.core.extras import install_command
from roseinfer.core.slo import Cause
from tests.cli.terminal.pseudo_terminal import PseudoTerminal
from tests.cli.terminal.saying import saying
from tests.server.fake_engine import rejected
from tests.server.live import LiveServer

# Metrics as vLLM writes them, without any of ours.
VLLM = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="qwen"} 3.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="qwen"} 0.25
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="qwen"} %s
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="qwen"} %s
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.2",model_name="qwen"} %s
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="qwen"} %s
"""


def vllm(at_s: float, tokens: float, *buckets: float) -> Scrape:
    return parse_metrics(VLLM % (tokens, *buckets), at_s)


def counter(at_s: float, **values: float) -> Scrape:
    return parse_metrics("\n".join(f'n_total{{engine="{key[1:]}"}} {value}' for key, value in values.items()), at_s)


def test_rates_are_of_the_window() -> None:
    window = Window(counter(10.0, e0=5, e1=1), counter(12.0, e0=9, e1=4))
    assert window.rate("n_total") == 3.5
    assert window.rate("n_total", engine="1") == 1.5
    assert window.rate("m_total") is None


def test_a_counter_that_fell_began_anew() -> None:
    assert Window(counter(0.0, e0=100), counter(1.0, e0=7)).increase("n_total") == 7
    assert Window(counter(0.0), counter(1.0, e0=7)).increase("n_total") == 7
    assert Window(counter(0.0, e0=100, e1=5), counter(1.0, e1=7)).increase("n_total") == 2, "an engine is gone"


def test_one_reading_twice_has_no_rates() -> None:
    now = counter(1.0, e0=7)
    assert Window(now, now).rate("n_total") is None


def test_quantiles_are_those_of_prometheus() -> None:
    """50 of the new samples are at most 0.1, 40 at most 0.2, 10 above."""
    window = Window(vllm(0.0, 0, 100, 100, 100), vllm(1.0, 0, 150, 190, 200))
    name = "vllm:time_to_first_token_seconds"
    assert window.quantile(0.25, name) == pytest.approx(0.05)
    assert window.quantile(0.7, name) == pytest.approx(0.15)
    assert window.quantile(0.99, name) == pytest.approx(0.2)
    assert Window(window.after, window.after).quantile(0.5, name) is None
    restarted = Window(window.after, vllm(2.0, 0, 10, 10, 10))
    assert restarted.quantile(0.5, name) == pytest.approx(0.05)


def test_engines_of_several_models_are_shown_with_them() -> None:
    text = """vllm:num_requests_running{engine="0",model_name="a"} 0
vllm:num_requests_running{engine="1",model_name="b"} 1
"""
    window = Window(parse_metrics(text, 0.0), parse_metrics(text, 1.0))
    view = overview(window, None, 0, 0.0)
    assert view["models"] == ["a", "b"]
    assert [(row["engine"], row["model"], row["running"]) for row in view["engines"]] == [("0", "a", 0), ("1", "b", 1)]
    assert "1 b" in as_text({"url": "http://x", "at": 0.0, **view})


def test_drafts_are_shown_where_there_are_any() -> None:
    def read(at_s: float, steps: int, drafted: list[int], accepted: list[int]) -> Scrape:
        lines = [f'roseinfer:spec_steps_total{{engine="0",proposer="ngram"}} {steps}']
        for name, counts in (("drafted", drafted), ("accepted", accepted)):
            for position, count in enumerate(counts):
                labels = f'engine="0",proposer="ngram",position="{position}"'
                lines.append(f"roseinfer:spec_{name}_tokens_total{{{labels}}} {count}")
        return parse_metrics("\n".join(lines) + "\n", at_s)

    window = Window(read(0.0, 10, [10], [5]), read(2.0, 20, [20, 10], [15, 1]))
    view = overview(window, [], 5, 0.0)
    (row,) = view["drafts"]
    assert (row["proposer"], row["drafted_s"], row["accepted_s"]) == ("ngram", 10.0, 5.5)
    assert (row["accepted_share"], row["tokens_per_step"]) == (0.55, 2.1)
    assert row["accepted_by_position"] == [0.75, 0.1]
    shown = as_text({"url": "http://x", "at": 0.0, **view})
    assert "ngram" in shown and "75.0%  10.0%" in shown
    nothing = vllm(0.0, 0, 0, 0, 0)
    assert "accepted by position" not in as_text(
        {"url": "x", "at": 0.0, **overview(Window(nothing, nothing), [], 5, 0)}
    )


def test_engines_are_in_order_of_their_numbers() -> None:
    assert counter(0.0, e10=1, e2=1, eall=1).values("engine", "n_total") == ["2", "10", "all"]


@pytest.mark.parametrize("text", ["{", 'a{b="c} 1', "a b c d e"])
def test_what_is_no_metrics(text: str) -> None:
    with pytest.raises(RemoteError, match="not Prometheus text"):
        parse_metrics(text, 0.0)


def test_a_server_with_the_metrics_of_vllm_alone() -> None:
    view = overview(Window(vllm(0.0, 10, 0, 0, 0), vllm(2.0, 50, 4, 4, 4)), None, 5, 0.0)
    assert view["models"] == ["qwen"] and view["promises"] == [] and view["slowest"] is None
    assert view["machine"]["generation_tok_s"] == 20 and view["machine"]["running"] == 3
    assert view["machine"]["ttft_ms"] == {"p50": 50, "p95": 95, "p99": 99}
    (engine,) = view["engines"]
    assert (engine["kv_usage"], engine["state"], engine["utilisation"]) == (0.25, None, None)
    shown = as_text({"url": "http://x", "at": 0.0, **view})
    assert "25.0%" in shown and "no requests yet, or no objectives" in shown


def test_a_server_that_loads_shows_what_there_is() -> None:
    now = parse_metrics('http_requests_total{handler="/health"} 1', 0.0)
    assert "no model yet" in as_text({"url": "http://x", "at": 0.0, **overview(Window(now, now), [], 5, 0.0)})


def record(name: str, **fields: object) -> dict[str, object]:
    return {"id": name, "state": "ended", "class": "chat", "created": 100.0, **fields}


def test_the_slowest_are_those_that_took_longest_so_far() -> None:
    records = [
        record("a", seen={"e2e_ms": 500.0}),
        record("b", seen={"e2e_ms": 4000.0}, why={"verdict": "seats", "summary": "all seats\x1b[2J were taken"}),
        record("c", state="live", seen={"e2e_ms": None}),
        record("d", seen={"e2e_ms": None}),
    ]
    rows = slowest_of(records, 3, now_s=102.0)
    assert [(row["id"], row["e2e_ms"]) for row in rows] == [("b", 4000), ("c", 2000), ("a", 500)]
    now = vllm(0.0, 0, 0, 0, 0)
    shown = as_text({"url": "http://x", "at": 0.0, **overview(Window(now, now), records, 3, 102.0)})
    assert "all seats[2J were taken" in shown and "4 s" in shown


def test_once_as_json(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.engine.script = lambda request: [rejected(cause=Cause.QUEUE)]
    server.post("/v1/completions", {"prompt": "x", "slo": {"ttft_ms": 1}})
    assert cli.main(["top", server.url, "--once", "--json", "--interval", "0.01"]) == 0
    view = json.loads(capsys.readouterr().out)
    (promise,) = (promise for promise in view["promises"] if promise["class"] == "custom")
    assert promise["outcomes"]["rejected"] >= 1 and promise["refused_because"]["queue"] >= 1
    assert view["models"] == ["fake"] and view["engines"][0]["state"] == "ready"


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["--json"], 2, "--json requires --once"),
        (["http://127.0.0.1:1", "--once"], 1, "Connection refused"),
        (["not-a-url", "--once"], 2, "--url: invalid URL 'not-a-url'"),
        ([], 2, "requires a terminal"),
    ],
)
def test_what_cannot_be_shown(argv: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", *argv]) == status
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_the_live_view_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert cli.main(["top"]) == 2
    assert install_command("terminal") in capsys.readouterr().err


def test_a_server_that_goes_away_and_comes_back() -> None:
    with saying(_answer(VLLM % (10, 0, 0, 0))) as url:
        watching = Watcher(Remote(url), 0.01, 5)
        watching.look()
        watching.look()
    assert watching.seen.error is None and watching.seen.view is not None
    watching.look()
    assert "cannot reach" in (watching.seen.error or "") and watching.seen.lost_s is not None
    since = watching.seen.lost_s
    watching.look()
    assert watching.seen.lost_s == since
    shown = drawn(watching)
    assert "cannot reach" in shown and "qwen" in shown, "what was known stays"


def _answer(body: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def drawn(watching: Watcher, width: int = 100, *, plain: bool = False) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=not plain).print(top_screen.picture("http://x", watching.seen, width))
    return out.getvalue()


@pytest.mark.parametrize(("width", "kept"), [(200, 9), (90, 6), (45, 2)])
def test_columns_are_whole_or_not_there(width: int, kept: int) -> None:
    seen, wanted = {"e2e_ms": 1234.0, "ttft_ms": 196.0, "tpot_ms": 31.0}, {"ttft_ms": 500.0, "tpot_ms": 30.0}
    why = {"summary": "Late: it ran without a break, and each token took longer than was promised."}
    records = [record("chatcmpl-193df56c3072", outcome="missed_tpot", seen=seen, objectives=wanted, why=why)]
    now = vllm(0.0, 0, 0, 0, 0)
    watching = Watcher(Remote("http://x"), 1.0, 5)
    watching.seen = WatchState(overview(Window(now, now), records, 3, 102.0))
    *_, titles, row, _ = drawn(watching, width, plain=True).splitlines()
    assert titles.split()[-1] == "why" and len(titles.split()) == kept
    assert row.startswith("193df56c3072  ") and "Late:" in row and row.rstrip().endswith("…") == (width < 200)


def test_a_narrow_screen(server: LiveServer) -> None:
    watching = Watcher(Remote(server.url), 0.01, 5)
    watching.look()
    shown = drawn(watching, width=40)
    assert "engines" in shown and "fake" in shown


def test_top_at_a_terminal(server: LiveServer) -> None:
    """The view follows the size of the terminal, and q restores the terminal."""
    with PseudoTerminal("top", server.url, "--interval", "0.1", columns=70) as terminal:
        terminal.until("engines")
        terminal.resize(160, 40)
        terminal.until("budget")  # outside the narrow terminal
        terminal.type("q")
        assert terminal.exit_code() == 0
        assert "\x1b[?1049l" in terminal.shown


@pytest.mark.parametrize("ignores_interrupts", [False, True])
def test_ctrl_c_leaves_too(ignores_interrupts: bool) -> None:
    with PseudoTerminal("top", "http://127.0.0.1:1", ignores_interrupts=ignores_interrupts) as terminal:
        terminal.until("cannot reach")
        terminal.type("\x03")
        assert terminal.exit_code() == 0
