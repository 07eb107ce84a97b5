"""The server as a user meets it: `roseinfer serve` with the embedded model, the real engine and the openai client."""

import asyncio
import socket
from typing import Any

import httpx
import openai
import pytest

from roseinfer import LLM, SamplingParams
from tests.server.live import http_post
from tests.server.real_server import PATIENCE_S, RealServer, until

PROMPTS = ("def fibonacci(", "import os\n", "class Stack:\n", "def read(path):\n    ")
LENGTH = 36
MESSAGES = [{"role": "user", "content": "def fibonacci("}]
GREEDY = {"model": "tiny", "temperature": 0.0}
SEEDED = {"model": "tiny", "prompt": PROMPTS[2], "max_tokens": 24, "temperature": 1.2, "top_p": 0.95, "seed": 11}
# Far longer than a test lasts.
ENDLESS = {"model": "tiny", "prompt": "import os\n", "max_tokens": 1200, "extra_body": {"ignore_eos": True}}
COUNTERS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:request_success_total",
)


@pytest.fixture(scope="module")
def greedy(llm: LLM) -> dict[str, str]:
    """Return the greedy output of each of PROMPTS with at most LENGTH tokens, computed in this process."""
    done = llm.generate(PROMPTS, SamplingParams(max_tokens=LENGTH, temperature=0.0))
    return {prompt: answer.outputs[0].text for prompt, answer in zip(PROMPTS, done, strict=True)}


# --- completions ------------------------------------------------------------------------------------------------


def test_greedy_text_is_that_of_the_engine_in_process(client: openai.OpenAI, greedy: dict[str, str]) -> None:
    for prompt, text in greedy.items():
        done = client.completions.create(**GREEDY, prompt=prompt, max_tokens=LENGTH)
        assert done.choices[0].text == text
        assert (done.model, done.object) == ("tiny", "text_completion")
    assert "\n" in greedy[PROMPTS[0]] and "self" in greedy[PROMPTS[2]], "the model writes something like Python"


def test_prompts_in_all_four_forms(client: openai.OpenAI, greedy: dict[str, str], llm: LLM) -> None:
    ids = [llm.engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    forms: list[tuple[Any, int]] = [(PROMPTS[0], 1), (ids[0], 1), (list(PROMPTS), 4), (ids, 4)]
    for prompt, count in forms:
        done = client.completions.create(**GREEDY, prompt=prompt, max_tokens=LENGTH)
        assert [choice.index for choice in done.choices] == list(range(count))
        assert [choice.text for choice in done.choices] == list(greedy.values())[:count]
        assert done.usage is not None
        assert done.usage.prompt_tokens == sum(len(entry) for entry in ids[:count])


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, greedy: dict[str, str]) -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(**GREEDY, prompt=PROMPTS[0], max_tokens=LENGTH, **options))
    *tokens, end, usage = chunks
    assert "".join(chunk.choices[0].text for chunk in tokens) == greedy[PROMPTS[0]]
    assert {chunk.choices[0].finish_reason for chunk in tokens} == {None}
    assert end.choices[0].finish_reason == "length" and not end.choices[0].text
    assert not usage.choices and usage.usage.completion_tokens == LENGTH
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_text_ends_by_itself(client: openai.OpenAI) -> None:
    """The tokens that end the text are counted, and not shown."""
    done = client.completions.create(**GREEDY, prompt=PROMPTS[3], max_tokens=400)
    assert done.choices[0].finish_reason == "stop" and "<|" not in done.choices[0].text
    assert done.usage is not None and 1 < done.usage.completion_tokens < 400


