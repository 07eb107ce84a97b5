"""Figures of the open-loop client, with scripted server bytes and clock readings."""

import asyncio
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import aiohttp
import pytest

from roseinfer.bench.arrivals import PlannedRequest, draw
from roseinfer.bench.config import OpenLoopConfig
from roseinfer.bench.exchange import NO_DONE, NO_FINISH_REASON, NO_USAGE, EventReader, read_event
from roseinfer.bench.open_loop import LoadOutcome, StreamClient, run
from roseinfer.bench.open_loop_report import as_text, summarise
from roseinfer.cli import main as cli
from roseinfer.core.config.server import ServerConfig
from tests.bench.slo_stub import stub
from tests.cli.terminal.pseudo_terminal import PseudoTerminal
from tests.server.live import LiveServer
from tests.text.tokenizers import byte_level

PLANNED = PlannedRequest(3, 0.0, [11, 12], 7)
READINGS_BEFORE_A_PIECE = 3


class WrittenClock:
    """Clock with scripted readings."""

    def __init__(self, readings: Sequence[float]) -> None:
        self._readings = list(readings)
        self.taken = 0

    def __call__(self) -> float:
        self.taken += 1
        return self._readings[self.taken - 1]


@dataclass
class CannedServer:
    """Answers one request with given bytes; sends each piece once the client has read the clock for the
    previous one.
    """

    status: str
    pieces: Sequence[bytes]
    clock: WrittenClock
    body: bytes = b""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-l"))
        self.body = await reader.readexactly(length)
        writer.write(f"HTTP/1.1 {self.status}\r\nconnection: close\r\n\r\n".encode())
        for number, piece in enumerate(self.pieces):
            while self.clock.taken < READINGS_BEFORE_A_PIECE + number and self.status.startswith("200"):
                await asyncio.sleep(0)
            writer.write(piece)
        writer.close()


async def send(status: str, pieces: Sequence[bytes], readings: Sequence[float]) -> tuple[LoadOutcome, bytes]:
    clock = WrittenClock(readings)
    canned = CannedServer(status, pieces, clock)
    server = await asyncio.start_server(canned.answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, aiohttp.ClientSession() as session:
        client = StreamClient(session, OpenLoopConfig(url=url, temperature=0.5), "m", clock)
        outcome = await client.send(PLANNED, client.body(PLANNED))
    return outcome, canned.body


def token(text: str, finish_reason: str | None = None) -> bytes:
    choice = {"text": text, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice], "usage": None}).encode() + b"\n\n"


def usage(tokens: int) -> bytes:
    return b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":%d}}\n\n' % tokens


def test_figures_of_one_request():
    """Use two chunks in one read, a split chunk, merged tokens, a comment, the usage and the end."""
    cut = token("c", "length")
    pieces = [token("a") + token("b"), b": hi\n\n" + cut[:9], cut[9:] + usage(7), b"data: [DONE]\n\n"]
    outcome, body = asyncio.run(send("200 OK", pieces, [100, 100, 100.5, 101, 101.5, 102, 103, 104]))
    assert json.loads(body) == {
        "model": "m",
        "prompt": [11, 12],
        "max_tokens": 7,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert (outcome.ok, outcome.status, outcome.error) == (True, 200, None)
    assert (outcome.start_s, outcome.end_s, outcome.output_tokens) == (0.5, 4, 7)
    assert outcome.chunk_s == [0.5, 0.5, 1.5]
    assert (outcome.ttft_s, outcome.latency_s, outcome.tpot_s, outcome.itl_s) == (0.5, 1.5, 1 / 6, [0.0, 1.0])


def test_without_usage_a_chunk_is_a_token_and_the_request_has_failed():
    pieces = [token("a"), token("b", "stop"), b"data:[DONE]\n\n"]
    outcome, _ = asyncio.run(send("200 OK", pieces, [0, 0, 0, 1, 3, 4, 5]))
    assert (outcome.output_tokens, outcome.tpot_s, outcome.ok, outcome.error) == (2, 2.0, False, NO_USAGE)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([token("a"), token("b", "stop"), usage(2)], NO_DONE),
        ([token("a"), token("b"), usage(2), b"data: [DONE]\n\n"], NO_FINISH_REASON),
    ],
)
def test_a_stream_that_is_cut_has_failed_however_politely(pieces, error):
    outcome, _ = asyncio.run(send("200 OK", pieces, range(9)))
    assert (outcome.ok, outcome.error) == (False, error)


