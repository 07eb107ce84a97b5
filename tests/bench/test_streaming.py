"""Sending and reading of requests, with a fake engine and with the embedded model."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from roseinfer.bench.config import StreamingConfig
from roseinfer.bench.streaming import RunRecord, StreamedRequest, StreamingLoad, StreamingRun
from roseinfer.bench.streaming_report import ratios, samples, summarise
from roseinfer.config.hub import load_tokenizer
from roseinfer.core.config.engine import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from roseinfer.core.errors import RequestTooLongError, TooManyInflightError
from roseinfer.core.outputs import FinishReason, RequestTimes
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.api import GenerateRequest, SequenceChunk
from roseinfer.engine.start import start_engine

TIMES = RequestTimes(arrival_s=10.0, scheduled_s=10.5, first_token_s=11.0, finished_s=12.0)
INFO = SimpleNamespace(model="m", facts=SimpleNamespace(device="cpu"))


class StandIn:
    """Fake engine that answers one token at a time; `events` lists what happened in order."""

    def __init__(self, tokens: int = 2, most_live: int = 100, refuse: int | None = None) -> None:
        self.events: list[tuple[str, str]] = []
        self.requests: list[GenerateRequest] = []
        self.live = 0
        self._tokens = tokens
        self._most_live = most_live
        self._refuse = refuse

    def generate(self, request: GenerateRequest) -> AsyncIterator[SequenceChunk]:
        if self.live >= self._most_live:
            raise TooManyInflightError("full")
        if len(self.requests) == self._refuse:
            raise RequestTooLongError("too long")
        self.live += 1
        self.requests.append(request)
        self.events.append(("add", request.request_id))
        return self._stream(request.request_id)

    async def _stream(self, name: str) -> AsyncIterator[SequenceChunk]:
        for i in range(self._tokens):
            await asyncio.sleep(0)
            last = i + 1 == self._tokens
            self.live -= last
            self.events.append(("read", name))
            yield SequenceChunk(
                0, token_ids=[7], finish_reason=FinishReason.LENGTH if last else None, times=TIMES if last else None
            )


class Words:
    """Tokenizer whose ids are the lengths of the words."""

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


def load(**config: object) -> StreamingLoad:
    return StreamingLoad(StreamingConfig(**{"num_requests": 4, **config}), SequenceParams(max_tokens=2))


def send(engine: StandIn, name: str = "run", **config: object) -> RunRecord:
    ends: list[None] = []
    run = StreamingRun(engine, Words(), load(**config), name, lambda: ends.append(None))
    record = asyncio.run(run.run())
    assert len(ends) == len(record.requests)
    return record


def test_repeats_are_taken_in_turn():
    assert load(prompt="ab", prompt_repeats="3,1,2").texts() == ["ababab", "ab", "abab", "ababab"]


def test_unique_prompts_differ_at_their_start_and_share_no_salt():
    unique = load(unique_prompts=True)
    assert len({text[:6] for text in unique.texts()}) == 4
    assert len({unique.cache_salt("run", i) for i in range(4)}) == 4
    assert len({load().cache_salt("run", i) for i in range(4)}) == 1
    assert load().cache_salt("a", 0) != load().cache_salt("b", 0)


def test_a_burst_is_added_before_anything_is_read():
    engine = StandIn()
    record = send(engine, prompt="a bc ", prompt_repeats="1,2")
    assert engine.events[:4] == [("add", f"run/{i}") for i in range(4)]
    assert [request.prompt.ids for request in engine.requests[:2]] == [[1, 2], [1, 2, 1, 2]]
    assert [r.prompt_tokens for r in record.requests] == [2, 4, 2, 4]
    assert all(r.completion_tokens == 2 and r.ttft_s <= r.latency_s for r in record.requests)
    assert 0 < record.submit_wall_s <= record.wall_s


def test_readers_run_between_arrivals():
    engine = StandIn()
    send(engine, submit_interval_ms=5)
    assert engine.events[1] == ("read", "run/0")


@pytest.mark.parametrize(("schedule", "sleeps"), [("absolute", [0.0, 0.0, 0.0]), ("relative", [0.01, 0.01, 0.01])])
def test_a_late_arrival_shifts_the_next_one_only_on_a_relative_schedule(schedule, sleeps, monkeypatch):
    """Let adding take 15 ms, with 10 ms between arrivals."""
    clock, slept, real_sleep = SimpleNamespace(now=100.0), [], asyncio.sleep
    here = threading.get_ident()

    async def sleep(seconds: float) -> None:
        if threading.get_ident() != here:  # a server that other tests use as well
            return await real_sleep(seconds)
        if seconds or len(slept) < 3:
            slept.append(seconds)
        clock.now += seconds
        return await real_sleep(0)

    class Slow(StandIn):
        def generate(self, request: GenerateRequest) -> AsyncIterator[SequenceChunk]:
            clock.now += 0.015
            return super().generate(request)

        async def _stream(self, name: str) -> AsyncIterator[SequenceChunk]:
            yield SequenceChunk(0, token_ids=[7], finish_reason=FinishReason.LENGTH, times=TIMES)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr("roseinfer.bench.streaming.time", SimpleNamespace(perf_counter=lambda: clock.now))
    record = send(Slow(), submit_interval_ms=10, submit_schedule=schedule)
    assert slept == pytest.approx(sleeps)
    assert record.submit_wall_s == pytest.approx(sum(sleeps) + 4 * 0.015)
    assert [r.add_s for r in record.requests] == pytest.approx([0.015] * 4)


@pytest.mark.parametrize(("interval", "reads"), [(1, [1] * 7), (3, [1, 3, 3]), (4, [1, 4, 2]), (9, [1, 6])])
def test_stream_interval(interval, reads):
    record = send(StandIn(tokens=7), stream_interval=interval)
    assert [[tokens for _, tokens in r.reads] for r in record.requests] == [reads] * 4


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pretok", [True, False])
def test_every_way_to_tokenize_sends_the_same(workers, pretok):
    engine = StandIn()
    record = send(engine, prompt="a bc ", prompt_repeats="1,2", tokenize_workers=workers, pretok=pretok)
    sent = sorted((request.request_id, request.prompt.ids) for request in engine.requests)
    assert sent == [("run/0", [1, 2]), ("run/1", [1, 2] * 2), ("run/2", [1, 2]), ("run/3", [1, 2] * 2)]
    assert all(r.tokenize_s > 0 for r in record.requests)
    if pretok:
        assert engine.events[:4] == [("add", f"run/{i}") for i in range(4)]


def test_requests_over_the_limit_in_flight_wait_for_an_end():
    engine = StandIn(most_live=2)
    record = send(engine, num_requests=7)
    assert len(engine.requests) == 7 and engine.live == 0
    assert all(r.completion_tokens == 2 for r in record.requests)
    assert engine.events[2] == ("read", "run/0")


def test_a_refused_request_ends_the_run():
    engine = StandIn(refuse=2)
    with pytest.raises(RequestTooLongError):
        send(engine)
    assert len(engine.requests) == 2 and not [kind for kind, _ in engine.events if kind == "read"]


# The report.


def record(*reads: tuple[float, int]) -> StreamedRequest:
    return StreamedRequest(1.0, 0.002, 0.001, 5, list(reads), TIMES)


def test_report():
    run = RunRecord([record((2.0, 1), (3.0, 2), (3.5, 2)), record((2.5, 1))], submit_wall_s=0.25, wall_s=2.0)
    values = samples([run])
    assert values["itl_ms"] == [1000.0, 500.0]
    assert values["tpot_ms"] == [1500.0 / 4]
    assert values["ttft_ms"] == [1000.0, 1500.0]
    assert values["latency_ms"] == [2500.0, 1500.0]
    assert values["queue_wait_ms"] == values["prefill_ms"] == [500.0, 500.0]
    assert (values["add_request_ms"], values["tokenize_ms"]) == ([1.0, 1.0], [2.0, 2.0])
    report = summarise(INFO, [run, run])
    assert (report["requests"], report["prompt_tokens"], report["completion_tokens"]) == (4, 20, 12)
    assert report["submit_wall_s"] == 0.25 and report["throughput_tok_s"] == 12 / 4.0
    assert report["ttft_ms"] == {"p50": 1250.0, "p95": 1500.0, "p99": 1500.0}


def test_a_request_of_one_token_has_no_tpot():
    report = summarise(INFO, [RunRecord([record((2.0, 1))], 0.1, 1.0)])
    assert report["tpot_ms"] == report["itl_ms"] == {"p50": None, "p95": None, "p99": None}
    assert ratios(report, report)["tpot_ms"]["p50"] is None
    assert ratios(report, report)["ttft_ms"]["p50"] == 1.0


# The embedded model.


def test_runs_start_with_nothing_in_the_prefix_cache():
    config = EngineConfig(
        model=ModelConfig(threads=1), cache=CacheConfig(num_kv_blocks=64), scheduler=SchedulerConfig(max_num_seqs=1)
    )

    async def hits() -> list[int]:
        tokenizer = load_tokenizer(config.model)
        engine = await start_engine(config, tokenizer, in_process=True)
        counted = []
        pair = {"prompt_repeats": "40", "num_requests": 2}  # one after the other, since there is one seat
        try:
            for name, options in (
                ("alone", {"prompt_repeats": "40", "num_requests": 1}),
                ("alone again", {"prompt_repeats": "40", "num_requests": 1}),
                ("unique", {**pair, "unique_prompts": True}),
                ("equal", pair),
            ):
                before = engine.stats().prefix_hits
                result = await StreamingRun(engine, tokenizer, load(**options), name, lambda: None).run()
                assert all(r.queue_wait_s >= 0 and r.prefill_s > 0 for r in result.requests)
                counted.append(engine.stats().prefix_hits - before)
        finally:
            await engine.close()
        return counted

    *none, some = asyncio.run(hits())
    assert none == [0, 0, 0] and some > 0


def test_times_are_those_of_the_reader():
    """Delay a reader: it sees its tokens late and in one chunk, whatever the engine's times."""

    class Late(StandIn):
        async def _stream(self, name: str) -> AsyncIterator[SequenceChunk]:
            time.sleep(0.02)
            yield SequenceChunk(0, token_ids=[7, 7], finish_reason=FinishReason.LENGTH, times=TIMES)

    result = send(Late(), num_requests=2)
    assert result.requests[0].ttft_s >= 0.02 and result.requests[1].ttft_s >= 0.04
    assert [r.completion_tokens for r in result.requests] == [2, 2]
