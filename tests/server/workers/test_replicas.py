"""`roseinfer serve --replicas 2`: clients do not notice deaths and restarts of engines."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.helpers.process_table import alive, children
from tests.server.console.feeds import looking, ticks
from tests.server.real_server import RealServer, priced, until

pytestmark = pytest.mark.long

STREAMS, TOKENS = 4, 60
LOAD: dict[str, Any] = {
    "model": "tiny", "prompt": "x", "max_tokens": 20, "stream": True, "extra_body": {"ignore_eos": True},
}  # fmt: skip


def asked(i: int) -> dict[str, Any]:
    """Return a seeded request, whose text is the same on every engine."""
    greedy_too = 0.0 if i % 2 else 1.0
    return {"model": "tiny", "prompt": f"def f{i}(x):\n", "max_tokens": TOKENS, "seed": i, "temperature": greedy_too}


def read(stream: Any) -> tuple[str, str | None]:
    chunks = list(stream)
    return "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason


def total(server: RealServer, name: str, **labels: str) -> float:
    return server.metrics(name, **labels)[0]


@pytest.fixture(scope="module")
def two() -> Iterator[RealServer]:
    """Yield a server of two engines and two API processes."""
    with RealServer("--replicas", "2", "--api-workers", "2") as server:
        yield server


# Outputs with state in engine or API process: a grammar, a parser, the beginning of a stop string.
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 40}}, "required": ["city"]}
PEOPLE = {"type": "array", "items": {"type": "string", "minLength": 5, "maxLength": 9}, "minItems": 12, "maxItems": 12}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {**CITY, "additionalProperties": False}}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Who, and where?"}], "max_tokens": 80}
FORMS: dict[str, dict[str, Any]] = {
    "document": {**CHAT, "n": 2, "response_format": {
        "type": "json_schema", "json_schema": {"name": "people", "schema": PEOPLE, "strict": True},
    }},
    "calls": {**CHAT, "tools": [TOOL], "tool_choice": "required", "n": 2},
    "stop": {**CHAT, "stop": ["qq", "= ="], "frequency_penalty": 0.5, "min_tokens": 60, "logit_bias": {"3": -2}},
    "scores": {**CHAT, "logprobs": True, "top_logprobs": 1, "repetition_penalty": 1.2, "ignore_eos": True},
}  # fmt: skip
OWN_FIELDS = ("min_tokens", "repetition_penalty", "ignore_eos")


class Folded:
    """Content of a choice, from a whole response or from chunks."""

    def __init__(self) -> None:
        self.content, self.names, self.arguments = "", list[str](), ""
        self.reason: str | None = None
        self.scored: list[str] = []

    def take(self, message: Any, choice: Any) -> "Folded":
        self.content += message.content or ""
        for call in message.tool_calls or []:
            self.names += [call.function.name] if call.function.name else []
            self.arguments += call.function.arguments or ""
        self.reason = choice.finish_reason or self.reason
        if choice.logprobs is not None:
            self.scored += [entry.token for entry in choice.logprobs.content or []]
        return self


def form(name: str, seed: int) -> dict[str, Any]:
    fields = {"model": "tiny", "seed": seed, "temperature": 1.0 if seed % 2 else 0.0, **FORMS[name]}
    own = {field: fields.pop(field) for field in OWN_FIELDS if field in fields}
    return {**fields, "extra_body": own}


def folded(chunks: list[Any]) -> tuple[list[dict[str, Any]], int]:
    """Return the choices of a stream and its number of completion tokens."""
    found: dict[int, Folded] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            found.setdefault(choice.index, Folded()).take(choice.delta, choice)
    return [vars(one) for _, one in sorted(found.items())], chunks[-1].usage.completion_tokens


def test_streams_continue_when_an_engine_is_killed(two: RealServer) -> None:
    """Each text is what it is without a death, and each formatted output continues in its format."""
    texts, chats = [asked(i) for i in range(STREAMS)], [form(name, seed) for seed, name in enumerate(FORMS)]
    count = len(texts) + len(chats)
    more: dict[str, Any] = {"stream": True, "extra_body": {"ignore_eos": True}}
    with two.client() as client, ThreadPoolExecutor(count) as pool:
        wholes = pool.map(lambda fields: client.completions.create(**fields, extra_body={"ignore_eos": True}), texts)
        messages = pool.map(lambda fields: client.chat.completions.create(**fields), chats)
        expected_texts = [whole.choices[0].text for whole in wholes]
        expected_chats = [
            ([vars(Folded().take(choice.message, choice)) for choice in whole.choices], whole.usage.completion_tokens)
            for whole in messages
        ]
        streams = [client.completions.create(**fields, **more) for fields in texts]
        usage: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        chat_streams = [client.chat.completions.create(**fields, **usage) for fields in chats]
        begun = [next(stream) for stream in streams]
        chats_begun = [[next(stream) for _ in range(5)] for stream in chat_streams]
        os.kill(two.engine, signal.SIGKILL)
        for first, stream, text in zip(begun, streams, expected_texts, strict=True):
            rest, reason = read(stream)
            assert (first.choices[0].text + rest, reason) == (text, "length")
        for fields, parts, stream, expected in zip(chats, chats_begun, chat_streams, expected_chats, strict=True):
            assert folded([*parts, *stream]) == expected, fields
    assert total(two, "roseinfer:slo_requests_total") == 2 * count, "none is counted twice"
    assert total(two, "roseinfer:engine_deaths_total") == total(two, "roseinfer:engine_deaths_total", engine="0") == 1
    resumed = total(two, "roseinfer:router_resumes_total", engine="0", cause="death")
    assert 2 <= resumed <= count and total(two, "roseinfer:router_resumes_total") == resumed
    assert total(two, "roseinfer:router_placements_total") == 2 * count
    until(lambda: [engine["state"] for engine in two.fresh("/health").json()["engines"]] == ["ready"] * 2)
    until(lambda: total(two, "vllm:num_requests_running") == total(two, "vllm:kv_cache_usage_perc") == 0)
    assert len(two.engines()) == 2


def test_each_process_shows_all_engines_and_processes_on_the_console(two: RealServer) -> None:
    with looking(two.url) as one, looking(two.url) as other:  # each connects to another process
        for events in (one, other):
            assert next(events)[1]["engines"] == 2
            next(events)
        for i in range(4):  # each on a connection of its own
            with two.client() as client:
                client.completions.create(**asked(i), extra_headers={"x-request-id": f"shown-{i}"})
        for events in (one, other):
            shown, stepped = {}, set()
            for tick in islice(ticks(events), 100):
                assert [engine["state"] for engine in tick["engines"]] == ["ready"] * 2
                ended = [record for record in tick["requests"] if record["state"] == "ended"]
                shown |= {record["request_id"]: record["engine"] for record in ended}
                stepped |= {step[0] for step in tick["steps"]}
                if len(shown) == 4 and stepped >= set(shown.values()):
                    break
            assert shown.keys() == {f"shown-{i}" for i in range(4)} and stepped == set(shown.values())
            assert sum(tick["router"]["placements"].values()) >= 4 and tick["router"]["reasons"]


def test_the_server_ends_although_consoles_are_open(two: RealServer) -> None:
    processes = children(two.process.pid)
    with looking(two.url) as one, looking(two.url) as other:
        assert next(one)[0] == next(other)[0] == "hello"
        two.process.send_signal(signal.SIGTERM)
        for events in (one, other):  # httpx raises unless the stream ends properly
            assert {name for name, _ in events} <= {"tick"}
        assert two.exit_code() == 0
    assert len(processes) == 4 and not any(map(alive, processes)) and two.left_behind() == []


class Load:
    """Clients that send one request after another until `stop`. `failures`: errors so far."""

    def __init__(self, server: RealServer, clients: int) -> None:
        self._server = server
        self._over = threading.Event()
        self.done = 0
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        with self._server.client() as client:
            while not self._over.is_set():
                try:
                    stream = client.completions.create(**LOAD)
                    reason = read(stream)[1]
                    assert reason == "length", reason
                    self.done += 1
                except (openai.APIError, AssertionError) as error:
                    self.failures.append(repr(error))

    def until_more_is_done(self) -> None:
        """Wait for two more answers a client, or a failure."""
        enough = self.done + 2 * len(self._threads)
        until(lambda: self.done >= enough or bool(self.failures))

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def test_a_rolling_restart_under_load_fails_no_request(tmp_path: Path) -> None:
    with RealServer("--replicas", "2", *priced(tmp_path)) as server:
        before = server.engines()
        load = Load(server, clients=4)
        load.until_more_is_done()
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "rolling restart: done" in server.log())
        load.until_more_is_done()
        load.stop()
        assert load.failures == []
        assert not set(before) & set(server.engines()) and len(server.engines()) == 2
        assert server.metrics("roseinfer:engine_restarts_total", "roseinfer:engine_deaths_total") == [2, 0]
        assert total(server, "vllm:request_success_total", finished_reason="length") == load.done
        server.until_idle()