def test_sample_i_draws_like_seed_plus_i(client: openai.OpenAI) -> None:
    samples = client.completions.create(**SEEDED, n=3)
    texts = [choice.text for choice in samples.choices]
    alone = [client.completions.create(**SEEDED | {"seed": 11 + i}).choices[0].text for i in range(3)]
    assert texts == alone and len(set(texts)) == 3


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scoring_a_prompt(client: openai.OpenAI, max_tokens: int) -> None:
    prompt = PROMPTS[0] + "n):\n    return n"
    done = client.completions.create(**GREEDY, prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=1)
    choice, scores, usage = done.choices[0], done.choices[0].logprobs, done.usage
    assert scores is not None and scores.tokens is not None and scores.token_logprobs is not None and usage is not None
    assert choice.finish_reason == "length" and usage.completion_tokens == max_tokens
    assert choice.text.startswith(prompt) and (max_tokens == 1 or choice.text == prompt)
    assert len(scores.tokens) == len(scores.token_logprobs) == usage.prompt_tokens + max_tokens
    assert "".join(scores.tokens) == "<|endoftext|>" + choice.text
    assert scores.token_logprobs[0] is None and all(score < 0 for score in scores.token_logprobs[1:])


def test_scoring_a_text_finds_the_logprobs_it_was_written_with(client: openai.OpenAI, llm: LLM) -> None:
    """Token by token while decoding, or all at once as a prompt: the model is the same."""
    ids = llm.engine.tokenizer.encode(PROMPTS[1])
    options: Any = {"logprobs": 0, "extra_body": {"return_token_ids": True}}
    written = client.completions.create(**GREEDY, prompt=ids, max_tokens=24, **options).choices[0]
    scored = client.completions.create(
        **GREEDY, prompt=[ids + written.token_ids], max_tokens=0, echo=True, logprobs=0
    ).choices[0]
    assert written.logprobs is not None and scored.logprobs is not None
    assert scored.logprobs.token_logprobs[len(ids) :] == pytest.approx(written.logprobs.token_logprobs, abs=1e-3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_itself(client: openai.OpenAI, greedy: dict[str, str], stream: bool) -> None:
    text = greedy[PROMPTS[0]]
    stop = text[19:26]  # neither begins nor ends with a token
    done: Any = client.completions.create(
        **GREEDY, prompt=PROMPTS[0], max_tokens=LENGTH, stop=[stop, "∎"], stream=stream
    )
    choices = [chunk.choices[0] for chunk in (done if stream else [done])]
    assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", stop)


def test_a_repeated_prompt_is_found_in_the_cache(client: openai.OpenAI) -> None:
    def cached(**more: Any) -> tuple[int, int]:
        prompt = "def parse_header(line):\n    name, _, value = line.partition(':')\n    return name.strip().lower(), "
        usage = client.completions.create(**GREEDY, prompt=prompt, max_tokens=2, **more).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0

    length, first = cached()
    assert first == 0
    assert cached() == (length, length - 1), "the last token is computed again, for its logits"
    assert cached(extra_body={"cache_salt": "mine"}) == (length, 0)


# --- chat -------------------------------------------------------------------------------------------------------


def test_chat_whole_and_streamed(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.chat(MESSAGES, SamplingParams(max_tokens=24, temperature=0.0))
    whole = client.chat.completions.create(**GREEDY, messages=MESSAGES, max_completion_tokens=24)  # type: ignore[call-overload]
    assert (whole.choices[0].message.role, whole.choices[0].message.content) == ("assistant", expected.outputs[0].text)
    assert whole.choices[0].finish_reason == "length"
    usage = whole.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(expected.prompt_token_ids), 24)
    assert usage.total_tokens == usage.prompt_tokens + 24

    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks: Any = list(client.chat.completions.create(**GREEDY, messages=MESSAGES, max_tokens=24, **options))
    role, *deltas, end, last = chunks
    assert role.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in deltas) == expected.outputs[0].text
    assert end.choices[0].finish_reason == "length" and end.choices[0].delta.content is None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (usage.prompt_tokens, 24)


def test_chat_stops_at_a_stop_token(client: openai.OpenAI, llm: LLM) -> None:
    """The first greedy token, named as a stop token, leaves nothing to say."""
    expected = llm.chat(MESSAGES, SamplingParams(max_tokens=1, temperature=0.0))[0].outputs[0].token_ids
    done: Any = client.chat.completions.create(  # type: ignore[call-overload]
        **GREEDY, messages=MESSAGES, extra_body={"stop_token_ids": expected}
    )
    assert (done.choices[0].message.content, done.choices[0].finish_reason) == ("", "stop")
    assert done.choices[0].stop_reason == expected[0] and done.usage.completion_tokens == 1


