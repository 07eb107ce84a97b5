"""Asynchronous engine in a thread with the fake runner: streams, cancellation, failures, closing."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from roseinfer.core.clock import ManualClock
from roseinfer.core.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
    RequestTooLongError,
    TooManyInflightError,
)
from roseinfer.core.guide import GuideSpec
from roseinfer.core.outputs import FinishReason, SchedulerStats
from roseinfer.core.plan import StepPlan
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Cause, Slo
from roseinfer.engine.api import EngineInfo, EngineState, GenerateRequest, SequenceChunk
from roseinfer.engine.client import AsyncEngine
from roseinfer.engine.core import EngineCore
from roseinfer.engine.guided.guide import GuideFactory
from roseinfer.engine.live import prepare
from roseinfer.engine.thread_transport import ThreadTransport
from roseinfer.text.tokenizer import Tokenizer
from tests.helpers.engine_info import engine_info
from tests.helpers.engines import EOS, make_core
from tests.helpers.fake_runner import FakeRunner
from tests.helpers.guides import ArithmeticGuides, obeys
from tests.helpers.tokenizers import byte_tokenizer

BLOCKS, BLOCK_SIZE, VOCAB = 256, 4, 200
PROMPT = [5, 9, 2, 7, 11, 30, 8]


class GatedRunner(FakeRunner):
    """Runner that waits after a few steps until the test opens the gate, and fails on request."""

    def __init__(self, free_steps: int = 3) -> None:
        super().__init__(BLOCKS, BLOCK_SIZE, VOCAB)
        self.gate = threading.Event()
        self.free_steps = free_steps
        self.broken = False

    def submit(self, plan: StepPlan) -> int:
        assert plan.step < self.free_steps or self.gate.wait(30)
        if self.broken:
            raise RuntimeError("planted engine failure")
        return super().submit(plan)


def info() -> EngineInfo:
    return engine_info(
        max_model_len=BLOCKS * BLOCK_SIZE,
        vocab_size=VOCAB,
        block_size=BLOCK_SIZE,
        num_blocks=BLOCKS,
        eos_token_ids=(EOS,),
    )


@asynccontextmanager
async def engine(
    runner: FakeRunner,
    depth: int = 1,
    max_inflight: int | None = None,
    guides: GuideFactory | None = None,
    tokenizer: Tokenizer | None = None,
) -> AsyncIterator[tuple[AsyncEngine, Callable[[], int]]]:
    """Yield an engine, and a function that counts the live requests of its scheduler."""
    core = make_core(
        num_blocks=BLOCKS, block_size=BLOCK_SIZE, runner=runner, vocab_size=VOCAB, depth=depth, guides=guides
    )
    transport = ThreadTransport(lambda: (core, info()))
    client = await AsyncEngine.start(transport, tokenizer or byte_tokenizer(), max_inflight_requests=max_inflight)
    try:
        yield client, lambda: core.scheduler.num_live
    finally:
        await client.close()


def request(name: str, prompt: list[int] | None = None, n: int = 1, **params: object) -> GenerateRequest:
    merged = {"max_tokens": 8, "ignore_eos": True, "seed": 1, **params}
    return GenerateRequest(request_id=name, prompt=Prompt(prompt or PROMPT, SequenceParams(**merged)), n=n)


def with_prompt(request: GenerateRequest, **changes: object) -> GenerateRequest:
    return replace(request, prompt=replace(request.prompt, **changes))


async def read(stream) -> list[SequenceChunk]:
    return [chunk async for chunk in stream]


def ids_of(chunks: list[SequenceChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def test_many_streams_end_and_their_texts_add_up() -> None:
    async def main() -> None:
        async with engine(FakeRunner(BLOCKS, BLOCK_SIZE, VOCAB), depth=2) as (client, live):
            streams = [client.generate(request(f"r{i}", [i + 1, *PROMPT], n=1 + i % 3, seed=i)) for i in range(20)]
            results = await asyncio.gather(*map(read, streams))
            for i, chunks in enumerate(results):
                for index in range(1 + i % 3):
                    own = [c for c in chunks if c.index == index]
                    ids = [token for c in own for token in c.token_ids]
                    assert len(ids) == own[-1].num_output_tokens == 8
                    assert "".join(c.text for c in own) == byte_tokenizer().decode(ids)
                    assert [c.finish_reason for c in own[:-1]] == [None] * (len(own) - 1)
                    assert own[-1].finish_reason is FinishReason.LENGTH
                    assert own[-1].times is not None
            await until(lambda: live() == 0)
            assert client.num_live == 0

    asyncio.run(main())


def test_a_constraint_reaches_the_engine_and_its_rejection_the_client() -> None:
    async def run() -> None:
        async with engine(FakeRunner(BLOCKS, BLOCK_SIZE, VOCAB), guides=ArithmeticGuides(VOCAB)) as (client, _):
            chunks = await read(client.generate(with_prompt(request("a"), guide=GuideSpec(grammar="3,6"))))
            assert len(ids_of(chunks)) == 6 and obeys(ids_of(chunks), "3,6")
            assert chunks[-1].finish_reason is FinishReason.STOP
            with pytest.raises(InvalidRequestError, match="is no rule"):
                await read(client.generate(with_prompt(request("b"), guide=GuideSpec(grammar="gibberish"))))
            assert len(ids_of(await read(client.generate(request("free"))))) == 8

    asyncio.run(run())


def test_a_slow_reader_gets_merged_chunks() -> None:
    async def main() -> None:
        async with engine(FakeRunner(BLOCKS, BLOCK_SIZE, VOCAB)) as (client, live):
            stream = client.generate(request("slow", max_tokens=40, logprobs=0))
            await until(lambda: live() == 0 and stream.ended)
            chunks = await read(stream)
            assert len(chunks) == 1
            assert len(chunks[0].token_ids) == len(chunks[0].logprobs or []) == 40

    asyncio.run(main())


def test_a_stop_string_ends_the_stream_and_frees_the_engine() -> None:
    async def main() -> None:
        async with engine(FakeRunner(BLOCKS, BLOCK_SIZE, VOCAB)) as (client, live):
            whole = "".join([c.text for c in await read(client.generate(request("free", max_tokens=60)))])
            stop = whole[20:23]
            chunks = await read(client.generate(request("cut", max_tokens=60, stop=(stop,))))
            assert "".join(c.text for c in chunks) == whole[: whole.index(stop)]
            assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == (FinishReason.STOP, stop)
            assert chunks[-1].times is not None
            await until(lambda: live() == 0)

    asyncio.run(main())


class PoorTokenizer:
    """Tokenizer that cannot decode one planted token, as with a broken tokenizer.json."""

    def __init__(self) -> None:
        self._good, self.planted = byte_tokenizer(), -1

    def __getattr__(self, name: str) -> object:
        return getattr(self._good, name)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        if self.planted in ids:
            raise LookupError("planted detokeniser error")
        return self._good.decode(ids, skip_special_tokens)

    def token_bytes(self, id: int) -> bytes:
        if id == self.planted:
            raise LookupError("planted detokeniser error")
        return self._good.token_bytes(id)


def test_output_that_cannot_be_decoded_ends_only_its_request(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        tokenizer: Any = PoorTokenizer()
        async with engine(FakeRunner(BLOCKS, BLOCK_SIZE, VOCAB), tokenizer=tokenizer) as (client, live):
            tokens = {
                name: ids_of(await read(client.generate(request(name, [i, *PROMPT], max_tokens=30))))
                for i, name in enumerate("abc", start=1)
            }
            tokenizer.planted = next(token for token in tokens["b"] if token not in tokens["a"] + tokens["c"])
            streams = [
                client.generate(request(name, [i, *PROMPT], n=1 + 2 * (name == "b"), max_tokens=30))
                for i, name in enumerate("abc", start=1)
            ]
            first, broken, last = await asyncio.gather(*map(read, streams), return_exceptions=True)
            assert isinstance(broken, RequestFailedError)
            assert "cannot decode the output: LookupError" in str(broken)
            assert not isinstance(first, BaseException) and ids_of(first) == tokens["a"]
            assert not isinstance(last, BaseException) and ids_of(last) == tokens["c"]
            await until(lambda: live() == 0)  # its other samples were aborted
            assert client.num_live == 0 and client.health().alive
            assert len(ids_of(await read(client.generate(request("after"))))) == 8

    asyncio.run(main())
    assert "planted detokeniser error" in caplog.text


@pytest.mark.parametrize("prompt", [[5], PROMPT])
def test_prompt_logprobs_have_an_entry_for_each_prompt_token(prompt: list[int]) -> None:
    async def main() -> None:
        async with engine(FakeRunner(BLOCKS, BLOCK_SIZE, VOCAB)) as (client, _):
            chunks = await read(client.generate(request("a", prompt, n=2, prompt_logprobs=0)))
            (entries,) = [c.prompt_logprobs for c in chunks if c.prompt_logprobs is not None]
            assert entries[0] is None
            assert [entry.token_id for entry in entries[1:] if entry] == prompt[1:]

    asyncio.run(main())


def test_cancel_frees_the_request_in_every_state() -> None:
    async def main() -> None:
        runner = GatedRunner()
        async with engine(runner) as (client, live):
            streams = [client.generate(request(f"r{i}", [i, *PROMPT], n=2, max_tokens=500)) for i in range(8)]
            await streams[0].__anext__()
            for stream in streams:
                stream.cancel()
                stream.cancel()
            runner.gate.set()
            await until(lambda: live() == 0)
            assert client.num_live == 0
            with pytest.raises(EngineClosedError):
                await read(streams[3])

    asyncio.run(main())


def test_rejections_name_the_reason_and_leave_nothing() -> None:
    async def main() -> None:
        async with engine(FakeRunner(BLOCKS, BLOCK_SIZE, VOCAB)) as (client, live):
            with pytest.raises(RequestTooLongError):
                client.generate(request("long", max_tokens=BLOCKS * BLOCK_SIZE))
            with pytest.raises(InvalidRequestError, match="vocabulary"):
                await read(client.generate(request("vocab", [VOCAB])))
            stream = client.generate(request("twice"))
            with pytest.raises(InvalidRequestError, match="in use"):
                client.generate(request("twice"))
            assert (await read(stream))[-1].finish_reason is FinishReason.LENGTH
            assert client.num_live == live() == 0

    asyncio.run(main())


def test_a_request_is_prepared_with_the_tokenizer_before_it_is_sent() -> None:
    def prepared(name: str, prompt: list[int] | None = None, **params: object) -> GenerateRequest:
        made = request(name, prompt, **params)
        return replace(made, prompt=prepare(made.prompt, byte_tokenizer(), info().facts.max_model_len))

    async def main() -> None:
        async with engine(FakeRunner(BLOCKS, BLOCK_SIZE, VOCAB)) as (client, _):
            cut = await read(client.generate(prepared("cut", PROMPT, truncate_prompt_tokens=3, prompt_logprobs=0)))
            (entries,) = [c.prompt_logprobs for c in cut if c.prompt_logprobs is not None]
            assert [entry.token_id for entry in entries[1:] if entry] == PROMPT[-2:]
            whole = await read(client.generate(request("whole")))
            assert all(0 < token < 128 for token in ids_of(whole)[:2]), "readable alone"
            word = "".join(chunk.text for chunk in whole)[:2]
            other = await read(client.generate(prepared("other", bad_words=(word,))))
            assert word not in "".join(chunk.text for chunk in other)
            with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens"):
                prepared("never", truncate_prompt_tokens=10**6)

    asyncio.run(main())


def test_over_the_inflight_limit_requests_are_rejected_until_one_ends() -> None:
    async def main() -> None:
        async with engine(FakeRunner(BLOCKS, BLOCK_SIZE, VOCAB), max_inflight=2) as (client, _):
            first, second = client.generate(request("a")), client.generate(request("b"))
            with pytest.raises(TooManyInflightError):
                client.generate(request("c"))
            await read(first)
            await read(client.generate(request("c")))
            await read(second)

    asyncio.run(main())


@pytest.mark.parametrize("n", [1, 3])
def test_a_rejected_request_has_a_reason(n: int) -> None:
    """The engine's clock stands at 0."""

    async def main() -> None:
        async with engine(FakeRunner(BLOCKS, BLOCK_SIZE, VOCAB)) as (client, live):
            late = with_prompt(request("late", n=n), meta=RequestMeta(slo=Slo(ttft_s=1.0), arrival_s=-5.0))
            away, fine = await asyncio.gather(read(client.generate(late)), read(client.generate(request("fine"))))
            assert sorted(chunk.index for chunk in away) == list(range(n))
            for chunk in away:
                assert chunk.finish_reason is FinishReason.REJECTED and not chunk.token_ids and not chunk.text
                assert chunk.rejection is not None and chunk.rejection.reason == "ttft"
                assert chunk.rejection.predicted_ttft_s > 5.0 and not chunk.rejection.hopeless
                assert chunk.rejection.cause is Cause.TRANSIT, "it came late"
            assert fine[-1].finish_reason is FinishReason.LENGTH and fine[-1].rejection is None
            await until(lambda: live() == 0)
            assert client.num_live == 0

    asyncio.run(main())


