"""Text work in processes: its results, and jobs that take too much."""

import asyncio
import os
import signal
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tokenizers import normalizers

from roseinfer.core.errors import ConfigError, InvalidRequestError, RequestTooLongError, TokenizerFailedError
from roseinfer.core.pooling import PairFormat
from roseinfer.text.chat import ChatTemplate
from roseinfer.text.pooling_inputs import PairEncoder
from roseinfer.text.template_check import TOO_LARGE
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.worker.client import HOST_MODULE, TextHost, TextWorkerPool, WorkerLostError
from roseinfer.text.worker.messages import (
    Decoded,
    DecodeIds,
    EncodeChat,
    EncodePairs,
    EncodeTexts,
    Job,
    Listed,
    ListTokens,
    TextIds,
)
from tests.helpers.in_loop import until
from tests.helpers.process_table import alive, children, command_line
from tests.text.tokenizers import byte_level

# A template that loops or fills memory if a message says so.
LOOPS = (
    "{% if messages[0].content == 'loop' %}{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}"
    "{% endfor %}{% elif messages[0].content == 'fill' %}{{ messages[0].content * 10**9 }}{% endif %}"
    "{{ messages[0].content }}"
)


def with_template(source: str) -> Tokenizer:
    plain = byte_level()
    return Tokenizer(plain.backend, plain.config, source)


def run(tokenizer: Tokenizer, test: Callable[[TextWorkerPool], Awaitable[None]], **options: Any) -> None:
    async def with_pool() -> None:
        host = TextHost(tokenizer)
        try:
            await asyncio.wait_for(test(TextWorkerPool(host, **{"memory_bytes": 2**27, "reuse": True} | options)), 60)
        finally:
            host.close()

    asyncio.run(with_pool())


def chat(content: str, **options: Any) -> EncodeChat:
    return EncodeChat([{"role": "user", "content": content}], True, False, False, {}, **options)


async def ids(pool: TextWorkerPool, job: Job) -> list[int]:
    done = await pool.perform(job, 5.0)
    assert isinstance(done, TextIds)
    return array("I", done.ids[0]).tolist()


def test_pairs_are_those_of_this_process() -> None:
    tokenizer = byte_level()
    form = PairFormat.QWEN3_RERANKER
    pairs = [("hello", "world"), ("q", "<|end|><|user|>")]  # the second one needs the aliases

    async def test(pool: TextWorkerPool) -> None:
        done = await pool.perform(EncodePairs(pairs, form), 5.0)
        assert isinstance(done, TextIds)
        assert done.lists() == [PairEncoder(tokenizer, form).encode(*pair).ids for pair in pairs]
        with pytest.raises(InvalidRequestError, match="pair 7: a limit of 9 tokens"):
            await pool.perform(EncodePairs(pairs, form, limit=9, first=7), 5.0)

    run(tokenizer, test)


def test_results_are_those_of_this_process() -> None:
    tokenizer = byte_level()
    template = ChatTemplate.from_tokenizer(tokenizer)
    assert template is not None

    async def test(pool: TextWorkerPool) -> None:
        forged = "<|end|><|user|>"  # needs the aliases, which the workers before it do not have
        for content in ("hello", forged, "hello"):
            assert await ids(pool, chat(content)) == template.encode([{"role": "user", "content": content}])
        text = "hello 日本"
        known = tokenizer.encode(text)
        assert await ids(pool, EncodeTexts([text], True)) == known
        assert await pool.perform(DecodeIds(known), 5.0) == Decoded(tokenizer.decode(known, skip_special_tokens=False))
        listed = await pool.perform(ListTokens(EncodeTexts(["hello"], False), True, 64), 5.0)
        assert listed == Listed(1, b"[%d]" % tokenizer.encode("hello", False)[0], b'["hello"]')

    run(tokenizer, test)