# --- many at once -----------------------------------------------------------------------------------------------


async def read_stream(client: openai.AsyncOpenAI, **body: Any) -> tuple[str, str | None]:
    """(text, finish reason) of choice 0."""
    text, reason = "", None
    async for chunk in await client.completions.create(**body, stream=True):
        text += chunk.choices[0].text
        reason = chunk.choices[0].finish_reason or reason
    return text, reason


def test_many_streams_at_once_say_what_each_says_alone(real: RealServer, greedy: dict[str, str]) -> None:
    """More of them than there are seats."""
    bodies = [GREEDY | {"prompt": PROMPTS[i % 4], "max_tokens": LENGTH} for i in range(24)]
    seeded = [SEEDED] * 3

    async def main() -> tuple[list[tuple[str, str | None]], str]:
        async with real.async_client() as client:
            alone = (await client.completions.create(**SEEDED)).choices[0].text
            return await asyncio.gather(*(read_stream(client, **body) for body in bodies + seeded)), alone

    answers, seeded_alone = asyncio.run(main())
    assert [text for text, _ in answers] == [greedy[PROMPTS[i % 4]] for i in range(24)] + [seeded_alone] * 3
    assert {reason for _, reason in answers} == {"stop", "length"}


def test_prompts_that_need_more_than_the_cache_holds(real: RealServer, client: openai.OpenAI, llm: LLM) -> None:
    """16 times 6 blocks of 80: some give theirs back on the way and compute them again."""
    preempted = real.metrics("vllm:num_preemptions_total")[0]
    params = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)
    expected = [answer.outputs[0].text for answer in llm.generate(PROMPTS, params)]
    body: Any = {"prompt": list(PROMPTS * 4), "max_tokens": 90, "extra_body": {"ignore_eos": True}}
    done = client.completions.create(**GREEDY, **body)
    assert [choice.text for choice in done.choices] == expected * 4
    assert real.metrics("vllm:num_preemptions_total")[0] > preempted


# --- refusals ---------------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context(client: openai.OpenAI) -> None:
    for prompt in ([5] * 1600, "word " * 20_000):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**GREEDY, prompt=prompt, stream=True)
        assert refused.value.code == "context_length_exceeded" and refused.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**GREEDY, messages=[{"role": "user", "content": "word " * 20_000}])
    assert refused.value.code == "context_length_exceeded"


def test_wrong_ids_and_unknown_models(client: openai.OpenAI) -> None:
    for prompt in ([5, 4096], [[5], [-1]]):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**GREEDY, prompt=prompt)
        assert refused.value.param == "prompt" and "vocabulary of 4096" in refused.value.message
    for call in (
        lambda: client.completions.create(model="other", prompt="x"),
        lambda: client.chat.completions.create(model="other", messages=MESSAGES),  # type: ignore[arg-type]
        lambda: client.models.retrieve("other"),
    ):
        with pytest.raises(openai.NotFoundError) as missing:
            call()
        assert missing.value.code == "model_not_found"


# --- the other routes -------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == "tiny" and card == client.models.retrieve("tiny")
    assert card.max_model_len == 80 * 16, "the cache holds less than the model's context"  # type: ignore[attr-defined]


def test_tokenize_and_detokenize(real: RealServer, llm: LLM) -> None:
    text = "def naïve(x):\n\treturn '日本 🙂'\n"
    for special, before in ((True, "<|endoftext|>"), (False, "")):
        asked = {"prompt": text, "add_special_tokens": special, "return_token_strs": True}
        there = real.http.post("/tokenize", json=asked).json()
        assert there["tokens"] == llm.engine.tokenizer.encode(text, special)
        assert there["count"] == len(there["tokens"]) == len(there["token_strs"])
        assert real.http.post("/detokenize", json={"tokens": there["tokens"]}).json() == {"prompt": before + text}
    chat = real.http.post("/tokenize", json={"messages": MESSAGES}).json()
    back = real.http.post("/detokenize", json={"tokens": chat["tokens"]}).json()
    assert back == {"prompt": "<|endoftext|><|user|>def fibonacci(<|end|><|assistant|>"}