def test_metadata_of_a_request_reaches_the_scheduler() -> None:
    async def main() -> None:
        runner = GatedRunner(free_steps=0)
        core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE, runner=runner, vocab_size=VOCAB)
        there = ThreadTransport(lambda: (core, info()))
        client = await AsyncEngine.start(there, byte_tokenizer(), ManualClock(100.0))  # the engine's says 0
        slo = Slo(ttft_s=1.0, tpot_s=0.5, e2e_s=9.0, class_name="chat")
        meta = RequestMeta(slo=slo, tenant="me", deadline_s=107.5, predicted_len=3, priority=-2, arrival_s=99.75)
        stream = client.generate(with_prompt(request("r"), meta=meta))
        await until(lambda: core.scheduler.num_live == 1)
        (held,) = core.scheduler.roster.requests.values()
        assert (held.slo, held.tenant, held.deadline_s) == (slo, "me", 7.5)
        assert (held.predicted_len, held.priority, held.arrival_s) == (3, -2, -0.25)
        runner.gate.set()
        assert (await read(stream))[-1].finish_reason is FinishReason.LENGTH
        await client.close()

    asyncio.run(main())


def test_a_request_past_its_deadline_ends_with_its_output_so_far() -> None:
    async def main() -> None:
        async with engine(FakeRunner(BLOCKS, BLOCK_SIZE, VOCAB)) as (client, live):
            chunks = await read(client.generate(with_prompt(request("late", n=2), meta=RequestMeta(deadline_s=-1.0))))
            assert [chunk.finish_reason for chunk in chunks] == [FinishReason.TIMEOUT] * 2
            assert all(chunk.num_output_tokens == 0 for chunk in chunks)
            await until(lambda: live() == 0)

    asyncio.run(main())


