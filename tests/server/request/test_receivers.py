"""Streams on the wire: format, order, failures, keep-alive, when the header goes out."""

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from roseinfer.core.errors import EngineDeadError, OutputTextError, RequestFailedError, RequestTooLongError
from roseinfer.core.outputs import FinishReason
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.api import SequenceChunk
from roseinfer.server.formats.answers import EventEncoder
from roseinfer.server.formats.completions import CompletionFormat
from roseinfer.server.request.job import Job, StreamChoices, Usage
from roseinfer.server.request.receivers import EventStream, StreamAnswer
from roseinfer.text.tokenizer import Tokenizer
from tests.server.fake_engine import Wait, fake_logprobs
from tests.server.live import PATIENCE_S, LiveServer, events, http_post, read_all

Serve = Callable[..., LiveServer]


def stream(server: LiveServer, **fields: Any) -> list[Any]:
    answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 3, "stream": True} | fields)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    return chunks


def test_one_chunk_per_token_then_finish_then_done(server: LiveServer) -> None:
    chunks = stream(server)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["hello", " world", ",", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
    assert chunks[-1]["choices"][0]["stop_reason"] is None
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_exact_bytes_of_a_chunk(server: LiveServer) -> None:
    body = {"prompt": "x", "max_tokens": 1, "stream": True}
    text = server.post("/v1/completions", body, headers={"X-Request-Id": "r1"}).text
    first, second, third, end = text.split("\n\n")
    created = json.loads(first[6:])["created"]
    head = f'data: {{"id":"cmpl-r1","object":"text_completion","created":{created},"model":"fake","choices":'
    assert first == head + '[{"index":0,"text":"hello","logprobs":null,"finish_reason":null}]}'
    assert second == head + '[{"index":0,"text":"","logprobs":null,"finish_reason":"length","stop_reason":null}]}'
    assert (third, end) == ("data: [DONE]", "")


def test_include_usage_comes_last(server: LiveServer) -> None:
    *chunks, usage = stream(server, stream_options={"include_usage": True})
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert all("usage" not in chunk for chunk in chunks)


def test_the_server_can_send_the_usage_unasked(serve: Serve) -> None:
    server = serve(enable_force_include_usage=True)
    for asked in ({}, {"stream_options": {"include_usage": False}}):
        *chunks, usage = stream(server, **asked)
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 3
        assert all("usage" not in chunk for chunk in chunks)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        messages: Any = [{"role": "user", "content": "x"}]
        *_, last = client.chat.completions.create(model="fake", messages=messages, max_tokens=2, stream=True)
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 2
    assert "usage" in server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).json()


