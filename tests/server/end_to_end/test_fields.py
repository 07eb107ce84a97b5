"""Fields and errors that clients rely on, with the `openai` client, the embedded model and the real engine."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from roseinfer import LLM, SamplingParams
from tests.server.real_server import RealServer

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0.0}
PROMPTS = ["def fibonacci(", "import os\n", "class Stack:\n", "def read(path):\n    "]
MESSAGES: list[Any] = [{"role": "user", "content": "def fibonacci("}]
PARAMS = SamplingParams(max_tokens=40, temperature=0.0)


def streamed(client: openai.OpenAI, **body: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in client.completions.create(**body, stream=True))


# --- the context ------------------------------------------------------------------------------------------------


def too_long(client: openai.OpenAI) -> Iterator[openai.BadRequestError]:
    """Every way to ask for more than the context."""
    text = "word " * 3000
    chat = client.chat.completions.create
    calls = [
        lambda stream: client.completions.create(**GREEDY, prompt=[5] * 1600, stream=stream),
        lambda stream: client.completions.create(**GREEDY, prompt=text, stream=stream),
        lambda stream: chat(**GREEDY, messages=[{"role": "user", "content": text}], stream=stream),
    ]
    for call in calls:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                call(stream)
            yield refused.value


def test_too_long_is_said_in_the_words_that_clients_look_for(client: openai.OpenAI) -> None:
    context = client.models.retrieve("tiny").max_model_len  # type: ignore[attr-defined]
    errors = list(too_long(client))
    assert len(errors) == 6
    for error in errors:
        assert error.code == "context_length_exceeded"
        # LiteLLM's ContextWindowExceededError: this text, in any case of letters, anywhere in the error.
        assert "this model's maximum context length is" in str(error).lower()
        (told,) = re.findall(r"maximum context length is (\d+) tokens", error.message)
        assert int(told) == context


def test_prompt_and_output_together_may_exceed_the_context(client: openai.OpenAI) -> None:
    """The output gets what is left."""
    done = client.completions.create(**GREEDY, prompt=[5] * 1275, max_tokens=100, extra_body={"ignore_eos": True})
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None and done.usage.total_tokens == 1280


def test_truncated_prompts(client: openai.OpenAI, llm: LLM) -> None:
    text = "".join(f"value_{i} = {i}\n" for i in range(400))
    for truncate, kept in ((30, 30), (-1, 1280 - 10)):
        params = replace(PARAMS, max_tokens=10, truncate_prompt_tokens=truncate)
        body: dict[str, Any] = {**GREEDY, "prompt": text, "max_tokens": 10}
        body["extra_body"] = {"truncate_prompt_tokens": truncate}
        done = client.completions.create(**body)
        assert done.usage is not None and done.usage.prompt_tokens == kept
        assert done.choices[0].text == llm.generate(text, params)[0].outputs[0].text == streamed(client, **body)
    chat: Any = client.chat.completions.create(
        **GREEDY,
        messages=[{"role": "user", "content": text}],
        max_tokens=5,
        extra_body={"truncate_prompt_tokens": 50},
    )
    assert chat.usage.prompt_tokens == 50 and chat.choices[0].message.content


# --- what may be sampled ----------------------------------------------------------------------------------------


def banned_word(text: str) -> str:
    """The longest plain word of a text."""
    return max(re.findall(r"(?<= )[a-z]{2,}(?= |\n|\()", text), key=len)


def holds(tokens: list[int], sequences: list[tuple[int, ...]]) -> bool:
    return any(tuple(tokens[i : i + len(ids)]) == ids for ids in sequences for i in range(len(tokens)))


def test_bad_words(client: openai.OpenAI, llm: LLM) -> None:
    """Words are banned as the tokenizer writes them. The model may find another spelling."""
    free = llm.generate(PROMPTS[0], PARAMS)[0].outputs[0]
    word = banned_word(free.text)
    spellings = llm.engine.tokenizer.spellings(word)
    assert holds(free.token_ids, spellings)
    extra = {"bad_words": [word], "return_token_ids": True}
    body = {**GREEDY, "prompt": PROMPTS[0], "max_tokens": 40, "extra_body": extra}
    choice: Any = client.completions.create(**body, logprobs=1).choices[0]
    assert not holds(choice.token_ids, spellings)
    (expected,) = llm.generate(PROMPTS[0], replace(PARAMS, bad_words=[word]))[0].outputs
    assert choice.text == expected.text == streamed(client, **body)
    # Log probabilities are the model's own: what was banned is still the likeliest where it would have come.
    scores = zip(choice.logprobs.top_logprobs, choice.logprobs.tokens, strict=True)
    passed_over = [next(iter(top)) for top, token in scores if token not in list(top)[:1]]
    assert any(llm.engine.tokenizer.token_str(ids[-1]) == passed_over[0] for ids in spellings)


@pytest.mark.exhaustive
def test_bad_words_in_every_sample_and_under_preemption(real: RealServer, client: openai.OpenAI, llm: LLM) -> None:
    """16 samples of 110 tokens need more than the cache holds."""
    plain = replace(PARAMS, n=16, max_tokens=110, temperature=0.8, seed=5, ignore_eos=True)
    few = replace(plain, n=3, max_tokens=40)
    words = tuple({banned_word(sample.text) for sample in llm.generate(PROMPTS[2], few)[0].outputs})
    expected = llm.generate(PROMPTS[2], replace(plain, bad_words=words))[0].outputs
    preempted = real.metrics("vllm:num_preemptions_total")[0]
    done = client.completions.create(
        model="tiny",
        prompt=PROMPTS[2],
        max_tokens=110,
        temperature=0.8,
        seed=5,
        n=16,
        extra_body={"bad_words": list(words), "ignore_eos": True},
    )
    assert real.metrics("vllm:num_preemptions_total")[0] > preempted
    assert [choice.text for choice in done.choices] == [sample.text for sample in expected]
    banned = [ids for word in words for ids in llm.engine.tokenizer.spellings(word)]
    assert len(words) > 1 and not any(holds(sample.token_ids, banned) for sample in expected)


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_among_allowed_tokens(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    choices = ["return", "class", "import"]
    ids = [llm.engine.tokenizer.encode(choice, add_special_tokens=False) for choice in choices]
    assert all(len(one) == 1 for one in ids), "each is one token"
    done: Any = client.chat.completions.create(
        **GREEDY,
        messages=MESSAGES,
        max_tokens=6,
        stream=stream,
        extra_body={"allowed_token_ids": [one[0] for one in ids]},
    )
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in done)
    else:
        text = done.choices[0].message.content
        assert (done.choices[0].finish_reason, done.usage.completion_tokens) == ("length", 6)
    assert re.fullmatch(rf"({'|'.join(choices)}){{6}}", text)


def test_what_leaves_nothing_to_sample_fails_alone(client: openai.OpenAI) -> None:
    for fields in ({"allowed_token_ids": []}, {"allowed_token_ids": [4096]}, {"bad_words": [""]}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**GREEDY, prompt="x", extra_body=fields)
        assert refused.value.param == next(iter(fields))
    with pytest.raises(openai.BadRequestError) as failed:
        nothing_left = {"allowed_token_ids": _only("a", client), "bad_words": ["a"]}
        client.completions.create(**GREEDY, prompt="x", extra_body=nothing_left)
    assert failed.value.code == "no_token_allowed"
    assert client.completions.create(**GREEDY, prompt="x", max_tokens=2).choices[0].text


def _only(word: str, client: openai.OpenAI) -> list[int]:
    """The one token of a word."""
    answer = client.post("../tokenize", body={"prompt": word, "add_special_tokens": False}, cast_to=dict[str, Any])
    assert answer["count"] == 1
    return answer["tokens"]  # type: ignore[no-any-return]


# --- other fields -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"documents": [{"title": "a", "text": "b"}]}, {"functions": []}, {"echo": True},
        {"truncation_side": "right"}, {"repetition_detection": {"max_pattern_size": 8, "min_count": 3}},
        {"return_prompt_text": True}, {"include_reasoning": False}, {"ebnf": "x"},
        {"use_beam_search": True}, {"chat_template": "{{ messages }}"},
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**GREEDY, messages=MESSAGES, extra_body=fields)
    assert (refused.value.param, refused.value.code) == (name, "unsupported_field")
    assert f"{name} is not supported: " in refused.value.message


def test_neutral_values_and_unknown_fields_pass(client: openai.OpenAI) -> None:
    neutral = {"documents": [], "echo": False, "truncation_side": "left", "length_penalty": 1.0, "verbosity": "medium"}
    done: Any = client.chat.completions.create(
        **GREEDY, messages=MESSAGES, max_tokens=2, reasoning_effort=None, extra_body={**neutral, "store": True}
    )
    assert done.warnings == ["store"]


def test_a_developer_speaks_like_the_system(client: openai.OpenAI) -> None:
    def answer(role: str) -> Any:
        messages: list[Any] = [{"role": role, "content": "Write Python."}, *MESSAGES]
        return client.chat.completions.create(**GREEDY, messages=messages, max_tokens=16)

    developer, system = answer("developer"), answer("system")
    assert developer.choices[0].message.content == system.choices[0].message.content
    assert developer.usage.prompt_tokens == system.usage.prompt_tokens > 10


def test_many_stop_strings(client: openai.OpenAI, llm: LLM) -> None:
    """Evaluation harnesses send many stop strings."""
    whole = llm.generate(PROMPTS[0], PARAMS)[0].outputs[0].text
    stops = [f"\nNever {i}" for i in range(63)] + [whole[10:13]]
    done = client.completions.create(**GREEDY, prompt=PROMPTS[0], max_tokens=40, stop=stops)
    assert done.choices[0].text == whole[: whole.index(stops[-1])]
    with pytest.raises(openai.BadRequestError, match="at most 64"):
        client.completions.create(**GREEDY, prompt="x", stop=[*stops, "more"])


# --- other routes -----------------------------------------------------------------------------------------------


def test_what_clients_ask_of_the_tokenizer(real: RealServer, llm: LLM) -> None:
    info = real.http.get("/tokenizer_info").json()
    assert info["chat_template"] == llm.engine.tokenizer.chat_template
    assert {name: info[name] for name in llm.engine.tokenizer.special_tokens} == llm.engine.tokenizer.special_tokens


def test_a_wrong_method_names_the_right_ones(real: RealServer) -> None:
    answer = real.http.put("/ping")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD, POST")