def test_one_failed_request_does_not_touch_the_others() -> None:
    async def main() -> None:
        probe = FakeRunner(BLOCKS, BLOCK_SIZE, VOCAB)
        async with engine(probe) as (client, _):
            bad = (await read(client.generate(request("a", seed=5))))[-1].token_ids[-1]
            other = await read(client.generate(request("b", [1, 2, 3], seed=9)))
            assert bad not in [token for chunk in other for token in chunk.token_ids]
        async with engine(FakeRunner(BLOCKS, BLOCK_SIZE, VOCAB, fail_on_token=bad)) as (client, live):
            failing = client.generate(request("a", seed=5))
            healthy = client.generate(request("b", [1, 2, 3], seed=9))
            with pytest.raises(RequestFailedError, match="planted failure"):
                await read(failing)
            assert (await read(healthy))[-1].num_output_tokens == 8
            await until(lambda: live() == 0)

    asyncio.run(main())


def test_when_the_engine_fails_every_stream_ends_with_an_error() -> None:
    async def main() -> None:
        runner = GatedRunner()
        async with engine(runner) as (client, _):
            streams = [client.generate(request(f"r{i}", max_tokens=500)) for i in range(4)]
            await streams[0].__anext__()
            assert [(report.engine, report.state) for report in client.reports()] == [(0, EngineState.READY)]
            runner.broken = True
            runner.gate.set()
            for stream in streams:
                with pytest.raises(EngineDeadError, match="planted engine failure"):
                    await read(stream)
            assert not client.health().alive
            assert [(report.engine, report.state) for report in client.reports()] == [(0, EngineState.DEAD)]
            with pytest.raises(EngineDeadError):
                client.generate(request("late"))

    asyncio.run(main())