def test_counters_are_the_sums_of_the_usages(real: RealServer, client: openai.OpenAI) -> None:
    before = real.metrics(*COUNTERS)
    usages: list[Any] = []
    for body in ({}, {"n": 3, "seed": 1}, {"prompt": [PROMPTS[0], PROMPTS[3]]}, {"max_tokens": 0, "echo": True}):
        request: Any = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 20} | body
        usages.append(client.completions.create(**request).usage)
        *_, last = client.completions.create(**request, stream=True, stream_options={"include_usage": True})
        usages.append(last.usage)
    usages.append(client.chat.completions.create(**GREEDY, messages=MESSAGES, max_tokens=5).usage)  # type: ignore[call-overload]
    real.until_idle()
    prompt, generated, cached, ended = (now - then for now, then in zip(real.metrics(*COUNTERS), before, strict=True))
    assert prompt == sum(usage.prompt_tokens for usage in usages)
    assert generated == sum(usage.completion_tokens for usage in usages) > 0
    assert cached == sum(usage.prompt_tokens_details.cached_tokens for usage in usages) > 0
    assert ended == 2 * (1 + 3 + 2 + 1) + 1


# --- clients that leave -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_a_stream_frees_everything(real: RealServer, client: openai.OpenAI, n: int) -> None:
    before = real.metrics("vllm:request_success_total", finished_reason="abort")[0]
    stream = client.completions.create(**ENDLESS, n=n, stream=True)
    for _ in range(3 * n):
        next(stream)
    stream.close()
    real.until_idle()
    until(lambda: real.metrics("vllm:request_success_total", finished_reason="abort")[0] == before + n)


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_before_the_answer_frees_everything(real: RealServer, n: int) -> None:
    before = real.metrics("vllm:request_success_total", finished_reason="abort")[0]
    body = {"model": "tiny", "prompt": "import os\n", "max_tokens": 1200, "ignore_eos": True, "n": n}
    address = httpx.URL(real.url)
    with socket.create_connection((address.host, address.port), timeout=PATIENCE_S) as connection:
        connection.sendall(http_post("/v1/completions", body))
        until(lambda: real.metrics("vllm:num_requests_running")[0] == n)
    real.until_idle()
    until(lambda: real.metrics("vllm:request_success_total", finished_reason="abort")[0] == before + n)


def test_the_engine_says_why(client: openai.OpenAI, real: RealServer) -> None:
    """The answer's usage and the record of it, and that of a request that was turned away."""
    slo: Any = {"extra_body": {"ignore_eos": True, "slo": {"ttft_ms": 30_000, "why": True}}}
    usage: Any = (answer := client.completions.create(model="tiny", prompt="def f(x):\n", max_tokens=12, **slo)).usage
    why = usage.slo["why"]
    assert usage.slo["met"] is True and why["summary"].startswith("In time: ")
    assert (why["steps"], why["chunks"], why["sat_out"]) == (12, 1, 0)
    record = real.fresh(f"/v1/requests/{answer.id}").json()
    assert record["why"] == why and record["outcome"] == "met"
    first = next(phase["to_ms"] for phase in why["timeline"] if phase["phase"] == "prefill")
    assert first == record["seen"]["ttft_ms"] == usage.slo["ttft_ms"]

    hopeless: Any = {"extra_body": {"slo": {"ttft_ms": 0.01}}}
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(model="tiny", prompt="x", max_tokens=1, **hopeless)
    record = real.fresh(f"/v1/requests/{refused.value.request_id}").json()
    assert (record["status"], record["outcome"], record["why"]["verdict"]) == (429, "rejected", "idle")
    assert record["why"]["refused"]["hopeless"] and record["why"]["summary"].startswith("Rejected: 0.01 ms")