def test_tokens_of_a_chunk_are_counted_where_the_server_counts_them():
    """Count a chunk of two tokens after 3 s as two gaps of 1.5 s."""

    def chunk(tokens: int, reason: str | None = None) -> bytes:
        content = {"choices": [{"text": "x", "finish_reason": reason}], "usage": {"completion_tokens": tokens}}
        return b"data: " + json.dumps(content).encode() + b"\n\n"

    pieces = [chunk(1), chunk(3), chunk(4, "length"), b"data: [DONE]\n\n"]
    outcome, _ = asyncio.run(send("200 OK", pieces, [0, 0, 0, 1, 4, 5, 6, 7]))
    assert outcome.ok and outcome.chunk_tokens == [1, 2, 1] and outcome.itl_s == [1.5, 1.5, 1.0]


def test_an_end_without_a_token_is_no_chunk():
    """Make an exception if the server counts a token, which may have no text."""
    pieces = [token("a"), token("b"), token("", "length")]
    for tokens, chunks in ((2, [1, 2]), (3, [1, 2, 3])):
        ended = [*pieces, usage(tokens), b"data: [DONE]\n\n"]
        outcome, _ = asyncio.run(send("200 OK", ended, [0, 0, 0, 1, 2, 3, 4, 5, 6]))
        assert outcome.ok and outcome.chunk_s == chunks


def test_what_a_chat_sends_beside_tokens_is_no_chunk():
    assert read_event(b'{"choices":[{"delta":{"role":"assistant","content":""}}]}') == (None, False)
    assert read_event(b'{"choices":[{"delta":{},"finish_reason":"stop"}]}') == (None, False)
    assert read_event(b'{"choices":[{"delta":{"content":""}}]}') == (None, True), "a token without text"


@pytest.mark.parametrize(
    ("status", "pieces", "error"),
    [
        ("503 Busy", [b"no room"], "no room"),
        ("200 OK", [token("a"), b'data: {"error": {"message": "gone"}}\n\n'], "gone"),
        ("200 OK", [token("a")], None),
    ],
)
def test_a_failure_is_a_result(status, pieces, error):
    outcome, _ = asyncio.run(send(status, pieces, range(9)))
    assert not outcome.ok
    assert error is None or error in outcome.error


def test_nobody_listens():
    (outcome,) = run(OpenLoopConfig(url="http://127.0.0.1:9", model="m", num=1, procs=1))
    assert not outcome.ok and "Connect" in outcome.error


def test_events_cut_anywhere():
    whole = b'data: {"a":1}\n\n: comment\r\ndata:b\r\n\r\nevent: x\ndata: [DONE]\n\n'
    for size in range(1, len(whole)):
        reader = EventReader()
        events = [event for i in range(0, len(whole), size) for event in reader.feed(whole[i : i + size])]
        assert events == [b'{"a":1}', b"b", b"[DONE]"]


def test_usage_may_come_with_a_chunk():
    assert read_event(b'{"choices":[{}],"usage": {"completion_tokens":3}}') == (3, True)
    assert read_event(b'{"choices":[{}],"usage":null}') == (None, True)


def outcome(number: int, start_s: float, end_s: float, chunks: list[float], tokens: int, **more) -> LoadOutcome:
    return LoadOutcome(
        number, 10, 3, start_s=start_s, end_s=end_s, status=200, ok=True, output_tokens=tokens, chunk_s=chunks, **more
    )


def test_summary_by_hand():
    failed = LoadOutcome(2, 10, 3, start_s=0.0, end_s=9.0, status=500, error="x" * 200)
    outcomes = [
        outcome(0, 1.0, 3.0, [0.5, 1.0, 2.0], 3),
        outcome(1, 2.0, 5.0, [1.5], 1),
        failed,
        LoadOutcome(3, 10, 3, start_s=1.0, end_s=2.0, status=503, error="full"),
    ]
    summary = summarise(outcomes)
    counts = {key: summary[key] for key in ("requests", "ok", "rejected", "failed", "short")}
    assert counts == {"requests": 4, "ok": 2, "rejected": 1, "failed": 1, "short": 1}
    assert (summary["wall_s"], summary["out_tok_s"], summary["in_tok_s"]) == (9.0, 4 / 9, 20 / 9)
    assert summary["ttft_ms"]["p50"] == 1000 and summary["ttft_ms"]["p99"] == pytest.approx(1490)
    assert summary["tpot_ms"]["p50"] == pytest.approx(375) and summary["tpot_ms"]["p99"] == pytest.approx(742.5)
    assert summary["itl_ms"] == {"p50": 750, "p90": 950, "p95": 975, "p99": 995}
    assert summary["e2e_ms"]["p50"] == 1750
    assert summary["errors"] == {"x" * 160: 1, "full": 1}
    assert "1 rejected" in as_text(summary) and "p99 995.000" in as_text(summary)