def test_closing_ends_open_streams_and_rejects_new_ones() -> None:
    async def main() -> None:
        before = threading.active_count()
        runner = GatedRunner()
        async with engine(runner) as (client, _):
            stream = client.generate(request("open", max_tokens=900))
            await stream.__anext__()
            closing = asyncio.create_task(client.close())
            with pytest.raises(EngineClosedError):
                await read(stream)
            with pytest.raises(EngineClosedError):
                client.generate(request("late"))
            assert not client.health().alive
            runner.gate.set()
            await closing
        assert threading.active_count() <= before + 1, "only asyncio's own helper thread may be left"

    asyncio.run(main())


def test_an_idle_engine_sends_heartbeats() -> None:
    async def main() -> None:
        async with engine(FakeRunner(BLOCKS, BLOCK_SIZE, VOCAB)) as (client, _):
            first = client.stats()
            await until(lambda: client.stats() is not first)  # each heartbeat brings its own
            assert client.health().alive

    asyncio.run(main())


@pytest.mark.parametrize("depth", [1, 2])
def test_an_id_can_be_used_again_as_soon_as_its_stream_was_cancelled(depth: int) -> None:
    async def main() -> None:
        runner = GatedRunner()
        runner.gate.set()
        async with engine(runner, depth=depth) as (client, live):
            expected = ids_of(await read(client.generate(request("alone", [9, 8, 7], seed=3))))
            first = client.generate(request("a", max_tokens=500))
            await first.__anext__()
            runner.gate.clear()  # the engine is in the middle of a step, so it receives the cancel later
            first.cancel()
            second = client.generate(request("a", [9, 8, 7], seed=3))
            runner.gate.set()
            chunks = await read(second)
            assert ids_of(chunks) == expected
            assert chunks[-1].finish_reason is FinishReason.LENGTH
            await until(lambda: live() == 0)

    asyncio.run(main())