def test_continuous_usage_counts_up(server: LiveServer) -> None:
    chunks = stream(server, stream_options={"continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


def test_tokens_without_text_keep_their_chunk(server: LiveServer) -> None:
    """An emoji of two tokens, and an end-of-text token that has no text of its own."""

    def script(request: Any) -> list[Any]:
        return [
            SequenceChunk(0, "", [7], num_output_tokens=1),
            SequenceChunk(0, "\U0001f600", [8], num_output_tokens=2),
            SequenceChunk(0, "", [1], num_output_tokens=3, finish_reason=FinishReason.STOP),
        ]

    server.engine.script = script
    chunks = stream(server, stream_options={"include_usage": True})
    assert [c["text"] for chunk in chunks for c in chunk["choices"]] == ["", "\U0001f600", ""]
    assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_a_stream_never_opens_with_an_empty_chunk(server: LiveServer) -> None:
    script = server.engine.default_script
    server.engine.script = lambda request: [SequenceChunk(0), *script(request)]
    assert stream(server)[0]["choices"][0]["text"] == "hello"


def test_stream_interval(server: LiveServer) -> None:
    chunks = stream(server, stream_interval=2, max_tokens=6)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["hello", " world,", " def", " words", ""]


def test_echo_logprobs_and_ids_in_a_stream(server: LiveServer) -> None:
    chunks = stream(server, prompt="hello", echo=True, logprobs=0, max_tokens=2, return_token_ids=True)
    first, second = (chunk["choices"][0] for chunk in chunks[:2])
    assert first["text"] == "hellohello" and second["text"] == " world"
    assert first["logprobs"]["text_offset"] == [0, 0, 5] and second["logprobs"]["text_offset"] == [10]
    assert first["logprobs"]["token_logprobs"] == [None, -1.5, -1.5]
    assert first["prompt_token_ids"] == server.tokenizer.encode("hello")
    assert len(first["token_ids"]) == 1 and "prompt_token_ids" not in second


def test_other_samples_wait_for_the_prompts_logprobs(server: LiveServer) -> None:
    engine = server.engine
    engine.script = lambda request: [*engine.sample(request, 1), *engine.sample(request, 0)]
    chunks = stream(server, prompt="hello", n=2, echo=True, logprobs=0, max_tokens=2)
    for index in (0, 1):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert mine[0]["logprobs"]["token_logprobs"][:3] == [None, -1.5, -1.5]
        assert "".join(c["text"] for c in mine) == "hellohello world"


def test_scoring_in_a_stream(server: LiveServer) -> None:
    chunks = stream(server, prompt="hello", echo=True, logprobs=0, max_tokens=0)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["hello", ""]
    assert chunks[0]["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.5]


def test_many_prompts_in_one_stream(server: LiveServer) -> None:
    chunks = stream(server, prompt=["a", "b", "c"], n=2)
    for index in range(6):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(c["text"] for c in mine) == "hello world,"
        assert [c["finish_reason"] for c in mine] == [None, None, None, "length"]


def test_warnings_come_once(server: LiveServer) -> None:
    chunks = stream(server, nonsense=1, stream_options={"include_obfuscation": True})
    names = ["nonsense", "stream_options.include_obfuscation"]
    assert [chunk.get("warnings") for chunk in chunks] == [names, None, None, None]


def test_async_client(server: LiveServer) -> None:
    async def texts() -> list[str]:
        async with AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
            made = await client.completions.create(model="fake", prompt="x", max_tokens=2, stream=True)
            return [chunk.choices[0].text async for chunk in made]

    assert asyncio.run(texts()) == ["hello", " world", ""]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineDeadError("/secret"), "engine_dead"),
        (RequestFailedError("/secret"), "request_failed"),
        (OutputTextError(LookupError("/secret")), "output_not_text"),
    ],
)
def test_failure_after_tokens_is_an_error_event_and_a_cut(server: LiveServer, error: Exception, code: str) -> None:
    script = server.engine.default_script
    server.engine.script = lambda request: [*script(request)[:2], error]
    with server.connect() as connection:
        connection.sendall(http_post("/v1/completions", {"prompt": "x", "stream": True}))
        raw = read_all(connection)
    assert b" 200 OK" in raw and raw.count(b'"finish_reason":null') == 2
    assert b'data: {"error":{' in raw and code.encode() in raw and b"secret" not in raw
    assert b"[DONE]" not in raw and not raw.endswith(b"0\r\n\r\n"), "the last chunk must be missing"


