"""/v1/completions through the openai client."""

import openai
import pytest
from openai import OpenAI

from roseinfer.core.errors import EngineDeadError, RequestFailedError
from roseinfer.core.outputs import FinishReason
from roseinfer.engine.api import SequenceChunk
from roseinfer.server.answer_shapes import TextCompletion
from tests.server.fake_engine import Wait
from tests.server.live import LiveServer


def test_text_usage_and_finish_reason(client: OpenAI, server: LiveServer) -> None:
    answer = client.completions.create(model="fake", prompt="hello world", max_tokens=3)
    assert answer.choices[0].text == "hello world,"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 3, 6)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.id.startswith("cmpl-")
    [request] = server.engine.requests
    assert request.prompt.ids == [0, *server.tokenizer.encode("hello world", add_special_tokens=False)]


def test_default_is_16_tokens(client: OpenAI, server: LiveServer) -> None:
    server.engine.reply = "hello " * 30
    answer = client.completions.create(model="fake", prompt="hello")
    assert answer.usage is not None and answer.usage.completion_tokens == 16
    assert server.engine.requests[0].prompt.params.max_tokens == 16


def test_end_of_text_is_stop(client: OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="hello", max_tokens=50)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == "hello world, def words"


def test_prompts_as_ids_and_lists(client: OpenAI, server: LiveServer) -> None:
    ids = server.tokenizer.encode("hello world")
    for prompt, expected in (
        (ids, [ids]),
        ([ids, [5]], [ids, [5]]),
        (["hello world", "def"], [ids, server.tokenizer.encode("def")]),
    ):
        server.engine.requests.clear()
        answer = client.completions.create(model="fake", prompt=prompt, max_tokens=2)
        assert [request.prompt.ids for request in server.engine.requests] == expected
        assert [choice.index for choice in answer.choices] == list(range(len(expected)))
        assert answer.usage is not None and answer.usage.prompt_tokens == sum(map(len, expected))
        assert answer.usage.completion_tokens == 2 * len(expected)


def test_choice_index_is_prompt_times_n_plus_sample(client: OpenAI, server: LiveServer) -> None:
    engine = server.engine

    def script(request):  # type: ignore[no-untyped-def]
        name = "hello" if request.prompt.ids[-1] == 5 else "world"
        samples = [engine.sample(request, i, f"{name} {i}") for i in range(request.n)]
        return [step for sample in reversed(samples) for step in sample]

    engine.script = script
    answer = client.completions.create(model="fake", prompt=[[5], [6]], n=2, max_tokens=50)
    assert [(c.index, c.text) for c in answer.choices] == [
        (0, "hello 0"), (1, "hello 1"), (2, "world 0"), (3, "world 1"),
    ]  # fmt: skip
    assert answer.usage is not None and answer.usage.prompt_tokens == 2, "each prompt counts once"
    ids = [request.request_id for request in engine.requests]
    assert len(set(ids)) == 2


def test_cached_tokens_are_summed_over_prompts(client: OpenAI, server: LiveServer) -> None:
    def script(request):  # type: ignore[no-untyped-def]
        steps = server.engine.default_script(request)
        for step in steps:
            step.cached_tokens = 1 if step.index == 0 else 2  # a fork finds what its sibling has computed
        return steps

    server.engine.script = script
    answer = client.completions.create(model="fake", prompt=[[5, 6], [6, 7]], n=2, max_tokens=2)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_echo(client: OpenAI, server: LiveServer) -> None:
    for prompt, text in (("Hi: ", "Hi: hello"), (server.tokenizer.encode("def"), "defhello")):
        answer = client.completions.create(model="fake", prompt=prompt, echo=True, max_tokens=1)
        assert answer.choices[0].text == text


def test_scoring_a_prompt(client: OpenAI, server: LiveServer) -> None:
    ids = server.tokenizer.encode("hello world", add_special_tokens=False)
    answer = client.completions.create(model="fake", prompt=[ids], echo=True, logprobs=1, max_tokens=0)
    choice = answer.choices[0]
    assert choice.text == "hello world"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["hello", " world"]
    assert choice.logprobs.token_logprobs == [None, -1.5]
    assert choice.logprobs.text_offset == [0, 5]
    assert choice.logprobs.top_logprobs is not None and choice.logprobs.top_logprobs[0] is None
    assert server.engine.requests[0].prompt.params.prompt_logprobs == 1
    assert answer.usage is not None and answer.usage.completion_tokens == 0


def test_logprobs(client: OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="x", logprobs=2, max_tokens=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.top_logprobs is not None
    assert logprobs.tokens == ["hello", " world"]
    assert logprobs.token_logprobs == [-1.5, -1.5]
    assert logprobs.text_offset == [0, 5]
    assert [list(top.values()) for top in logprobs.top_logprobs] == [[-0.5, -1.5]] * 2
    assert [name in top for name, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True)] == [True, True]