def test_an_unencodable_request_is_rejected_and_leaves_nothing() -> None:
    class Encoding(ThreadTransport):
        def send(self, message) -> None:
            msgspec.msgpack.encode(message)
            super().send(message)

    async def main() -> None:
        core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE, vocab_size=VOCAB)
        client = await AsyncEngine.start(Encoding(lambda: (core, info())), byte_tokenizer(), max_inflight_requests=1)
        for wrong in ({"prompt": [2**70]}, {"prompt": [1.5]}, {"prompt": ["1"]}):
            with pytest.raises(InvalidRequestError, match="cannot be sent"):
                client.generate(request("a", **wrong))
        salted = with_prompt(request("a"), meta=RequestMeta(cache_salt="\ud800"))
        with pytest.raises(InvalidRequestError, match="cannot be sent"):
            client.generate(salted)
        assert client.num_live == 0
        assert (await read(client.generate(request("a", [True, 5]))))[-1].num_output_tokens == 8
        await client.close()

    asyncio.run(main())


def test_when_outputs_cannot_be_handled_no_stream_hangs() -> None:
    def listener(stats: SchedulerStats) -> None:
        raise RuntimeError("planted listener failure")

    async def main() -> None:
        async with engine(FakeRunner(BLOCKS, BLOCK_SIZE, VOCAB)) as (client, _):
            client.on_step(listener)
            async with asyncio.timeout(20):
                with pytest.raises(EngineDeadError, match="planted listener failure"):
                    await read(client.generate(request("a", max_tokens=20)))
            assert not client.health().alive

    asyncio.run(main())


def test_a_cancelled_start_leaves_no_thread() -> None:
    loading, proceed = threading.Event(), threading.Event()
    core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE)

    def build() -> tuple[EngineCore, EngineInfo]:
        loading.set()
        assert proceed.wait(30)
        return core, info()

    async def main() -> None:
        starting = asyncio.create_task(AsyncEngine.start(ThreadTransport(build), byte_tokenizer()))
        await asyncio.to_thread(loading.wait, 30)
        starting.cancel()
        await asyncio.sleep(0)
        proceed.set()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert "roseinfer-engine" not in [thread.name for thread in threading.enumerate()]
        assert core.runner.closed

    asyncio.run(main())