def test_clients_see_the_failure(client: OpenAI, server: LiveServer) -> None:
    script = server.engine.default_script
    server.engine.script = lambda request: [*script(request)[:2], EngineDeadError("gone")]
    got = []
    with pytest.raises(openai.APIError, match="engine failed") as raised:
        for chunk in client.completions.create(model="fake", prompt="x", stream=True):
            got.append(chunk.choices[0].text)
    assert got == ["hello", " world"] and raised.value.code == "engine_dead"
    with pytest.raises(httpx.RemoteProtocolError):
        server.post("/v1/completions", {"prompt": "x", "stream": True})


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineDeadError("gone"), 500, "engine_dead"),
        (RequestTooLongError("too long for the cache"), 400, "context_length_exceeded"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_failure_before_the_first_token_is_a_status(
    server: LiveServer, error: Any, status: int, code: str, late: bool
) -> None:
    """Also for a refusal that comes back from the engine process after `generate` has returned."""
    if late:
        server.engine.script = lambda request: [error]
    else:
        server.engine.refuse = error
    answer = server.post("/v1/completions", {"prompt": "x", "stream": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_no_done_without_a_finish_reason(server: LiveServer) -> None:
    cut = SequenceChunk(0, finish_reason=FinishReason.ABORT)
    server.engine.script = lambda request: [*server.engine.default_script(request)[:2], cut]
    with server.connect() as connection:
        connection.sendall(http_post("/v1/completions", {"prompt": "x", "stream": True}))
        raw = read_all(connection)
    assert b"[DONE]" not in raw and b"request_failed" in raw


def test_header_is_held_until_the_first_output(server: LiveServer) -> None:
    script = server.engine.default_script
    server.engine.script = lambda request: [Wait(), *script(request)]
    with server.connect() as connection:
        connection.sendall(http_post("/v1/completions", {"prompt": "x", "stream": True}))
        server.until(lambda: len(server.engine.live) == 1)
        connection.settimeout(0.1)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        server.call(server.engine.release)
        connection.settimeout(PATIENCE_S)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_keep_alive_comments(serve: Serve) -> None:
    server = serve(sse_keep_alive_interval=0.02)
    script = server.engine.default_script
    server.engine.script = lambda request: [Wait(), *script(request)]
    body = {"prompt": "x", "stream": True}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, "the header goes out with the first comment"
        lines = answer.iter_lines()
        assert [next(lines) for _ in range(4)] == [": keep-alive", "", ": keep-alive", ""]
        server.call(server.engine.release)
        rest = [line for line in lines if line and not line.startswith(":")]
    assert rest[-1] == "data: [DONE]"


def test_failure_behind_a_keep_alive_is_an_event(serve: Serve) -> None:
    server = serve(sse_keep_alive_interval=0.02)
    server.engine.script = lambda request: [Wait(), EngineDeadError("gone")]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        made = client.completions.create(model="fake", prompt="x", stream=True)
        server.call(server.engine.release)
        with pytest.raises(openai.APIError):
            list(made)


def test_a_plain_answer_waits_in_silence(serve: Serve) -> None:
    server = serve(sse_keep_alive_interval=0.01)
    script = server.engine.default_script
    server.engine.script = lambda request: [Wait(), *script(request)]
    with server.connect() as connection:
        connection.sendall(http_post("/v1/completions", {"prompt": "x"}))
        server.until(lambda: len(server.engine.live) == 1)
        connection.settimeout(0.1)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        server.call(server.engine.release)
        connection.settimeout(PATIENCE_S)
        assert b" 200 OK" in connection.recv(65536)


def test_streams_asked_for_in_one_breath_come_one_after_the_other(server: LiveServer) -> None:
    requests = [http_post("/v1/completions", {"prompt": "x", "max_tokens": n, "stream": True}) for n in (2, 3)]
    with server.connect() as connection:
        connection.sendall(b"".join(requests))
        raw = b""
        while raw.count(b"[DONE]") < 2:
            raw += connection.recv(65536)
    first, second = raw.split(b"HTTP/1.1 200 OK")[1:]
    assert [part.count(b'"finish_reason":null') for part in (first, second)] == [2, 3]


@pytest.mark.parametrize("fields", [{}, {"logprobs": 0}])
def test_a_client_that_does_not_read_gets_all_of_it_later(server: LiveServer, fields: dict[str, Any]) -> None:
    words = [f"{i:05} " * 1500 for i in range(1500)]
    entry = [fake_logprobs(7, 0, 0)] if fields else None

    def script(request: Any) -> list[Any]:
        chunks = [SequenceChunk(0, word, [7], entry, num_output_tokens=i + 1) for i, word in enumerate(words)]
        return [*chunks, SequenceChunk(0, num_output_tokens=len(words), finish_reason=FinishReason.LENGTH)]

    server.engine.script = script
    with server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.sendall(http_post("/v1/completions", {"prompt": "x", "stream": True} | fields, "connection: close"))
        server.until(lambda: len(server.engine.requests) == 1 and not server.engine.live)
        server.until(lambda: any(open.flow.write_paused for open in server.connections()))  # the rest waits for it
        server.until(lambda: server.service.lifecycle.requests == 0)
        raw = read_all(connection)
    told = events(unchunked(raw))
    assert told[-1] == "[DONE]" and len(told) < len(words), "tokens have gathered"
    assert "".join(event["choices"][0]["text"] for event in told[:-1]) == "".join(words)


def unchunked(raw: bytes) -> str:
    at, parts = raw.index(b"\r\n\r\n") + 4, []
    while at < len(raw):
        start = raw.index(b"\r\n", at) + 2
        end = start + int(raw[at : start - 2], 16)
        parts.append(raw[start:end])
        at = end + 2
    return b"".join(parts).decode()


def test_a_bug_in_one_stream_ends_that_stream_alone(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = EventEncoder.plain

    def broken(self: EventEncoder, prompt: int, chunk: SequenceChunk) -> bytes | None:
        if self._job.request_id == "bad":
            raise ZeroDivisionError("planted")
        return plain(self, prompt, chunk)

    monkeypatch.setattr(EventEncoder, "plain", broken)
    with server.connect() as bad:
        bad.sendall(http_post("/v1/completions", {"prompt": "x", "stream": True}, "x-request-id: bad"))
        raw = read_all(bad)
    assert b'"code":"internal_error"' in raw and b"[DONE]" not in raw and b"planted" not in raw
    assert stream(server)[-1]["choices"][0]["finish_reason"] == "length"
    assert "planted" in caplog.text


class Connection:
    """Target of a stream, for the connection and for ASGI's `send`. It waits once `slow` is set."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.write_paused = False
        self._room = asyncio.Event()

    def write(self, data: bytes) -> None:
        assert not self.write_paused
        self.sent.append(data)

    async def send(self, message: Any) -> None:
        if self.write_paused:
            await self._room.wait()
        if data := message.get("body", b""):
            self.sent.append(data)

    def go_on(self) -> None:
        self.write_paused = False
        self._room.set()


def streamed(
    connection: Connection, tokenizer: Tokenizer, keep_alive_s: float = 1000.0, **options: Any
) -> StreamAnswer:
    prompt = Prompt(ids=[1], params=SequenceParams())
    fields: dict[str, Any] = {
        "api": "completions",
        "id": "cmpl-r",
        "request_id": "r",
        "model": "m",
        "created": 1,
        "arrival_s": 0.0,
        "prompts": (prompt,),
    }
    job = Job(stream=StreamChoices(), **fields, **options)
    encoder = CompletionFormat().events(job, tokenizer, lambda: Usage(1, 1, 0))
    wire: Any = connection
    return StreamAnswer(encoder, EventStream(connection.send, wire, encoder.filler), keep_alive_s, None)


def token(text: str, finish: FinishReason | None = None) -> SequenceChunk:
    return SequenceChunk(0, text, [7], finish_reason=finish)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def texts(data: list[bytes]) -> list[str]:
    return [event["choices"][0]["text"] for event in events(b"".join(data).decode())]


def test_tokens_are_written_as_they_come_and_gather_while_the_client_is_slow(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        connection = Connection()
        answer = streamed(connection, tokenizer)
        running = asyncio.create_task(answer.run())
        answer.put(0, token("a"))
        assert connection.sent == [], "the head goes out with the first token, by the task"
        await settle()
        answer.put(0, token("b"))
        answer.put(0, token("c"))
        assert texts(connection.sent) == ["a", "b", "c"], "without the task"
        connection.write_paused = True
        for text in "def":
            answer.put(0, token(text))
            await settle()
        connection.go_on()
        await settle()
        answer.put(0, token("g"))
        answer.put(0, token("h", FinishReason.LENGTH))
        answer.end(None)
        last = await running
        assert texts(connection.sent) == ["a", "b", "c", "d", "ef", "g"]
        assert texts([last]) == ["h", ""]

    asyncio.run(main())


@pytest.mark.parametrize("options", [{}, {"return_token_ids": True}])
def test_no_comment_on_a_busy_stream(tokenizer: Tokenizer, options: dict[str, Any]) -> None:
    """Events within an interval put the comment off to the end of the next one."""
    interval_s = 0.05

    async def main() -> None:
        connection, clock = Connection(), asyncio.get_running_loop().time
        answer = streamed(connection, tokenizer, keep_alive_s=interval_s, **options)
        started_s = clock()
        running = asyncio.create_task(answer.run())
        answer.put(0, token("a"))
        await settle()
        answer.put(0, token("b"))
        async with asyncio.timeout(PATIENCE_S):
            while connection.sent[-1] != b": keep-alive\n\n":
                await asyncio.sleep(0.005)
        assert clock() - started_s > 1.9 * interval_s
        assert texts(connection.sent[:2]) == ["a", "b"] and len(connection.sent) == 3
        running.cancel()

    asyncio.run(main())