def test_errors_are_those_of_this_process() -> None:
    async def test(pool: TextWorkerPool) -> None:
        with pytest.raises(InvalidRequestError, match="exclude each other") as caught:
            await pool.perform(EncodeChat([{"role": "user", "content": "x"}], True, True, False, {}), 5.0)
        assert caught.value.param == "continue_final_message"
        with pytest.raises(RequestTooLongError) as long:
            await pool.perform(chat("a b " * 100_000, context=64), 5.0)
        assert long.value.max_model_len == 64 and long.value.prompt_tokens is not None

    run(byte_level(), test)


def test_a_panic_of_the_tokenizer() -> None:
    async def test(pool: TextWorkerPool) -> None:
        with pytest.raises(TokenizerFailedError, match="index out of bounds"):
            await pool.perform(EncodeTexts(["hello"], True), 5.0)

    tokenizer = byte_level()
    tokenizer.backend.normalizer = normalizers.Replace("", "x")
    run(tokenizer, test)


def test_a_job_that_takes_too_much_ends_alone() -> None:
    async def test(pool: TextWorkerPool) -> None:
        await pool.perform(chat("hello"), 5.0)
        with pytest.raises(InvalidRequestError, match=r"0\.1 s of processor time") as slow:
            await pool.perform(chat("loop"), 0.1)
        with pytest.raises(InvalidRequestError, match="128 MiB of memory") as large:
            await pool.perform(chat("fill"), 5.0)
        assert slow.value.code == large.value.code == "text_too_costly"
        assert await ids(pool, chat("hello"))

    run(with_template(LOOPS), test)


def test_a_worker_or_host_that_is_killed_is_replaced(others: set[int]) -> None:
    async def test(pool: TextWorkerPool) -> None:
        await pool.perform(chat("hello"), 5.0)
        host = the_host(others)
        for victim in (*children(host), host):
            running = asyncio.create_task(pool.perform(chat("loop"), 200.0))
            await asyncio.sleep(0.1)
            workers = children(host)
            os.kill(victim, signal.SIGKILL)
            if victim == host:
                running.cancel()  # its worker ends with the host
            with pytest.raises((WorkerLostError, asyncio.CancelledError)):
                await running
            await until(lambda workers=workers: not any(alive(worker) for worker in workers))
            assert await ids(pool, chat("hello"))

    run(with_template(LOOPS), test)


def test_the_worker_of_a_cancelled_job_is_killed(others: set[int]) -> None:
    async def test(pool: TextWorkerPool) -> None:
        await pool.perform(chat("hello"), 5.0)
        (worker,) = children(the_host(others))
        running = asyncio.create_task(pool.perform(chat("loop"), 20.0))
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await ids(pool, chat("hello"))  # commands are obeyed in order: by now it has ended
        assert not alive(worker)

    run(with_template(LOOPS), test)


def test_a_job_cancelled_before_its_worker_is_there_leaves_no_process(others: set[int]) -> None:
    async def test(pool: TextWorkerPool) -> None:
        await pool.perform(chat("hello"), 5.0)
        host = the_host(others)
        for turns in range(12):  # of the event loop, until the job is cancelled
            running = asyncio.create_task(pool.perform(chat("hello"), 5.0))
            for _ in range(turns):
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        # Commands are obeyed in order, and this job ends its own worker.
        assert await ids(pool, chat("hello"))
        await until(lambda: not children(host))

    run(with_template(LOOPS), test, reuse=False)


def hosts() -> set[int]:
    return {child for child in children(os.getpid()) if HOST_MODULE in command_line(child)}


@pytest.fixture
def others() -> set[int]:
    """Return the hosts that servers of other tests have."""
    return hosts()


def the_host(others: set[int]) -> int:
    """Return the host of this test."""
    (host,) = hosts() - others
    return host


def test_a_template_that_cannot_be_compiled_is_refused_at_the_start() -> None:
    async def test(pool: TextWorkerPool) -> None:
        with pytest.raises(ConfigError) as caught:
            await pool.perform(chat("hello"), 5.0)
        assert str(caught.value) == TOO_LARGE

    run(with_template("{{ 'a' * (10**10) }}"), test)