def test_the_chosen_token_is_added_to_the_alternatives(client: OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="x", logprobs=1, max_tokens=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.top_logprobs is not None
    assert len(logprobs.top_logprobs[0]) == 2 and logprobs.top_logprobs[0]["hello"] == -1.5
    none = client.completions.create(model="fake", prompt="x", logprobs=0, max_tokens=1).choices[0].logprobs
    assert none is not None and none.top_logprobs == [{"hello": -1.5}]


def test_echoed_offsets_go_on_behind_the_prompt(client: OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="wörld ", echo=True, logprobs=0, max_tokens=2)
    choice = answer.choices[0]
    assert choice.text == "wörld hello world" and choice.logprobs is not None and choice.logprobs.text_offset
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.text_offset[-2:] == [6, 11]
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert choice.text[offset:].startswith(token)


def test_every_sample_echoes_the_prompts_logprobs(client: OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="hello world", n=2, echo=True, logprobs=0, max_tokens=1)
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [None, -1.5, -1.5, -1.5]


def test_extensions(server: LiveServer) -> None:
    body = {
        "prompt": "hello world",
        "max_tokens": 1,
        "logprobs": 0,
        "prompt_logprobs": 2,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    answer = server.post("/v1/completions", body).json()
    TextCompletion.model_validate(answer)
    [choice] = answer["choices"]
    ids = server.tokenizer.encode("hello world")
    assert choice["prompt_token_ids"] == ids
    [token] = choice["token_ids"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}"]
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == len(ids)
    scored = choice["prompt_logprobs"][1]
    assert scored[str(ids[1])] == {"logprob": -1.5, "rank": 2, "decoded_token": "hello"}
    assert [entry["rank"] for entry in scored.values()] == [1, 2]


def test_stop_reason_names_what_ended_it(server: LiveServer) -> None:
    def script(request):  # type: ignore[no-untyped-def]
        [first, *_] = server.engine.default_script(request)
        first.finish_reason, first.stop_reason = "stop", request.prompt.params.stop[0]
        return [first]

    server.engine.script = script
    [choice] = server.post("/v1/completions", {"prompt": "x", "stop": "END"}).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")


def test_sampling_fields_reach_the_engine(server: LiveServer) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "frequency_penalty": 0.2,
        "presence_penalty": -0.3, "repetition_penalty": 1.1, "seed": -5, "min_tokens": 2,
        "include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False,
    }  # fmt: skip
    lists = {"stop": ["a", "b"], "stop_token_ids": [7, 8], "logit_bias": {"9": -100, "10": 1.5}}
    body = {"prompt": "x", "max_tokens": 5, "cache_salt": "tenant", "n": 3} | fields | lists
    assert server.post("/v1/completions", body).status_code == 200
    [request] = server.engine.requests
    assert {name: getattr(request.prompt.params, name) for name in fields} == fields
    assert request.prompt.params.stop == ("a", "b") and request.prompt.params.stop_token_ids == (7, 8)
    assert request.prompt.params.logit_bias == ((9, -100), (10, 1.5))
    assert (request.n, request.prompt.meta.cache_salt, request.prompt.params.max_tokens) == (3, "tenant", 5)


def test_null_is_not_given(server: LiveServer) -> None:
    names = ["temperature", "top_p", "stop", "logprobs", "seed", "logit_bias", "n", "stream", "suffix", "best_of"]
    answer = server.post("/v1/completions", {"prompt": "x"} | dict.fromkeys([*names, "tools", "nonsense"]))
    assert answer.status_code == 200 and "warnings" not in answer.json()
    params = server.engine.requests[0].prompt.params
    assert (params.temperature, params.top_p, params.stop, params.logprobs, params.seed) == (1.0, 1.0, (), None, None)


def test_engine_errors_are_statuses(client: OpenAI, server: LiveServer) -> None:
    server.engine.script = lambda request: [EngineDeadError("/secret/engine.sock is gone")]
    with pytest.raises(openai.InternalServerError) as dead:
        client.completions.create(model="fake", prompt="x")
    assert dead.value.code == "engine_dead" and "secret" not in str(dead.value)
    server.engine.script = lambda request: [RequestFailedError("nan in /secret")]
    with pytest.raises(openai.InternalServerError) as failed:
        client.completions.create(model="fake", prompt="x")
    assert failed.value.code == "request_failed" and "secret" not in str(failed.value)


def test_one_failed_prompt_ends_the_others(client: OpenAI, server: LiveServer) -> None:
    def script(request):  # type: ignore[no-untyped-def]
        return [RequestFailedError("no")] if request.prompt.ids == [6] else [Wait()]

    server.engine.script = script
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="fake", prompt=[[5], [6], [7]])
    server.until(lambda: not server.engine.live)
    assert len(server.engine.cancelled) == 2


def test_a_bug_is_a_500_without_details(server: LiveServer) -> None:
    server.engine.script = lambda request: [ZeroDivisionError("/secret")]
    answer = server.post("/v1/completions", {"prompt": "x"})
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text and answer.headers["x-request-id"]


def test_an_end_that_no_request_asks_for_is_an_error(server: LiveServer) -> None:
    server.engine.script = lambda request: [SequenceChunk(0, finish_reason=FinishReason.ABORT)]
    answer = server.post("/v1/completions", {"prompt": "x"})
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "request_failed"