def test_summary_of_nothing():
    summary = summarise([LoadOutcome(0, 1, 1, status=503, error="full")])
    assert summary["ttft_ms"]["p50"] is None and summary["out_tok_s"] == 0.0
    assert "TTFT ms:" in as_text(summary)


def test_several_processes_against_a_server():
    with LiveServer(byte_level()) as live:
        config = OpenLoopConfig(url=live.url, num=7, procs=3, in_len=4, out_len=5, vocab=300)
        outcomes = run(config)
        prompts = {tuple(request.prompt.ids) for request in live.engine.requests}
    assert [outcome.number for outcome in outcomes] == list(range(7)) and len(prompts) == 7
    summary = summarise(outcomes)
    assert (summary["ok"], summary["short"], summary["errors"]) == (7, 0, {})
    assert all(outcome.output_tokens == 5 and outcome.chunk_s for outcome in outcomes)


def test_command(tmp_path, capsys):
    file = tmp_path / "out.json"
    argv = ["--num", "3", "--procs", "1", "--in-len", "4", "--out-len", "5", "--vocab", "300", "--label", "here"]
    with LiveServer(byte_level(), ServerConfig(api_key=("secret",))) as live:
        url = ["--url", live.url, "--api-key"]
        assert cli.main(["bench", "serve", *argv, *url, "secret", "--json", str(file)]) == 0
        assert cli.main(["bench", "serve", *argv, *url, "wrong", "--model", "fake"]) == 1
        assert cli.main(["bench", "serve", *argv, *url, "wrong"]) == 2
    printed = capsys.readouterr()
    assert "3 ok" in printed.out and "3 failed" in printed.out and "--url" in printed.err
    result = json.loads(file.read_text())
    assert result["summary"]["out_tok_s"] > 0 and result["label"] == "here" and result["hardware"]["cores"] > 0
    assert "secret" not in file.read_text() + printed.out


def test_a_share_of_the_requests_follows_a_schema_and_the_others_are_the_same(capsys):
    with LiveServer(byte_level()) as live:
        config = OpenLoopConfig(url=live.url, num=6, procs=1, in_len=4, out_len=5, vocab=300, schema_share=0.5)
        some, none = (draw(replace(config, schema_share=share)) for share in (0.5, 0.0))
        assert [planned.schema is None for planned in some] == [True, False] * 3
        assert [replace(planned, schema=None) for planned in some] == none
        summary = summarise(run(config))
        guided = [request.prompt.guide is not None for request in live.engine.requests]
    assert sorted(guided) == [False] * 3 + [True] * 3
    assert {name: (own["requests"], own["output_tokens"]) for name, own in summary["constrained"].items()} == {
        "constrained": (3, 15),
        "free": (3, 15),
    }
    assert summary["out_tokens"] == 30 and "constrained: 3 requests, 15 output tokens" in as_text(summary)


def test_an_interrupt_ends_the_load_and_says_nothing():
    """Interrupt as at a terminal, where the client processes get the signal as well."""
    with stub() as (url, asked):
        load = ("--workload", "uniform", "--rate", "20", "--num", "2000", "--procs", "2")
        with PseudoTerminal("bench", "serve", "--url", url, *load) as terminal:
            deadline = time.monotonic() + 60
            while not asked:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            terminal.type("\x03")
            assert terminal.exit_code() == 130
            assert "Traceback" not in terminal.shown


@pytest.mark.parametrize("url", ["nowhere", "http://[::1", "ftp:/x"])
def test_what_is_no_address(url, capsys):
    assert cli.main(["bench", "serve", "--url", url, "--num", "1"]) == 2
    assert f"--url: cannot list the models of {url!r}: " in capsys.readouterr().err


def test_no_server_at_the_address(capsys):
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert cli.main(["bench", "serve", "--url", url, "--num", "1"]) == 2
    assert f"models of {url!r}: Connection refused; is it the address of a server?" in capsys.readouterr().err


def test_a_model_that_the_server_does_not_have(capsys):
    with LiveServer(byte_level()) as live:
        assert cli.main(["bench", "serve", "--url", live.url, "--num", "1", "--model", "nope"]) == 2
    assert "--model: the server does not serve 'nope'" in capsys.readouterr().err
